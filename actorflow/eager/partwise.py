"""Find out whether a call of a torch function can run on the parts at once, instead of op by op, and cache it.

The first call of a kind is run op by op, and its ops are recorded.  Where none of them has to move anything, the
function is run again, on the parts.  If both runs make the same ops with the same arguments, a call on the parts
gives the parts of the result.

The layouts of gradients follow from those of the tensors.  What a rank computes is a function of its parts, so going
back through it gives ``S`` where a tensor is split, ``B`` for the terms of a sum, and terms of a sum (``P``) for a
tensor that is broadcast to ranks which do not all compute the same.

The answer depends on nothing that differs between ranks, since all have to make their calls in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actorflow.eager import dispatch
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of
from actorflow.eager.layout import Layout, local_shape
from actorflow.eager.lineage import LineageRecorder, RecordedLineages, code_of_op
from actorflow.eager.op_cache import call_key
from actorflow.eager.op_plans import RESHAPES
from actorflow.eager.perform import plan_of
from actorflow.eager.plain_tensors import flat
from actorflow_compiler.core.sbp import B, P, Sbp
from actorflow_compiler.core.torch_internals import memory_of

TRIES = 3  # kinds of calls that had to run op by op, after which a function is no longer examined
LEAST, LIMIT = 2, 100  # fewest and most ops of a function for which a call on the parts pays
# ops that the shapes of their operand and result describe fully
_SHAPED = RESHAPES | {"aten.expand.default", "aten.split.Tensor", "aten.split_with_sizes.default"}
_DETACH = torch.ops.aten.detach.default  # autograd may or may not call it for what it saves


@dataclass(frozen=True, slots=True)
class PartwiseCall:
    """A call of a function that can be made on the parts."""

    func: Any
    args: tuple[Any, ...]  # with an OperandRef for each operand
    kwargs: dict[str, Any]
    form: type | None  # list or tuple of results; None: one
    outs: tuple[GlobalSpec, ...]
    back: tuple[Layout, ...]  # layouts that the gradients of the results need
    grads: tuple[GlobalSpec, ...]  # specs that the gradients of the operands then have
    lineages: RecordedLineages  # of the results, as the ops would set them
    kept_ins: tuple[int, ...] = ()  # operands whose memory the autograd graph of the parts saves
    kept_outs: tuple[int, ...] = ()  # results whose memory it saves


@dataclass(frozen=True, slots=True)
class OperandRef:
    """Stands for an operand in the arguments of a call."""

    number: int


UNKNOWN: Any = object()


class PartwiseCache:
    """The cached answers for at most ``size`` kinds of function calls; it is cleared when there are more.

    It is consulted before the cache of ops (``op_cache.py``): a call found here is one call on the parts, and its ops
    are not dispatched.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._calls: dict[tuple[Any, ...], PartwiseCall | None] = {}

    def get(self, key: tuple[Any, ...]) -> Any:
        """How a call runs on the parts; None if it runs op by op; UNKNOWN if it was not seen before."""
        return self._calls.get(key, UNKNOWN)

    def add(self, key: tuple[Any, ...], call: PartwiseCall | None) -> None:
        """Cache how a call runs; None for op by op."""
        if len(self._calls) >= self._size:
            self._calls.clear()
        self._calls[key] = call


CALLS = PartwiseCache(1 << 14)


def fill(partwise: PartwiseCall, tensors: Sequence[Any]) -> Any:
    """Call the function with these tensors as its operands."""
    args = [tensors[a.number] if type(a) is OperandRef else a for a in partwise.args]
    if not partwise.kwargs:
        return partwise.func(*args)
    kwargs = {k: tensors[a.number] if type(a) is OperandRef else a for k, a in partwise.kwargs.items()}
    return partwise.func(*args, **kwargs)


def leaves(operands: Sequence[GlobalTensor]) -> list[Tensor]:
    """The parts; those that need a gradient as leaves of an autograd graph of parts."""
    return [_leaf(t) if t.requires_grad else t._local for t in operands]


def _leaf(t: GlobalTensor) -> Tensor:
    """The part as a leaf; kept on the tensor, since parameters are used again and again."""
    part = t._local
    kept: tuple[Tensor, Tensor] | None = getattr(t, "_leaf", None)
    if kept is not None and kept[0] is part:
        return kept[1]
    leaf = part.detach().requires_grad_()
    t._leaf = part, leaf
    return leaf


def examine_call(
    key: tuple[Any, ...], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor],
    recorded: bool,
) -> Any:  # fmt: skip
    """Run a call op by op, return its result, and cache whether it can run on the parts."""
    recorder = _OpRecorder()
    with recorder.lineages_of(operands):
        with dispatch.watched_by(recorder.run):
            made = func(*args, **kwargs)
        found = _partwise_call(recorder, func, args, kwargs, operands, made, recorded)
    for t in made if isinstance(made, list | tuple) else (made,):
        if isinstance(t, GlobalTensor):
            t._lineage = int(t._lineage)
    CALLS.add(key, found)
    comm = operands[0]._spec.comm
    if found is not None:
        comm.stepwise_kinds[func] = -(1 << 60)
    else:
        comm.stepwise_kinds[func] = comm.stepwise_kinds.get(func, 0) + 1
        if comm.stepwise_kinds[func] >= TRIES:
            comm.stepwise.add(func)
    return made


# ---- recording the ops of a function

_Op = tuple[Any, ...]  # an op and its arguments, with a description in place of each tensor


@dataclass(slots=True)
class _OpRecorder:
    """Records the ops of a function until one needs more than the parts."""

    ops: list[_Op] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)  # plain tensors that the function made, in order of use
    alone: bool = True
    lineages: LineageRecorder = field(default_factory=LineageRecorder)

    @contextlib.contextmanager
    def lineages_of(self, operands: Sequence[GlobalTensor]) -> Iterator[None]:
        """Record in the body how lineages come from those of the operands."""
        for t in operands:
            t._lineage = self.lineages.operand(t._lineage)
        try:
            yield
        finally:
            for t in operands:
                t._lineage = int(t._lineage)  # another one, where the function has changed the tensor

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Record an op that has run."""
        if not self.alone or func is _DETACH:
            return
        several = isinstance(made, list | tuple)
        outputs = [t for t in (made if several else (made,)) if isinstance(t, GlobalTensor)]
        if outputs:
            known = [t._lineage for t in outputs]
            found = self.lineages.op(code_of_op(func), call_key(func, args, kwargs)[2], known, several)
            for t, lineage in zip(outputs, found, strict=True):
                t._lineage = lineage
        op = self._seen(func, args, kwargs, made)
        if op is None or len(self.ops) == LIMIT:
            self.alone = False
            self.constants.clear()
        else:
            self.ops.append(op)

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> _Op | None:
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        results = made if isinstance(made, list | tuple) else [made]
        if not all(type(t) is GlobalTensor or t is None for t in results):
            return None
        used = [t for t in flat(args, kwargs) if isinstance(t, Tensor)]
        if not all(type(t) is GlobalTensor for t in used if isinstance(t, GlobalTensor)):
            return None
        plan = plan_of(func, args, kwargs)
        if plan is None or plan.moves or not (plan.same or str(func) in _SHAPED):
            return None
        self.constants += [t.detach() for t in used if type(t) is not GlobalTensor]
        return _described(func, args, kwargs, made)


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> _Op:
    """An op as it runs on parts, for comparison."""

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            part = value._local if isinstance(value, GlobalTensor) else value
            return ("tensor", tuple(part.shape), part.dtype)
        if isinstance(value, list | tuple):
            return tuple(map(described, value))
        return (type(value), value)

    if str(func) in _SHAPED:
        return func, described(args[0]), described(made)
    return func, *map(described, args), *((k, described(v)) for k, v in sorted(kwargs.items())), described(made)


class _Parts(TorchDispatchMode):
    """Records the ops of a function that is called on parts."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.ops: list[_Op] = []
        self.constants: list[Tensor] = []
        self._of_parts: dict[int, Any] = {id(t): t for t in parts}  # every tensor that depends on the parts, by id

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and record it unless all of its tensors are constants."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        used = [t for t in flat(args, kwargs) if isinstance(t, Tensor)]
        if any(id(t) in self._of_parts for t in used):
            self.constants += [t for t in used if id(t) not in self._of_parts]
            if func is not _DETACH:
                self.ops.append(_described(func, args, kwargs, made))
            for t in made if isinstance(made, list | tuple) else [made]:
                self._of_parts[id(t)] = t
        return made


# ---- comparing with the parts


def _partwise_call(
    recorder: _OpRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor],
    made: Any, recorded: bool,
) -> PartwiseCall | None:  # fmt: skip
    form = type(made) if isinstance(made, list | tuple) else None
    outs: list[Any] = list(made) if form is not None else [made]
    lineages = recorder.lineages.record([t._lineage for t in outs if isinstance(t, GlobalTensor)])
    if lineages is None:
        return None
    if not recorder.alone or len(recorder.ops) < LEAST or form not in (None, list, tuple):
        return None
    if not outs or any(type(t) is not GlobalTensor or t.requires_grad != recorded for t in outs):
        return None
    ins, results = [t._spec for t in operands], [t._spec for t in outs]
    if not all(_alike_on_all_ranks(spec, ins[0]) for spec in (*ins, *results)):
        return None
    layouts = _gradients([s.layout for s in ins], [s.layout for s in results])
    if layouts is None:
        if recorded:
            return None
        layouts = [s.layout for s in results], [s.layout for s in ins]
    numbers = iter(range(len(operands)))
    grads = tuple(spec_of(s.comm, g, s.shape, None, s.dtype, s.device) for s, g in zip(ins, layouts[1], strict=True))
    found = PartwiseCall(
        func, tuple(OperandRef(next(numbers)) if isinstance(a, Tensor) else a for a in args),
        {k: OperandRef(next(numbers)) if isinstance(a, Tensor) else a for k, a in kwargs.items()},
        form, tuple(results), tuple(layouts[0]), grads, lineages,
    )  # fmt: skip
    return _same_on_parts(found, recorder, operands, outs, recorded)


def _alike_on_all_ranks(spec: GlobalSpec, first: GlobalSpec) -> bool:
    """Whether each rank of the run has a part, all of one shape, on the same mesh."""
    place = spec.layout.placement
    if place != first.layout.placement or len(place.ranks) != spec.comm.world:
        return False
    return len({local_shape(spec.layout, spec.shape, rank) for rank in place.ranks}) == 1


def _gradients(ins: Sequence[Layout], outs: Sequence[Layout]) -> tuple[list[Layout], list[Layout]] | None:
    """The layouts that gradients of results need, and those that gradients of operands then have.

    None where a result is broadcast over ranks that do not compute the same.
    """
    place = ins[0].placement
    differ = [
        n > 1 and any(layout.sbp[axis] != B for layout in (*ins, *outs)) for axis, n in enumerate(place.hierarchy)
    ]
    if any(d and layout.sbp[axis] == B for layout in outs for axis, d in enumerate(differ)):
        return None

    def back(layout: Layout) -> Layout:
        entries: list[Sbp] = [
            B if e == P else P if e == B and d else e for e, d in zip(layout.sbp, differ, strict=True)
        ]
        return Layout(place, tuple(entries))

    return [back(layout) for layout in outs], [back(layout) for layout in ins]


def _same_on_parts(
    partwise: PartwiseCall, recorder: _OpRecorder, operands: Sequence[GlobalTensor], outs: Sequence[Any], recorded: bool
) -> PartwiseCall | None:
    """The call with what its graph saves; None unless the function does the same on the parts as on the whole."""
    parts = leaves(operands) if recorded else [t._local for t in operands]
    kept: set[int] = set()

    def keep(t: Tensor) -> Tensor:
        kept.add(memory_of(t))
        return t

    try:
        with _Parts(parts) as seen, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            made = fill(partwise, parts)
    except Exception:  # an error on the parts is no error of the user's: run the function op by op
        return None
    if seen.ops != recorder.ops or (type(made) if isinstance(made, list | tuple) else None) is not partwise.form:
        return None
    results = [made] if partwise.form is None else list(made)
    if len(seen.constants) != len(recorder.constants) or not all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(seen.constants, recorder.constants, strict=True)
    ):
        return None
    memory = {memory_of(p) for p in parts}
    for t, out in zip(results, outs, strict=True):
        if not isinstance(t, Tensor) or t.shape != out._local.shape or t.requires_grad != recorded:
            return None
        if memory_of(t) in memory:
            return None
    return replace(
        partwise,
        kept_ins=tuple(i for i, p in enumerate(parts) if memory_of(p) in kept),
        kept_outs=tuple(i for i, t in enumerate(results) if memory_of(t) in kept),
    )
