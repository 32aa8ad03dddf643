"""An op on global tensors goes in; its operands are moved by need, it runs on the parts, global results come out.

What has to be done is planned once for each op and specs of operands (``plans.py``) and remembered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.agree import agree
from actorflow.eager.held import GlobalTensor, Spec, spec_of, wrap
from actorflow.eager.layout import NOWHERE, everywhere
from actorflow.eager.links import LinkedTensor, link
from actorflow.eager.plain import flat
from actorflow.eager.plans import Plan, make
from actorflow.eager.redistribution import box
from actorflow_compiler.core.torch_internals import memory_of

MOST = 1 << 16  # plans that are kept

DIRECT: dict[tuple[Any, ...], tuple[Callable[..., Any], Spec | tuple[Spec | None, ...] | None]] = {}  # on the parts
_plans: dict[tuple[Any, ...], Plan] = {}
LOOSE: set[int] = set()  # ids of ops for which one float is as good as another, zero apart
SIGN = ("other", "zero")  # stands for a float there
_seen: set[Any] = set()  # ops that were looked at for that; they stay, and so do their ids


def perform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Any = None) -> Any:
    """An op that changes nothing; plain tensors count as whole.

    With ``changed``, the op that changes its first operand and of which ``func`` is what it computes: if it can be
    done to the part, that is done; else what has to be put into it is returned.
    """
    operands, small = operands_of(args, kwargs)
    op = func if changed is None else changed
    if op not in _seen:
        _seen.add(op)
        if torch.Tag.pointwise in op.tags or op._schema.name in _POINTWISE:
            LOOSE.add(id(op))
    key = _key(op, args, kwargs, operands)
    plan = None if key is None else _plans.get(key)
    if plan is None:
        agree(func, args, kwargs, operands)
        plan = make(func, args, kwargs, operands, small, changed)
        if key is not None:
            _keep(key, plan, op, operands, args, kwargs)
    parts = [t._local for t in operands]
    for i, target in plan.moves:
        spec = operands[i]._spec
        parts[i] = box(parts[i], spec.shape, spec.layout, target, spec.wires, str(func))
    made = plan.run(parts, args, kwargs)
    if changed is not None and plan.in_place:
        return operands[0]
    return _results(made, plan, func, args, kwargs, operands)


def _results(
    made: Any, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]
) -> Any:
    """What an op has returned on this rank, as global tensors."""
    form = plan.form if plan.outs is not None else (type(made) if isinstance(made, list | tuple) else None)
    flat_made = [made] if form is None else list(made)
    outs = plan.outs if plan.outs is not None else [spec_seen(t, operands) for t in flat_made]
    parent = operands[0]
    linked = plan.view and (
        bool(plan.moves)
        or isinstance(parent, LinkedTensor)
        or (parent._spec.here and any(_apart(t, parent._local) for t in flat_made[:1]))
    )
    results = []
    for i, (t, spec) in enumerate(zip(flat_made, outs, strict=True)):
        if spec is None or not isinstance(t, Tensor):
            results.append(t)
        elif linked:
            index = None if form is None else i
            results.append(link(t, spec, parent, func, args, kwargs, index, bool(plan.moves)))
        else:
            results.append(wrap(t, spec))
    return results[0] if form is None else form(results)


def _apart(view: Tensor, base: Tensor) -> bool:
    return memory_of(view) != memory_of(base)


def spec_seen(t: Any, operands: Sequence[GlobalTensor]) -> Spec | None:
    """Of what has come out whole on every rank."""
    if not isinstance(t, Tensor):
        return None
    first = operands[0]._spec
    place = first.layout.placement
    if any(rank not in place for rank in first.wires.everybody):
        place = type(place)(place.type, first.wires.everybody, (first.wires.world,))
    return spec_of(first.wires, everywhere(place), tuple(t.shape), tuple(t.stride()), t.dtype, t.device)


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[GlobalTensor], list[bool]]:
    """The tensors among the arguments, in order, plain ones as whole ones; and which every rank has."""
    found = [leaf for leaf in flat(args, kwargs) if isinstance(leaf, Tensor)]
    first = next(t for t in found if isinstance(t, GlobalTensor))
    small = [not isinstance(t, GlobalTensor) for t in found]
    return [t if isinstance(t, GlobalTensor) else as_whole(t, first._spec) for t in found], small


def as_whole(tensor: Tensor, like: Spec) -> GlobalTensor:
    """A plain tensor, equal on every rank, as a global one on a placement."""
    spec = spec_of(
        like.wires, everywhere(like.layout.placement), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype,
        like.device,
    )  # fmt: skip
    part = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device != like.device:
        part = part.to(like.device)
    return wrap(part if spec.here else part.new_empty(NOWHERE), spec)


# ---- what is known


def plan_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
    """How an op that has run was run; None for one that is done otherwise."""
    operands, _ = operands_of(args, kwargs)
    key = _key(func, args, kwargs, operands)
    return None if key is None else _plans.get(key)


def _key(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]
) -> tuple[Any, ...] | None:
    """What a plan depends on; None for arguments that cannot be compared."""
    specs = iter(operands)
    loose = id(func) in LOOSE

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(specs)._spec
        kind = type(value)
        if kind is float:
            return (kind, SIGN[not value]) if loose else (kind, value)
        if kind in (list, tuple):
            return tuple(map(part, value))
        return (kind, value)

    key = (func, *map(part, args), *((name, part(value)) for name, value in kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _keep(
    key: tuple[Any, ...], plan: Plan, func: Any, operands: Sequence[GlobalTensor], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Remember a plan; where it is the op on the parts alone, for the short way as well."""
    if id(func) in LOOSE and not plan.same:  # it names the float that it was made for
        LOOSE.discard(id(func))
        return
    if len(_plans) > MOST:
        _plans.clear()
        DIRECT.clear()
    _plans[key] = plan
    if (
        plan.quick is None or plan.moves or not args
        or any(not isinstance(t, GlobalTensor) for t in flat(args, {}) if isinstance(t, Tensor))
        or any(isinstance(v, Tensor) for v in flat((), kwargs))
        or not all(type(t) is GlobalTensor for t in operands)
    ):  # fmt: skip
        return
    outs = plan.outs
    if func._schema.is_mutable:
        if plan.in_place:
            DIRECT[_short(func, args, kwargs)] = (plan.quick, None)
    elif outs is not None and (plan.form is not None or outs[0] is not None):
        DIRECT[_short(func, args, kwargs)] = (plan.quick, outs[0] if plan.form is None else outs)


def remember(func: Any, x: GlobalTensor) -> None:
    """From now on, this op on such a tensor gives one with the same part."""
    DIRECT[(id(func), x._spec)] = (_same_part, x._spec)


def _same_part(part: Tensor) -> Tensor:
    return part


def _short(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What ``run`` looks up."""
    loose = id(func) in LOOSE

    def part(a: Any) -> Any:
        if type(a) is GlobalTensor:
            return a._spec
        if type(a) is list:
            return tuple(t._spec if type(t) is GlobalTensor else t for t in a)
        return (type(a), SIGN[not a] if type(a) is float and loose else a)

    named = ((k, type(v), SIGN[not v] if type(v) is float and loose else v) for k, v in kwargs.items())
    return (id(func), *map(part, args), *named)


_POINTWISE = frozenset({"aten::addcdiv_", "aten::addcmul_", "aten::lerp_", "aten::add_", "aten::mul_", "aten::div_"})
