"""The cache of ops on global tensors: how each kind of call is run, found by one key.

``call_key`` makes the key of a call; ``CACHE`` is the one ``OpCache`` of this process, for all ranks that it has (specs
belong to a rank, so keys do).  Where an op is looked up, in this order:

1. ``dispatch.run`` takes the direct call of the entry, where it has one: the op on the parts alone.
2. ``perform.perform`` takes the plan of the entry, which may move operands first.
3. Where there is no entry yet, it plans the call and adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.communicator import EagerCommunicator
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor
from actorflow.eager.lineage import COPY, code_of_op, code_of_plain, code_of_value, known_code
from actorflow.eager.op_plans import OpPlan, is_view

__all__ = ["CACHE", "CachedOp", "OpCache", "call_key", "code_of_call"]

CallKey = tuple[Any, ...]
MadeOf = tuple[Any, ...]  # lineages of tensors and codes of other arguments, in order

# pointwise ops without torch's tag
_POINTWISE = frozenset({"aten::addcdiv_", "aten::addcmul_", "aten::lerp_", "aten::add_", "aten::mul_", "aten::div_"})
_FLOAT_KEYS = ("other", "zero")  # stand in keys for a non-zero float and for zero
_ONLY_INTS = {int}
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


@dataclass(slots=True)
class CachedOp:
    """How one kind of call is run: a direct call, a plan, or both."""

    func: Any  # keeps the op alive, since keys have its id
    comm: EagerCommunicator  # of the operands
    code: int  # of the op: see ``lineage.py``
    shares: bool  # whether its results are views
    plan: OpPlan | None = None
    direct: Callable[..., Any] | None = None  # takes the arguments, tensors being parts; None where a plan is needed
    outs: GlobalSpec | tuple[GlobalSpec | None, ...] | None = (
        None  # of what ``direct`` returns; None: the first argument, changed
    )


class OpCache:
    """The cached ops of at most ``size`` kinds of calls; it is cleared when there are more."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[CallKey, CachedOp] = {}
        self._any_float: dict[int, bool] = {}  # id of an op → whether one plan does for all floats but zero
        self._ops: list[Any] = []  # keeps those ops alive
        self.get = self._entries.get  # key → CachedOp or None; raises TypeError where an argument has no hash

    def takes_any_float(self, func: Any) -> bool:
        """Whether calls of an op that differ only in non-zero floats share an entry."""
        found = self._any_float.get(id(func))
        if found is None:
            self._ops.append(func)
            found = torch.Tag.pointwise in func.tags or func._schema.name in _POINTWISE
            self._any_float[id(func)] = found
        return found

    def add_plan(self, key: CallKey, func: Any, comm: EagerCommunicator, plan: OpPlan, direct: bool) -> None:
        """Keep a plan; with ``direct``, and where it is the op on the parts alone, the direct call as well."""
        if not plan.same and self.takes_any_float(func):  # the plan contains the float that it was made for
            self._any_float[id(func)] = False
            return
        entry = self._entry(key, func, comm)
        entry.plan = plan
        if not direct or plan.quick is None or plan.moves:
            return
        if func._schema.is_mutable:
            if plan.in_place:
                entry.direct, entry.outs = plan.quick, None
        elif plan.outs is not None and (plan.form is not None or plan.outs[0] is not None):
            entry.direct, entry.outs = plan.quick, plan.outs[0] if plan.form is None else plan.outs
            entry.code = code_of_call(func, key[1], entry.outs)

    def add_direct(self, func: Any, x: GlobalTensor, direct: Callable[..., Any], outs: GlobalSpec) -> None:
        """From now on, call ``direct`` on the part for this op on such a tensor."""
        entry = self._entry(call_key(func, (x,), {})[0], func, x._spec.comm)
        entry.direct, entry.outs = direct, outs

    def _entry(self, key: CallKey, func: Any, comm: EagerCommunicator) -> CachedOp:
        found = self._entries.get(key)
        if found is None:
            if len(self._entries) >= self._size:
                self._entries.clear()
            found = self._entries[key] = CachedOp(func, comm, code_of_op(func), is_view(func))
        return found


CACHE = OpCache(1 << 16)


def code_of_call(func: Any, operand: object, result: object) -> int:
    """The code of an op (see ``lineage.py``) by the specs of its first operand and its result.

    A view of all of a tensor is a copy of it, which autograd's hooks make of what they are given.
    """
    return COPY if result is operand and is_view(func) else code_of_op(func)


def call_key(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[CallKey, Sequence[Any] | None, MadeOf]:
    """The key of a call, equal for calls that share a plan, the arguments with parts in place of tensors, and what the
    lineage of the result is made of.

    Global tensors enter the key by their specs, plain ones by shape, strides and dtype, other arguments by type and
    value.  The parts are None where a tensor is no plain ``GlobalTensor`` of its own or comes by name, so that there is
    no direct call.  A key with an argument that has no hash raises TypeError when it is looked up.
    """
    if not kwargs:
        if len(args) == 2:
            a, b = args
            if type(a) is GlobalTensor and type(b) is GlobalTensor:
                return (id(func), a._spec, b._spec), (a._local, b._local), (a._lineage, b._lineage)
        elif len(args) == 1:
            a = args[0]
            if type(a) is GlobalTensor:
                return (id(func), a._spec), (a._local,), (a._lineage,)
    any_float = CACHE.takes_any_float(func)
    key: list[Any] = [id(func)]
    parts: list[Any] | None = []
    made_of: list[Any] = []
    for a in args:
        t = type(a)
        if t is GlobalTensor:
            key.append(a._spec)
            made_of.append(a._lineage)
            a = a._local
        elif t is list or t is tuple:
            if a and type(a[0]) is int and {*map(type, a)} == _ONLY_INTS:  # sizes, dims
                numbers = tuple(a)
                key.append(numbers)
                made_of.append(known_code((tuple, numbers)) or code_of_value(numbers))
            else:
                listed, a = _listed(a, made_of)
                key.append(listed)
                if a is None:
                    parts = None
        elif t in _VALUES:
            key.append((t, _FLOAT_KEYS[not a] if any_float and t is float else a))
            made_of.append(known_code((t, a)) or code_of_value(a))
        elif isinstance(a, Tensor):
            key.append(_tensor_key(a, made_of))
            parts = None
        else:
            key.append((t, a))
            made_of.append(code_of_value(a))
        if parts is not None:
            parts.append(a)
    if kwargs and _add_named(key, made_of, kwargs, any_float):
        parts = None
    return tuple(key), parts, tuple(made_of)


def _add_named(key: list[Any], made_of: list[Any], kwargs: dict[str, Any], any_float: bool) -> bool:
    """Add arguments by name to the key and the lineage; returns whether there may be tensors among them."""
    tensors = False
    for name, a in kwargs.items():
        t = type(a)
        if t in _VALUES:
            key.append((name, t, _FLOAT_KEYS[not a] if any_float and t is float else a))
            made_of.append(known_code((t, a)) or code_of_value(a))
        elif t is list or t is tuple:
            key.append((name, _listed(a, made_of)[0]))
            tensors = True
        elif isinstance(a, Tensor):
            key.append((name, _tensor_key(a, made_of)))
            tensors = True
        else:
            key.append((name, t, a))
            made_of.append(code_of_value(a))
    return tensors


def _tensor_key(tensor: Tensor, made_of: list[Any]) -> Any:
    if isinstance(tensor, GlobalTensor):
        made_of.append(tensor._lineage)
        return tensor._spec
    made_of.append(code_of_plain(tensor))
    return (Tensor, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _listed(values: Sequence[Any], made_of: list[Any]) -> tuple[CallKey, list[Any] | None]:
    """A list's part of the key, and the list with parts; None where a tensor is no ``GlobalTensor`` of its own."""
    key: list[Any] = []
    parts: list[Any] = []
    for v in values:
        if type(v) is GlobalTensor:
            key.append(v._spec)
            made_of.append(v._lineage)
            parts.append(v._local)
        elif isinstance(v, Tensor):
            key.append(_tensor_key(v, made_of))
        else:
            key.append((type(v), v))
            made_of.append(code_of_value(v))
            parts.append(v)
    return tuple(key), parts if len(parts) == len(key) else None
