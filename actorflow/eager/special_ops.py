"""Handlers of ops on global tensors that differ from the op on each part; fills ``dispatch.HANDLERS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.communicator import CollectiveLabel
from actorflow.eager.dispatch import CHANGE_PLAIN, HANDLERS, Handler
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of, wrap
from actorflow.eager.in_place import assign
from actorflow.eager.layout import Layout, everywhere, has_terms, local_shape
from actorflow.eager.linked_views import LinkedView, write_back
from actorflow.eager.op_cache import CACHE
from actorflow.eager.op_plans import is_spread
from actorflow.eager.perform import as_whole, operands_of
from actorflow.eager.redistribution import part_in
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P
from actorflow_compiler.substitutes.decompositions import BATCH_NORM, TABLE
from actorflow_compiler.substitutes.strided import determinant

aten = torch.ops.aten


def _for(*ops: Any, change_plain: bool = False) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(ops, handler))
        CHANGE_PLAIN.update(ops if change_plain else ())
        return handler

    return register


def whole_part(x: GlobalTensor) -> Tensor:
    """The whole tensor, on every rank of the run; collective unless every rank has it.

    It may share memory with the part: do not change it.
    """
    spec = x._spec
    place = spec.layout.placement
    if any(rank not in place for rank in spec.comm.all_ranks):
        place = Placement(place.type, spec.comm.all_ranks, (spec.comm.world,))
    return part_in(x, everywhere(place), "reading the value")


# ---- values


@_for(aten._local_scalar_dense.default)
def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return whole_part(args[0]).item()


@_for(aten.equal.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    operands, _ = operands_of(args, kwargs)
    one, other = (whole_part(x) for x in operands)
    return torch.equal(one, other)


@_for(aten.is_same_size.default)
def _is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


# ---- the same part


@_for(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if type(x) is not GlobalTensor:
        return NotImplemented
    CACHE.add_direct(func, x, _unchanged, x._spec)
    return wrap(x._local, x._spec)


def _unchanged(part: Tensor) -> Tensor:
    return part


@_for(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to another dtype; another kind of device needs ``to_global``."""
    x = args[0]
    device = kwargs.get("device")
    if device is None:
        return NotImplemented
    if isinstance(x, GlobalTensor) and torch.device(device).type != x._spec.device.type:
        ranks = list(x._spec.layout.placement.ranks)
        raise LayoutError(
            f"to({str(device)!r}) was asked of a global tensor on {x._spec.layout.placement}; it is where its "
            f"placement says: write x.to_global(placement=flow.placement({str(device)!r}, {ranks}))"
        )
    return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})


@_for(aten._conj.default)
def _conj(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the conjugates: a lazily conjugated part could not be sent as it is."""
    return aten._conj_physical.default(args[0])


@_for(aten._neg_view.default)
def _neg_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return aten.neg.default(args[0])


@_for(aten._reshape_alias.default)
def _reshape_alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return aten.view.default(args[0], args[1])


@_for(aten._linalg_det.default, aten._linalg_slogdet.default)
def _determinant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute by the strides of the whole, as autograd does, not by those of the parts."""
    return determinant(func, args[0])


@_for(aten.as_strided.default)
def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0]._is_view() and (len(args) > 3 or kwargs):
        raise LayoutError(
            "as_strided with a storage_offset was found on a view of a global tensor, whose parts have no memory in "
            "common with the whole; call it on a clone(), or index the tensor"
        )
    return NotImplemented


# ---- new tensors like others


def like(spec: GlobalSpec, shape: tuple[int, ...]) -> Layout:
    """The layout of a new tensor made like another: the same if their shapes are equal, but never partial sums."""
    if shape != spec.shape:
        return everywhere(spec.layout.placement)
    return Layout(spec.layout.placement, tuple(B if e == P else e for e in spec.layout.sbp))


_FILLS: dict[Any, Callable[[Any], Any]] = {
    aten.empty_like.default: lambda args: None,
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_empty.default: lambda args: None,
    aten.new_empty_strided.default: lambda args: None,
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
}


@_for(*_FILLS)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, GlobalTensor) or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    spec = x._spec
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != spec.device.type:
        return NotImplemented
    shape = tuple(args[1]) if ".new_" in str(func) else spec.shape
    fill = _FILLS[func](args)
    dtype = kwargs.get("dtype") or spec.dtype
    layout = like(spec, shape)
    strides = None
    if func is aten.new_empty_strided.default:
        strides = tuple(args[2])
    elif shape == spec.shape and ".new_" not in str(func):
        strides = tuple(
            torch.empty_like(torch.empty_strided(shape, spec.strides, device="meta"), **_format(kwargs)).stride()
        )
    made = spec_of(spec.comm, layout, shape, strides, dtype, spec.device)
    here = local_shape(layout, shape, spec.comm.rank)
    part = torch.empty(here, dtype=dtype, device=spec.device)
    if fill is not None:
        part.fill_(fill)
    return wrap(part, made)


def _format(kwargs: dict[str, Any]) -> dict[str, Any]:
    found = kwargs.get("memory_format")
    return {} if found is None else {"memory_format": found}


# ---- in-place ops that do not depend on the old values


@_for(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    self, source = args[:2]
    if not isinstance(self, GlobalTensor):
        return NotImplemented
    if not isinstance(source, GlobalTensor):
        source = as_whole(source, self._spec)
    if source.shape != self.shape:
        source = aten.expand.default(source, self.shape)
    assign(self, source)
    return self


@_for(aten.zero_.default)
def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (self,) = args
    self._local.zero_()
    if isinstance(self, LinkedView):
        write_back(self)
    return self


@_for(aten.fill_.Scalar)
def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    self, value = args
    if has_terms(self._spec.layout):
        assign(self, aten.full_like.default(self, value))
        return self
    self._local.fill_(value)
    if isinstance(self, LinkedView):
        write_back(self)
    return self


@_for(aten.set_.source_Tensor, aten.resize_.default, aten.resize_as_.default, aten.set_.source_Storage)
def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LayoutError(
        f"{func} would give a global tensor other memory or another shape; its parts are its placement's and its "
        f"sbp's: make a new tensor instead"
    )


# ---- ops that are decomposed where a tensor is split, so that its parts give terms of a sum


def _written_out(function: Callable[..., Any]) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands, _ = operands_of(args, kwargs)
        return function(*args, **kwargs) if is_spread(operands) else NotImplemented

    return handler


for _table in (TABLE, BATCH_NORM):
    for _op, _function in _table.items():
        HANDLERS[_op] = _written_out(_function)


@_for(aten.native_batch_norm.default)
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute new running statistics as values, then copy them into the old ones."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training or mean is None:
        operands, _ = operands_of(args, kwargs)
        return BATCH_NORM[func](*args) if is_spread(operands) else NotImplemented
    *out, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, var, training, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(out)


@_for(aten._native_batch_norm_legit.default)
def _batch_norm_legit(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _batch_norm(aten.native_batch_norm.default, args, kwargs)


# ---- lists of tensors


def each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op over lists of tensors as the op of each, one after the other."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    count = len(next(a for a in args if isinstance(a, list | tuple)))
    run = {"norm": torch.linalg.vector_norm, "max": torch.max}.get(name) or _of_one(name)
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    factor = name.removesuffix("_") in ("addcmul", "addcdiv")  # their last argument has a name
    lists = {a.name for a in func._schema.arguments if "List" in str(a.type) or isinstance(given.get(a.name), list)}
    made = []
    for i in range(count):
        one = {k: v[i] if k in lists or (k == "scalars" and v is not None) else v for k, v in given.items()}
        named = {k: one.pop(k) for k in kwargs if k in one}
        if factor and len(one) > 3:
            value = one.popitem()[1]
            named = {"value": value.item() if isinstance(value, Tensor) else value}
        made.append(run(*one.values(), **named))
    return None if func._schema.is_mutable else made


def _of_one(name: str) -> Callable[..., Any]:
    """The function of one tensor that a list op applies to each."""
    found: Callable[..., Any] | None = getattr(Tensor, name, None) or getattr(torch, name, None)
    if found is not None:
        return found
    computes = getattr(torch, name.removesuffix("_"))  # maximum_ and the like
    return lambda x, *rest, **named: x.copy_(computes(x, *rest, **named))


def _overloads(*packets: str) -> list[Any]:
    """All forms of ops of these names, but those with ``out=``."""
    found = ((getattr(aten, name), kind) for name in packets for kind in getattr(aten, name).overloads())
    return [getattr(packet, kind) for packet, kind in found if not kind.endswith("out")]


@_for(*_overloads("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"), change_plain=True)
def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a fused optimizer on the parts, in each parameter's layout: it works element by element."""
    parameters = args[0]
    lists = [list(a) if isinstance(a, list | tuple) else a for a in args]
    parts: list[Any] = []
    for value in lists:
        if not isinstance(value, list):
            parts.append(value)
            continue
        row = []
        for p, t in zip(parameters, value, strict=False):
            if not isinstance(t, GlobalTensor):
                row.append(t)
                continue
            target = p._spec.layout if t.shape == p.shape else everywhere(p._spec.layout.placement)
            if has_terms(target):
                raise LayoutError(f"a parameter that lies as {target} was given to {func}; split or broadcast expected")
            row.append(part_in(t, target, str(func)))
        parts.append(row)
    named = {k: whole_part(v) if isinstance(v, GlobalTensor) else v for k, v in kwargs.items()}
    func(*parts, **named)
    for value, row in zip(lists, parts, strict=True):
        for i, part in enumerate(row if isinstance(value, list) else ()):
            t, p = value[i], parameters[i]
            if isinstance(t, GlobalTensor) and part is not t._local:
                target = p._spec.layout if t.shape == p.shape else everywhere(p._spec.layout.placement)
                assign(t, wrap(part, spec_of(t._spec.comm, target, t._spec.shape, None, part.dtype, t._spec.device)))
    return None


_INFINITIES = CollectiveLabel.of("GradScaler: whether any rank's part of a gradient is not finite")


@_for(aten._amp_foreach_non_finite_check_and_unscale_.default, change_plain=True)
def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What ``GradScaler`` does with gradients: each rank unscales its parts, and all learn of what is not finite."""
    gradients, found, factor = args
    ours = [g for g in gradients if isinstance(g, GlobalTensor)]
    for g in ours:
        if has_terms(g._spec.layout):
            raise LayoutError(
                f"GradScaler was given a gradient that lies as {g._spec.layout}, of whose values each rank has a term; "
                f"a parameter that is split or broadcast was expected"
            )
    here, by = (whole_part(x) if isinstance(x, GlobalTensor) else x for x in (found, factor))
    func([g._local if isinstance(g, GlobalTensor) else g for g in gradients], here, by, **kwargs)
    for g in ours:
        if isinstance(g, LinkedView):
            write_back(g)
    comm = (ours[0] if ours else found if isinstance(found, GlobalTensor) else factor)._spec.comm
    on_any = comm.all_reduce(_INFINITIES, comm.all_ranks, here) > 0
    found.copy_(on_any.to(here.dtype).reshape(here.shape))


_for(*_overloads(*(name for name in dir(aten) if name.startswith("_foreach_"))))(each)
