"""Attach ``to_global``, ``to_local``, ``placement``, ``sbp``, ``is_global`` and others to ``torch.Tensor``.

``new_zeros`` and so on take a placement and an SBP.  ``torch.nn.Module`` gets ``to_global`` and ``to_local``, its
``to`` knows ``nn.graph.GraphModule``, and a module that a graph has gets ``config``.  Nothing else in torch is changed.
The implementations are in rooms that are imported on first use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actorflow.support.after_import import after_import
from actorflow_compiler.core.errors import NotGlobal
from actorflow_compiler.core.missing_cuda import note_missing_cuda

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["attach", "attach_with_torch"]


def to_global(
    self: Tensor,
    placement: Any = None,
    sbp: Any = None,
    grad_sbp: Any = None,
    check_meta: bool | None = None,
    copy: bool = False,
) -> Tensor:
    """See ``actorflow.eager.convert.to_global``; with ``copy``, the result shares no memory with the tensor."""
    from actorflow.eager.convert import to_global as convert

    return convert(self.clone() if copy else self, placement, sbp, grad_sbp, check_meta)


def local_to_global(
    self: Tensor, placement: Any = None, sbp: Any = None, check_meta: bool | None = None, copy: bool = False
) -> Tensor:
    """``to_global`` of a plain tensor; raises NotGlobal for a global one."""
    if self.is_global:  # type: ignore[attr-defined]
        raise NotGlobal("local_to_global() was called on a global tensor; a plain one was expected: see x.is_local")
    return to_global(self, placement, sbp, None, check_meta, copy)


def global_to_global(
    self: Tensor, placement: Any = None, sbp: Any = None, grad_sbp: Any = None, check_meta: bool = False,
    copy: bool = False,
) -> Tensor:  # fmt: skip
    """``to_global`` of a global tensor, whose shape and dtype all ranks know; raises NotGlobal for a plain one."""
    if not self.is_global:  # type: ignore[attr-defined]
        raise NotGlobal("global_to_global() was called on a plain tensor; a global one was expected: see x.is_global")
    return to_global(self, placement, sbp, grad_sbp, check_meta, copy)


def to_local(self: Tensor, *, copy: bool = False) -> Tensor:
    """See ``actorflow.eager.convert.to_local``; with ``copy``, the part shares no memory with the tensor."""
    from actorflow.eager.convert import to_local as convert

    part = convert(self)
    return part.clone() if copy else part


def _kept_layout(self: Tensor) -> Any:
    """How a tensor of a job lay that was a global one; None for any other tensor, and while a step is captured."""
    from actorflow.standins.beside import kept_layout
    from actorflow_compiler.hints.tags import tracing

    kept = kept_layout(self)
    return None if kept is None or tracing() else kept


def _placement(self: Tensor) -> Any:
    """The placement of a global tensor, or of what was one until a job took it over; raises NotGlobal for others."""
    if (kept := _kept_layout(self)) is not None:
        return kept[0]
    raise NotGlobal("a plain tensor has no placement; a global tensor was expected: x.to_global(placement, sbp)")


def _sbp(self: Tensor) -> Any:
    """The layout of a global tensor on its placement, one entry for each axis of the mesh.

    Raises NotGlobal for a plain tensor.
    """
    if (kept := _kept_layout(self)) is not None:
        return kept[1]
    raise NotGlobal("a plain tensor has no sbp; a global tensor was expected: x.to_global(placement, sbp)")


def _new(name: str, torchs: Any) -> Callable[..., Tensor]:
    """Torch's method ``name``, such as "new_zeros", which also takes a placement and an sbp."""

    @functools.wraps(torchs)
    def method(self: Tensor, *args: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
        if placement is None and sbp is None and not (name == "new_tensor" and self.is_global):  # type: ignore[attr-defined]
            plain: Tensor = torchs(self, *args, **options)
            return plain
        from actorflow.eager.constructors import new

        return new(name, self, args, placement, sbp, options)

    return method


def _module_to_global(self: Module, placement: Any = None, sbp: Any = None, **options: Any) -> Module:
    """See ``flow.to_global``."""
    from actorflow.eager.modules import to_global as convert

    made: Module = convert(self, placement, sbp, **options)
    return made


def _module_to_local(self: Module) -> Module:
    """See ``flow.to_local``."""
    from actorflow.eager.modules import to_local as convert

    made: Module = convert(self)
    return made


class _ConfigInGraph:
    """``module.config`` of a module that an ``nn.Graph`` has, where neither it nor its class has a ``config``."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        from actorflow.standins.beside import BESIDE, CONFIG, beside

        if module is not None and BESIDE in module.__dict__:
            own = (module.__dict__.get(kind, {}) for kind in ("_modules", "_parameters", "_buffers"))
            make = None if any("config" in names for names in own) else (beside(module) or {}).get(CONFIG)
            if make is not None:
                return make()
        raise AttributeError("config")  # torch's lookup goes on, and raises its own


def _attach_to_modules(module: Any) -> None:
    module.config = _ConfigInGraph()
    module.to_global, module.to_local = _module_to_global, _module_to_local
    module.to_consistent = _module_to_global
    torch_to = module.to

    @functools.wraps(torch_to)
    def to(self: Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], type) and not kwargs:
            if args[0] is module:  # OneFlow's way from the graph's view of a module to the module
                return self
            settings = getattr(args[0], "of_module", None)
            if settings is not None:
                return settings(self)
        return torch_to(self, *args, **kwargs)

    module.to = to
    torch_dir = module.__dir__

    @functools.wraps(torch_dir)
    def names(self: Module) -> Any:
        found = torch_dir(self)  # of which torch.compile reads each
        return found if hasattr(self, "config") else [name for name in found if name != "config"]

    module.__dir__ = names


def _rebuild_global_tensor(*args: Any) -> Tensor:
    """See ``actorflow.eager.tensor_methods.rebuild``: a global tensor from a pickle, whose room may not be imported."""
    from actorflow.eager.tensor_methods import rebuild

    made: Tensor = rebuild(*args)
    return made


def attach() -> None:
    """Attach the methods and properties to ``torch.Tensor`` and ``torch.nn.Module``; seed ranks of torch's launcher."""
    import torch

    tensor: Any = torch.Tensor
    if not hasattr(torch.nn.Module, "to_global"):
        _attach_to_modules(torch.nn.Module)
        note_missing_cuda()
        for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
            setattr(tensor, name, _new(name, getattr(tensor, name)))
    tensor.to_global, tensor.to_local = to_global, to_local
    tensor.placement, tensor.sbp = property(_placement), property(_sbp)
    tensor.is_global = property(lambda self: _kept_layout(self) is not None)
    tensor.is_local = property(lambda self: not self.is_global)
    tensor.local_to_global, tensor.global_to_global = local_to_global, global_to_global
    tensor.to_consistent, tensor.is_consistent = to_global, property(lambda self: self.is_global)  # older names
    if "WORLD_SIZE" in os.environ:
        from actorflow.rendezvous.seeding import seed_ranks_of_torchs_launcher

        seed_ranks_of_torchs_launcher()
    made = (_rebuild_global_tensor, "actorflow.eager.tensor_methods.rebuild")
    torch.serialization.add_safe_globals([made])  # torch.load reads global tensors with weights_only


def attach_with_torch() -> None:
    """Attach them as soon as torch is imported, without importing it here."""
    after_import("torch", attach)
