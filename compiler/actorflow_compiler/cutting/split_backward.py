"""Split the backward pass: what only gradients of parameters need gets a phase of its own, "weight" (zero bubble).

The backward pass of a stage does two things: it computes the gradients of what the stage before it sent, for which
that stage waits, and the gradients of its own parameters, which are summed over the micro-batches and needed only
after the last one.  An op is of the second kind, phase "weight", if each of its outputs leads to one sum over the
micro-batches and to nothing else.  Ops that lead to several sums are shared work and stay in the backward pass; else
the whole backward pass of the first stage would be of the second kind.

PyTorch's fused backward ops compute both kinds at once.  Those of ``SEPARABLE`` are run twice with different output
masks: of a convolution the two are independent computations; of a normalisation they share only reductions over one
sample, which are cheap compared to reading the tensors.  Batch norm is not separable, as its gradient of the input is
computed from its gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actorflow_compiler.core.ops import Meta, Phase, Ref, substitute
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.graph.flops import flops_of
from actorflow_compiler.plan.plan import Send, Step
from actorflow_compiler.signatures import OpCall

SEPARABLE = frozenset({  # their last argument is the output mask; the first output is the gradient of the input
    "aten.convolution_backward.default", "aten.native_layer_norm_backward.default",
    "aten.native_group_norm_backward.default", "aten._fused_rms_norm_backward.default",
})  # fmt: skip


def split_backward(program: LoweredProgram) -> LoweredProgram:
    """Give the phase "weight" to every op whose results are needed only for a sum over micro-batches."""
    sums = _sums(program)
    home = {v: (item.placement, item.stage) for item in program.items for v in item.writes}
    leads: dict[int, set[int]] = {}  # value → the sums that it leads to, if it leads to nothing else
    elsewhere: set[int] = {v for _, v in program.updates} | {v for v, *_ in program.results}
    out: list[ProgramItem] = []

    def is_weight(item: ProgramItem) -> bool:
        return all(v not in elsewhere and len(leads.get(v, ())) == 1 for v in item.writes)

    for item in reversed(program.items):
        if _passes(item) and is_weight(item):  # it moves or renames values that lead only to sums
            out.append(item)
            for v, w in zip(item.reads, item.writes, strict=True):
                leads.setdefault(v, set()).update(leads[w])
            continue
        now = [item]
        if item.kind is ItemKind.COMPUTE and item.phase == Phase.BACKWARD and item.pieces and any(item.steps.values()):
            if is_weight(item):
                now = [replace(item, phase=Phase.WEIGHT)]
            elif (halves := _halves(item, program)) is not None and is_weight(halves[1]):
                now = [halves[0], replace(halves[1], phase=Phase.WEIGHT)]
        for one in reversed(now):
            out.append(one)
            if one.kind is ItemKind.JOIN and one.writes[0] in sums:
                leads.setdefault(one.reads[0], set()).add(one.writes[0])
            elif one.phase == Phase.WEIGHT:
                found = {s for v in one.writes for s in leads[v]}
                for v in one.reads:
                    leads.setdefault(v, set()).update(found)
                # values of another stage on the same ranks are not work of this stage
                elsewhere.update(v for v in one.reads if home.get(v) != (one.placement, one.stage))
            else:
                elsewhere.update(one.reads)
    out.reverse()
    return replace(program, items=tuple(out))


def _passes(item: ProgramItem) -> bool:
    """Whether each output of an item is one of its operands, moved by a collective or renamed."""
    if item.phase not in (Phase.BACKWARD, Phase.OPTIMIZER) or not item.pieces or len(item.reads) != len(item.writes):
        return False
    if item.kind is ItemKind.COMM:
        return not any(isinstance(c, Send) for c in item.comms.values())
    return item.kind is ItemKind.COMPUTE and len(item.reads) == 1 and not any(item.steps.values())


def _sums(program: LoweredProgram) -> set[int]:
    """The values that are joined in the backward pass and that no op of the micro-batches needs."""
    waited: set[int] = set()  # values that ops of micro-batches need
    found: set[int] = set()
    for item in reversed(program.items):
        if item.kind is ItemKind.JOIN and item.phase == Phase.BACKWARD and item.writes[0] not in waited:
            found.add(item.writes[0])
        if item.pieces or any(v in waited for v in item.writes):
            waited.update(item.reads)
    return found


def _halves(item: ProgramItem, program: LoweredProgram) -> tuple[ProgramItem, ProgramItem] | None:
    """An op as two: one for the gradient of its input, one for the others; None if it is no separable op for both."""
    if not all(_is_both(steps) for steps in item.steps.values()):
        return None
    first: dict[int, tuple[Step, ...]] = {}
    second: dict[int, tuple[Step, ...]] = {}
    for rank, (step,) in item.steps.items():
        *rest, mask = step.args
        given, *others = step.outs
        input_only = (mask[0], *(False for _ in others))
        first[rank] = (replace(step, args=(*rest, input_only), outs=(given, *(-1 for _ in others))),)
        second[rank] = (replace(step, args=(*rest, (False, *mask[1:])), outs=(-1, *others)),)
    return _part(item, first, program), _part(item, second, program)


def _is_both(steps: tuple[Step, ...]) -> bool:
    if len(steps) != 1 or steps[0].op not in SEPARABLE or steps[0].kwargs:
        return False
    given, *others = steps[0].outs
    return given >= 0 and any(o >= 0 for o in others)


def _part(item: ProgramItem, steps: Mapping[int, tuple[Step, ...]], program: LoweredProgram) -> ProgramItem:
    made = {o for (step,) in steps.values() for o in step.outs}
    flops = {rank: flops_of(_call(step, program.metas, rank)) for rank, (step,) in steps.items()}
    return replace(item, steps=steps, writes=tuple(v for v in item.writes if v in made), flops=flops)


def _call(step: Step, metas: Mapping[tuple[int, int], Meta], rank: int) -> OpCall:
    """The op instance that a step is on a rank."""
    operands: list[int] = []

    def number(v: int) -> Ref:
        operands.append(v)
        return Ref(len(operands) - 1)

    args = tuple(substitute(a, number) for a in step.args)
    outs = tuple(metas[(o, rank)] if o >= 0 else None for o in step.outs)
    return OpCall(step.op, args, (), tuple(metas[(v, rank)] for v in operands), outs)
