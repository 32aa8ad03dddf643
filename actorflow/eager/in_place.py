"""Ops that change global tensors in place: the parts and the bases of views change, layouts stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.global_tensor import GlobalTensor, spec_of, wrap
from actorflow.eager.layout import everywhere
from actorflow.eager.linked_views import LinkedView, write_back
from actorflow.eager.op_plans import device_of, direct
from actorflow.eager.perform import operands_of, perform, spec_seen
from actorflow.eager.redistribution import part_in
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.torch_internals import without_dispatch


def run_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that changes some of its arguments, and return what it returns."""
    changed: list[GlobalTensor] = written_tensors(func, args, kwargs)
    computes = _computes(func)
    if torch.Tag.inplace_view in func.tags and computes is not None:
        return _reshaped(func, computes, args, kwargs)
    if computes is not None and len(changed) == 1 and changed[0] is args[0]:
        self = args[0]
        made = perform(computes, args, kwargs, changed=func)
        if made is not self:
            assign(self, made)
        elif isinstance(self, LinkedView):
            write_back(self)
        return self
    return _change_whole(func, args, kwargs, changed)


def _reshaped(func: Any, computes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``transpose_`` and similar ops, which replace a tensor by a view of itself."""
    self = args[0]
    new = computes(*args, **kwargs)
    if isinstance(new, LinkedView) and (self._is_view() or isinstance(self, LinkedView)):
        raise LayoutError(
            f"{func} on a view that lies as {self._spec.layout} would cut it from its base: clone() it first"
        )
    with without_dispatch():
        func(*args, **kwargs)
    self._local, self._spec = new._local, new._spec  # its lineage becomes that of the op
    return self


def assign(self: GlobalTensor, value: GlobalTensor) -> None:
    """Copy the values of ``value`` into ``self``, which keeps its layout and dtype; their shapes are equal."""
    spec, new = self._spec, value._spec
    if new.dtype != spec.dtype and new.layout is not spec.layout:
        value = torch.ops.aten._to_copy.default(value, dtype=spec.dtype)
    part = part_in(value, spec.layout, "a change in place")
    if spec.here:
        self._local.copy_(part)
    if isinstance(self, LinkedView):
        write_back(self)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an op changes; raises LayoutError if one is plain."""
    found: list[Any] = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(a.name)
            found.extend(value if isinstance(value, list | tuple) else [value])
    if any(not isinstance(t, GlobalTensor) for t in found if t is not None):
        raise LayoutError(
            f"{func}: a plain tensor was to be changed to what global tensors give; a global tensor was expected "
            f"there, or plain values: x.to_local(), or x.numpy() for the whole"
        )
    return [t for t in found if t is not None]


# in-place op → the op that computes its result, where the overload of the same name is another op
_OTHERWISE = {
    torch.ops.aten.pow_.Scalar: torch.ops.aten.pow.Tensor_Scalar,
    torch.ops.aten.pow_.Tensor: torch.ops.aten.pow.Tensor_Tensor,
    torch.ops.aten.transpose_.default: torch.ops.aten.transpose.int,
    torch.ops.aten.float_power_.Scalar: torch.ops.aten.float_power.Tensor_Scalar,
    torch.ops.aten.float_power_.Tensor: torch.ops.aten.float_power.Tensor_Tensor,
}


def _computes(func: Any) -> Any:
    """The functional op that returns the new value of an in-place op's first argument; None if there is none."""
    if func in _OTHERWISE:
        return _OTHERWISE[func]
    namespace, _, name = func._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if packet is None:
        return None
    kind = func._schema.overload_name or "default"
    found = getattr(packet, kind) if kind in packet.overloads() else None
    return found if found is not None and _takes(found) == _takes(func) else None


def _takes(func: Any) -> list[tuple[str, str]]:
    """Names and types of an op's arguments: ``polygamma`` has those of ``polygamma_`` in another order."""
    return [(a.name, str(a.type)) for a in func._schema.arguments]


def _change_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Sequence[GlobalTensor]) -> Any:
    """Run an op on whole copies of its operands, then copy the changed ones back."""
    operands, _ = operands_of(args, kwargs)
    first = changed[0]._spec
    place = first.layout.placement
    if any(rank not in place for rank in first.comm.all_ranks):
        place = type(place)(place.type, first.comm.all_ranks, (first.comm.world,))
    target = everywhere(place)
    parts = []
    for t in operands:
        part = part_in(t, target, str(func))
        parts.append(part.clone() if any(t is c for c in changed) else part)
    made = direct(func)(parts, args, kwargs)
    where = {id(t): part for t, part in zip(operands, parts, strict=True)}
    for t in changed:
        part, spec = where[id(t)], t._spec
        if tuple(part.shape) != spec.shape:
            raise LayoutError(
                f"{func} gives a tensor of shape {tuple(part.shape)} another shape than it had, {spec.shape}; a global "
                f"tensor keeps its shape: take the result as a new tensor"
            )
        assign(t, wrap(part, spec_of(spec.comm, target, spec.shape, None, part.dtype, device_of([t], place))))
    by_part = {id(part): t for t, part in zip(operands, parts, strict=True) if any(t is c for c in changed)}

    def result(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in by_part:
            return by_part[id(x)]
        found = spec_seen(x, operands)
        return wrap(x, found) if found is not None else x

    if isinstance(made, list | tuple):
        return type(made)(map(result, made))
    return result(made)
