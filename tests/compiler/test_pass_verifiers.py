"""What each pass hands on is looked at: every kind of broken layouts, programs and segments is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import actorflow_compiler.compile as compiling
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp, P, Split
from actorflow_compiler.cutting.lower import LoweredProgram, ProgramItem, lower
from actorflow_compiler.cutting.segment import SegmentedProgram, segment
from actorflow_compiler.cutting.stores import insert_stores
from actorflow_compiler.cutting.verify import verify_program, verify_segments
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.infer.layout_assignment import StepLayouts
from actorflow_compiler.infer.verify import verify_layouts
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.signatures import Signature
from models import CASES
from trained import Layout, laid_of

OTHER = Placement("cpu", (1, 0), (2,))


@cache
def laid_out(layout: Layout = Layout(2, goal=Goal(("tensor",)))) -> StepLayouts:  # noqa: B008 (a frozen value)
    """A training step of an MLP on two devices, as its layouts leave inference."""
    found: list[StepLayouts] = []

    def spy(step: StepLayouts, fixed: Mapping[str, Variable]) -> StepLayouts:
        found.append(step)
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "verify_layouts", spy)
        laid_of(CASES["mlp"], layout, 8)
    return found[0]


@cache
def program() -> LoweredProgram:
    return lower(laid_out())


@cache
def segmented() -> SegmentedProgram:
    return insert_stores(segment(program()))


def first(kind: str, **having: Any) -> int:
    """The position of the first item of a kind."""
    return next(
        k
        for k, item in enumerate(program().items)
        if item.kind == kind and all(getattr(item, name) == value for name, value in having.items())
        if kind != "compute" or (item.writes and all(item.steps.values()) and item.reads)
    )


def test_what_the_passes_make_is_legal() -> None:
    step = laid_out()
    assert verify_layouts(step, {v.name: v for v in step.variables}) is step
    assert verify_program(program(), step) is program()
    assert verify_segments(segmented()) is segmented()


# ---- layouts


def value_as(sbp: NdSbp, kind: str = "") -> StepLayouts:
    """The step with another layout for a weight, or for the first input of a kind."""
    step = laid_out()
    value = next(
        i.value for i in step.graph.inputs if (i.kind == kind if kind else len(step.graph.metas[i.value].shape) == 2)
    )
    return replace(step, layouts=replace(step.layouts, value={**step.layouts.value, value: sbp}))


def op(change: Callable[[Signature], Signature | None], readers: bool = False) -> StepLayouts:
    """The step with another signature for its first product of matrices; ``readers``: and what it asks for."""
    step = laid_out()
    k = next(k for k, n in enumerate(step.graph.nodes) if "mm" in n.op)
    chosen, operands = list(step.layouts.chosen), list(step.layouts.operands)
    (before,) = chosen[k]
    after = change(before)
    chosen[k] = () if after is None else (after,)
    value = dict(step.layouts.value)
    if after is not None and readers:
        operands[k] = tuple((s,) for s in after.ins)
        out = step.graph.nodes[k].outs[0]
        assert after.outs[0] is not None
        value[out] = (after.outs[0],)
    return replace(step, layouts=replace(step.layouts, chosen=chosen, operands=operands, value=value))


def without_an_op() -> StepLayouts:
    step = laid_out()
    return replace(step, layouts=replace(step.layouts, chosen=step.layouts.chosen[1:]))


def elsewhere() -> StepLayouts:
    step = laid_out()
    out = next(n.outs[0] for n in step.graph.nodes if "mm" in n.op)
    return replace(step, layouts=replace(step.layouts, placement={**step.layouts.placement, out: OTHER}))


def homeless() -> StepLayouts:
    step = laid_out()
    moved = (replace(step.variables[0], placement=OTHER), *step.variables[1:])
    return replace(step, variables=moved)


BROKEN_LAYOUTS: dict[str, tuple[Callable[[], StepLayouts], str]] = {
    "an entry too many": (lambda: value_as((B, B)), "has 1 mesh axes"),
    "a dim that is not there": (lambda: value_as((Split(2),)), "has no dim to be split"),
    "blocks that do not fit": (lambda: value_as((Split(0, 7),)), "is not made of whole units"),
    "an input in parts": (lambda: value_as((Split(0),), "batch"), "every rank has it whole"),
    "a variable that lies otherwise": (lambda: value_as((P,)), "the plan's variable lies as"),
    "a variable elsewhere": (homeless, "the plan's variable lies as"),
    "an op without signatures": (lambda: op(lambda _: None), "has 0 signatures"),
    "an op too few": (without_an_op, "ops have signatures"),
    "a value where its op is not": (elsewhere, "the value lies as"),
    "operands that the signature does not ask for": (
        lambda: op(lambda s: replace(s, ins=(*s.ins[:-1], P))), "its signatures for something else",
    ),
    "an output that the signature does not give": (lambda: op(lambda s: replace(s, outs=(P,))), "the value lies as"),
    "a signature that is none of the op": (
        lambda: op(lambda s: replace(s, ins=(P,) * len(s.ins), outs=(B,)), readers=True), "may not be P",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN_LAYOUTS)
def test_layouts_are_refused_that_have(what: str) -> None:
    broken, complaint = BROKEN_LAYOUTS[what]
    with pytest.raises(PlanError, match=rf"^layouts: .*{complaint}"):
        verify_layouts(broken(), {})


def test_a_variable_has_to_lie_as_earlier_plans_say() -> None:
    step = laid_out()
    weight = next(v for v in step.variables if isinstance(v.sbp[0], Split))
    with pytest.raises(PlanError, match=rf"variable {weight.name} lies as S.*an earlier plan lies as B"):
        verify_layouts(step, {weight.name: replace(weight, sbp=(B,))})


# ---- the program


def items(change: Callable[[ProgramItem], ProgramItem | None], kind: str = "compute", **having: Any) -> LoweredProgram:
    """The program with its first item of a kind changed, or left out."""
    k = first(kind, **having)
    changed = change(program().items[k])
    kept = program().items
    return replace(program(), items=(*kept[:k], *(() if changed is None else (changed,)), *kept[k + 1 :]))


def repeated() -> LoweredProgram:
    k = first("compute")
    return replace(program(), items=(*program().items[: k + 1], *program().items[k:]))


def backwards() -> LoweredProgram:
    return replace(program(), items=program().items[::-1])


def other_shape() -> LoweredProgram:
    step = laid_out()
    value = next(n.outs[0] for n in step.graph.nodes if "mm" in n.op)
    wrong = {k: Meta((*m.shape[:-1], m.shape[-1] + 1), m.dtype) if k[0] == value else m
             for k, m in program().metas.items()}  # fmt: skip
    return replace(program(), metas=wrong)


def unknown() -> LoweredProgram:
    value = program().items[first("compute")].writes[0]
    return replace(program(), metas={k: m for k, m in program().metas.items() if k[0] != value})


def unread() -> LoweredProgram:
    """A copy of an item, with numbers of its own that nobody reads."""
    item = program().items[first("compute", phase="forward")]
    new = {v: 10_000 + v for v in item.writes}
    same = {v: v for v in item.reads}
    steps = {rank: tuple(s.renamed({**same, **new}) for s in steps) for rank, steps in item.steps.items()}
    metas = {(new[v], rank): m for (v, rank), m in program().metas.items() if v in new}
    more = replace(item, writes=tuple(new.values()), steps=steps)
    return replace(program(), items=(*program().items, more), metas={**program().metas, **metas})


def one_side() -> LoweredProgram:
    return items(lambda i: replace(i, comms=dict(list(i.comms.items())[:1])), "comm")


BROKEN_PROGRAMS: dict[str, tuple[Callable[[], LoweredProgram], str]] = {
    "a value that is made twice": (repeated, "is made twice"),
    "a value that is read before it is made": (backwards, "before it is made"),
    "a value that is not made": (lambda: items(lambda _: None), "before it is made"),
    "a part of another shape": (other_shape, "its layout says"),
    "a value of no shape": (unknown, "nothing is known of"),
    "a value that nobody reads": (unread, "nobody reads"),
    "an op on a device that is not of its placement": (
        lambda: items(lambda i: replace(i, placement=Placement("cpu", (0,), (1,)))), "rank 1, which is not of",
    ),
    "a collective that one rank takes no part in": (one_side, "takes no part"),
    "a collective in another's group": (
        lambda: items(
            lambda i: replace(i, comms={r: replace(c, ranks=(r, 9)) for r, c in i.comms.items()}), "comm",
        ),
        "in a group of",
    ),
    "an unknown phase": (lambda: items(lambda i: replace(i, phase="later")), "has phase 'later'"),
    "an unknown kind": (lambda: items(lambda i: replace(i, kind="rest")), "unknown kind"),
    "a new value that is not there": (
        lambda: replace(program(), updates=((program().updates[0][0], 99_999), *program().updates[1:])),
        "is never made",
    ),
    "a result that lies otherwise": (
        lambda: replace(
            program(), results=tuple((v, where, sbp, Meta((3,), m.dtype)) for v, where, sbp, m in program().results)
        ),
        "the result .* its layout says",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN_PROGRAMS)
def test_programs_are_refused_that_have(what: str) -> None:
    broken, complaint = BROKEN_PROGRAMS[what]
    with pytest.raises(PlanError, match=rf"^program: .*({complaint})"):
        verify_program(broken(), laid_out())


# ---- segments


def segments(**changed: Any) -> SegmentedProgram:
    """The segmented program with the segment of its first op changed."""
    found = list(segmented().segments)
    k = next(k for k, s in enumerate(found) if s is not None and s.phase == "forward")
    one = found[k]
    assert one is not None
    found[k] = replace(one, **changed)
    return replace(segmented(), segments=tuple(found))


def circular() -> SegmentedProgram:
    """The last op of the backward pass in the segment of the first."""
    found = list(segmented().segments)
    backward = [k for k, s in enumerate(found) if s is not None and s.phase == "backward"]
    levels = {found[k].level for k in backward}  # type: ignore[union-attr]
    assert len(levels) > 1
    last = max(backward, key=lambda k: found[k].level)  # type: ignore[union-attr]
    early = min(backward, key=lambda k: found[k].level)  # type: ignore[union-attr]
    level = found[early].level  # type: ignore[union-attr]
    of_last = found[last]
    found = [replace(s, level=level, part=0) if s == of_last and s is not None else s for s in found]
    return replace(segmented(), segments=tuple(found))


def nowhere() -> SegmentedProgram:
    found = list(segmented().segments)
    found[next(k for k, s in enumerate(found) if s is not None)] = None
    return replace(segmented(), segments=tuple(found))


BROKEN_SEGMENTS: dict[str, tuple[Callable[[], SegmentedProgram], str]] = {
    "an item too few": (lambda: replace(segmented(), segments=segmented().segments[1:]), "levels for"),
    "an op in no segment": (nowhere, "has no segment"),
    "another phase": (lambda: segments(phase="optimizer"), "has phase forward, its segment optimizer"),
    "another placement": (lambda: segments(placement=OTHER), "has placement"),
    "another rate": (lambda: segments(pieces=True), "has rate False, its segment True"),
    "another stage": (lambda: segments(stage=3), "has stage 0, its segment 3"),
    "a circle": (circular, "wait for each other"),
}


@pytest.mark.parametrize("what", BROKEN_SEGMENTS)
def test_segments_are_refused_that_have(what: str) -> None:
    broken, complaint = BROKEN_SEGMENTS[what]
    with pytest.raises(PlanError, match=rf"^segments: .*{complaint}"):
        verify_segments(broken())
