"""Modules with global tensors in a job: their values become plain tensors, and where and how they lie become hints.

A job owns its variables, and lays them out as its hints say, so the placement and sbp that the script has given to
parameters and buffers are all that is taken of their being global.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.modules import OWN_ATTRIBUTES
from actorflow.eager.plain_tensors import IS_GLOBAL
from actorflow.standins.beside import WAS_GLOBAL, beside, keep_layout
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B
from actorflow_compiler.hints.hints import distribute, place

__all__ = ["adopt_global_state"]


def adopt_global_state(
    modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], world: int
) -> Mapping[int, Tensor]:
    """Make the global tensors of modules, and those of their optimizers, plain ones; collective where there are some.

    Their layouts become those of ``flow.distribute``, and their placements those of ``flow.place``.  It is noted with
    the modules, as jobs over them give global tensors.  Returns the plain tensors by the ids of the global ones.
    """
    plain: dict[int, Tensor] = {}  # by id of the global tensor; tied ones stay tied
    kept: list[Tensor] = []  # the global ones, whose ids are in use
    for module in modules:
        placements: dict[int, Placement] = {}  # by id of the module that has the tensor
        layouts: dict[str, Any] = {}
        for prefix, child in module.named_modules():
            for name, tensor in _global_tensors(child):
                if id(tensor) not in plain:
                    kept.append(tensor)
                    plain[id(tensor)] = _whole(tensor)
                placements[id(child)] = tensor.placement
                if any(entry != B for entry in tensor.sbp):
                    layouts[re.escape(f"{prefix}.{name}" if prefix else name)] = tuple(tensor.sbp)
                setattr(child, name, plain[id(tensor)])
            child.__dict__.pop(IS_GLOBAL, None)
            if id(child) in placements:
                kept_with = beside(child)
                assert kept_with is not None  # modules have a __dict__
                kept_with[WAS_GLOBAL] = True
        for placed, placement in _placed(module, placements):
            if placement.ranks != tuple(range(world)) or len(placement.hierarchy) > 1:
                place(placed, {"": placement})
        if layouts:
            distribute(module, layouts)
    for optimizer in optimizers if plain else ():
        _take_plain_parameters(optimizer, plain)
    return plain


def _global_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own: list[tuple[str, Any]] = [*module.named_parameters(recurse=False, remove_duplicate=False)]
    own += module.named_buffers(recurse=False, remove_duplicate=False)
    return ((name, tensor) for name, tensor in own if isinstance(tensor, GlobalTensor))


def _whole(tensor: Any) -> Tensor:
    """The whole as a plain tensor of the same kind, with its gradient and what the script has attached to it.

    How it lay is noted with it, for scripts that ask.
    """
    whole: Tensor = tensor.whole().detach().clone()
    if isinstance(tensor, nn.Parameter):
        whole = nn.Parameter(whole, tensor.requires_grad)
    keep_layout(whole, tensor.placement, tensor.sbp)
    if tensor.is_leaf and tensor.grad is not None:
        whole.grad = _whole(tensor.grad) if isinstance(tensor.grad, GlobalTensor) else tensor.grad
    for key, extra in tensor.__dict__.items():
        if key not in OWN_ATTRIBUTES:
            whole.__dict__.setdefault(key, extra)
    return whole


def _placed(module: nn.Module, placements: Mapping[int, Placement]) -> Iterator[tuple[nn.Module, Placement]]:
    """The outermost modules all of whose tensors are on one placement, and that placement."""
    found = {placements[id(m)] for m in module.modules() if id(m) in placements}
    if len(found) == 1:
        yield module, found.pop()
    elif found:
        for child in module.children():
            yield from _placed(child, placements)


def _take_plain_parameters(optimizer: Optimizer, plain: Mapping[int, Tensor]) -> None:
    def of(parameter: Tensor) -> Tensor:
        return plain.get(id(parameter), parameter)

    state = {of(p): pytree.tree_map_only(GlobalTensor, _whole, kept) for p, kept in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
    for group in optimizer.param_groups:
        group["params"] = [of(parameter) for parameter in group["params"]]
