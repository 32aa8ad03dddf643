"""``flow.to_global`` and ``flow.to_local`` for modules and for trees of tensors."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actorflow.eager import convert
from actorflow.eager.communicator import CollectiveLabel
from actorflow.eager.convert import from_whole, moved
from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.layout import Layout, layout_of
from actorflow.eager.plain_tensors import IS_GLOBAL
from actorflow.standins.owned_tensor import note_whole
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P
from actorflow_compiler.hints.tags import tracing

__all__ = ["to_global", "to_local"]

SbpOf = Callable[[str, Tensor], Any]
OWN_ATTRIBUTES = ("_is_param", "_actorflow_hooked")  # of a tensor, that are torch's or ours, not the script's


def to_global(x: Any, placement: Placement | None = None, sbp: Any = None, **options: Any) -> Any:
    r"""Make a tensor, the tensors of a tree (lists, tuples, dicts), or a module global.

    Each tensor is converted by ``Tensor.to_global``, with the same ``options``; other values stay as they are.  For a
    tree ``sbp`` may be a function of (tree, tensor) that returns one, and ranks outside of the placement may give
    anything, such as None.

    The parameters and buffers of a module are whole tensors, as a script that runs on one device makes them: those
    of the placement's first rank are used.  ``sbp`` is one sbp for all; a dict from regular expressions,
    which must match whole names, to sbps (the last that matches counts, what none matches is broadcast); or a
    function of (name, tensor) that returns one.  The module is changed and returned; in its forward, plain tensors
    count as equal on every rank.  Make the optimizer afterwards: its state has the layouts of the parameters.

    >>> flow.to_global(model, flow.placement("cpu", [[0, 1], [2, 3]]), {r".*c_fc\.weight": [B, S(1)]})

    Raises LayoutError for a pattern that matches nothing, and for an sbp that does not fit a tensor or the mesh.
    """
    if isinstance(x, nn.Module):
        return _module_to_global(x, placement, sbp)
    given = _given_everywhere(x, placement)

    def one(t: Tensor) -> Tensor:
        entry = sbp(given, t) if callable(sbp) and not isinstance(sbp, type(B) | type(P)) else sbp
        return convert.to_global(t, placement, entry, **options)

    return pytree.tree_map_only(Tensor, one, given)


def to_local(x: Any, *, copy: bool = False) -> Any:
    """This rank's parts of the global tensors of a tree; other values stay as they are.

    They share the memory of the global tensors, unless ``copy``.  The parameters and buffers of a module become plain
    ones, each rank's parts, without their gradients; the module is changed and returned.
    """
    if isinstance(x, nn.Module):
        return _module_to_local(x)

    def one(t: GlobalTensor) -> Tensor:
        part = convert.to_local(t)
        return part.clone() if copy else part

    return pytree.tree_map_only(GlobalTensor, one, x)


_FORM = CollectiveLabel.of("to_global of a tree: its form is told to ranks outside of the placement")


def _given_everywhere(x: Any, placement: Any) -> Any:
    """The tree, on ranks outside of the placement that of its first rank with tensors of no values.

    What those give does not count, as it is with the values of their tensors.  Collective where there are such ranks.
    """
    if not isinstance(placement, Placement) or isinstance(x, Tensor) or tracing():
        return x
    if any(isinstance(leaf, GlobalTensor) for leaf in pytree.tree_leaves(x)):
        return x
    comm = current()
    comm.check_placement(placement)
    if all(rank in placement for rank in comm.all_ranks):
        return x
    first = placement.ranks[0]
    mine = b""
    if comm.rank == first:
        whole = [convert.is_of_a_plan(t) for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
        mine = pickle.dumps((pytree.tree_map_only(Tensor, _emptied, x), whole))
    told = comm.gather(_FORM, comm.all_ranks, mine)[first]
    if comm.rank in placement:
        return x
    tree, whole = pickle.loads(told)
    of_each = iter(whole)
    return pytree.tree_map_only(Tensor, lambda t: note_whole(t) if next(of_each) else t, tree)


def _emptied(t: Tensor) -> Tensor:
    """A tensor of the same shape, without values of its own."""
    return torch.empty((), dtype=t.dtype).expand(t.shape).requires_grad_(t.requires_grad)


def _module_to_global(module: nn.Module, placement: Placement | None, sbp: Any) -> nn.Module:
    if placement is None:
        raise LayoutError("to_global of a module was given no placement; write flow.to_global(model, placement, sbp)")
    how = _sbp_of(module, sbp)
    made: dict[int, GlobalTensor] = {}  # tied parameters stay tied
    for prefix, child in module.named_modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in list(store.items()):
                if tensor is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                if id(tensor) not in made:
                    entry = how(full, tensor)
                    whole = (B,) * len(placement.hierarchy)
                    layout = layout_of(placement, whole if entry is None else entry, tensor.shape, full)
                    made[id(tensor)] = _converted(tensor, layout)
                store[name] = made[id(tensor)]
        if not child.__dict__.get(IS_GLOBAL):
            child.__dict__[IS_GLOBAL] = True
            child.register_load_state_dict_pre_hook(_take_plain)
    return module


def _module_to_local(module: nn.Module) -> nn.Module:
    made: dict[int, Any] = {}  # tied parameters stay tied
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in list(store.items()):
                if not isinstance(tensor, GlobalTensor):
                    continue
                if id(tensor) not in made:
                    part = convert.to_local(tensor).detach().clone()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if is_parameter else part
                store[name] = made[id(tensor)]
        child.__dict__.pop(IS_GLOBAL, None)
    return module


def _converted(tensor: Tensor, layout: Layout) -> GlobalTensor:
    """A parameter or buffer as a global one, without its gradient."""
    value: Any
    value = moved(tensor, layout) if isinstance(tensor, GlobalTensor) else from_whole(tensor, layout, from_first=True)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        value.requires_grad_()
    for key, extra in tensor.__dict__.items():
        if key not in OWN_ATTRIBUTES:
            value.__dict__.setdefault(key, extra)
    return value  # type: ignore[no-any-return]


def _sbp_of(module: nn.Module, sbp: Any) -> SbpOf:
    """A function (name, tensor) → sbp of a module's parameters and buffers."""
    if sbp is None:
        raise LayoutError("to_global of a module was given no sbp; flow.sbp.broadcast keeps every parameter whole")
    if isinstance(sbp, Mapping):
        patterns = {re.compile(p): entry for p, entry in sbp.items()}
        names = [n for n, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
        for pattern in patterns:
            if not any(pattern.fullmatch(n) for n in names):
                raise LayoutError(
                    f"to_global: the pattern {pattern.pattern!r} matches no parameter or buffer of "
                    f"{type(module).__name__}; it has to match a whole name, such as {', '.join(names[:3])}"
                )

        def by_name(name: str, tensor: Tensor) -> Any:
            found = [entry for pattern, entry in patterns.items() if pattern.fullmatch(name)]
            return found[-1] if found else None

        return by_name
    if callable(sbp) and not isinstance(sbp, type(B) | type(P)):
        function: SbpOf = sbp
        return function
    return lambda name, tensor: sbp


def _take_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: make its whole tensors global, in the layouts of the module's tensors."""
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        given = state.get(prefix + name)
        if not isinstance(own, GlobalTensor) or not isinstance(given, Tensor) or isinstance(given, GlobalTensor):
            continue
        if given.shape == own.shape:
            state[prefix + name] = from_whole(given, own._spec.layout, own._spec.comm)
