"""Infer the layouts of a graph, one mesh axis after another.

Each mesh axis is decided by itself, on the graph as the axes before it have cut it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.ops import Meta, Ref, substitute
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import (
    B,
    NdSbp,
    Parts,
    Sbp,
    Split,
    device_count,
    even_shares,
    largest,
    local_shape,
    smallest,
)
from actorflow_compiler.graph.graph import Graph, InputKind, call_of
from actorflow_compiler.hints.goal import DATA, WHOLE_VARIABLES, Goal, ParallelMode
from actorflow_compiler.infer.axis_request import AxisRequest, CutGraph, InnerCost, RequiredLayout
from actorflow_compiler.infer.choose import choose
from actorflow_compiler.infer.expert_axis import NO_EXPERTS, ExpertProducts
from actorflow_compiler.infer.problem import LayoutItem, Problem
from actorflow_compiler.infer.reports import AxisReport
from actorflow_compiler.signatures import OpCall, Signature, local_op

UNEVEN = 1 / 64  # the share of a dim that it may lack to be even, as a vocabulary of 50,257 lacks 3 for 4 devices


@dataclass(frozen=True, slots=True)
class GraphLayouts:
    """The layout of every value, one SBP for each axis of its placement, and the signatures of every op."""

    value: Mapping[int, NdSbp]
    placement: Mapping[int, Placement]
    operands: Sequence[tuple[NdSbp, ...]]  # node by node: the layout that each operand must have
    chosen: Sequence[tuple[Signature, ...]]  # node by node: one signature for each mesh axis
    reports: tuple[AxisReport, ...] = field(default=(), compare=False)
    experts: Mapping[int, ExpertProducts] = field(default_factory=dict)  # of each axis for experts


@dataclass(frozen=True, slots=True)
class FixedLayouts:
    """Layouts that are decided before inference."""

    variables: Mapping[str, tuple[Placement, tuple[Sbp | None, ...]]]  # of every variable; None: to be inferred
    batch: Mapping[str, tuple[Sbp | None, ...]]  # preferred layout of an input, which every rank has whole
    results: Mapping[int, Placement]  # values that must be whole on these ranks
    hinted: bool = False  # hints split parameters or activations, so try leaving the batch whole
    experts: ExpertProducts = NO_EXPERTS  # along the axes for experts


def infer(
    graph: Graph, fixed: FixedLayouts, everywhere: Placement, pieces: int, goal: Goal = DATA,
    inner_cost: InnerCost | None = None, explain: str | None = None, hardware: Hardware = CPU_CORE,
) -> GraphLayouts:  # fmt: skip
    """Infer the layouts of a graph; every op gets one signature for each axis of its placement.

    ``inner_cost`` prices inner signatures, whose ops communicate inside; without it they are not used.
    ``explain`` is a regular expression of module, variable or op names, whose alternatives are reported.
    ``hardware`` prices communication.  Raises LayoutError if no layout fits the memory budget.
    """
    return _Inference(graph, fixed, everywhere, pieces, goal, inner_cost, explain, hardware).run()


class _Inference:
    def __init__(
        self, graph: Graph, fixed: FixedLayouts, everywhere: Placement, pieces: int, goal: Goal,
        inner_cost: InnerCost | None, explain: str | None, hardware: Hardware,
    ) -> None:  # fmt: skip
        self.graph, self.fixed, self.pieces, self.goal = graph, fixed, pieces, goal
        self.inner_cost, self.explain, self.hardware = inner_cost, explain, hardware
        self.placement: dict[int, Placement] = {}
        for i in graph.inputs:
            self.placement[i.value] = fixed.variables[i.name][0] if i.kind == InputKind.VARIABLE else everywhere
        for n in graph.nodes:
            assert n.placement is not None
            self.placement.update({o: n.placement for o in n.outs if o >= 0})
        calls = [call_of(n, graph.metas) for n in graph.nodes]
        alike: dict[OpCall, OpCall] = {}  # one object for equal ones: what is known of them is found faster
        self.calls = [alike.setdefault(c, c) for c, _ in calls]
        self.reads = [r for _, r in calls]
        self.value: dict[int, list[Sbp]] = {v: [] for v in self.placement}
        self.operands: list[list[list[Sbp]]] = [[[] for _ in reads] for reads in self.reads]
        self.chosen: list[list[Signature]] = [[] for _ in calls]
        self.shapes = dict(graph.metas)
        self.ragged: list[set[tuple[int, int]]] = [set() for _ in calls]

    def run(self) -> GraphLayouts:
        axes = max((len(p.hierarchy) for p in self.placement.values()), default=1)
        reports = [self.axis(axis, axes) for axis in range(axes)]
        return GraphLayouts(
            {v: tuple(s) for v, s in self.value.items()},
            self.placement,
            [tuple(tuple(s) for s in node) for node in self.operands],
            [tuple(s) for s in self.chosen],
            tuple(reports),
            {a: self.fixed.experts for a in range(axes) if self.goal.mode(a) == ParallelMode.EXPERT},
        )

    def axis(self, axis: int, axes: int) -> AxisReport:
        """Decide one axis."""
        mode = self.goal.mode(axis)
        variables: dict[int, tuple[Sbp, ...]] = {}
        free: dict[int, Sbp | None] = {}
        for i in self.graph.inputs:
            if i.kind == InputKind.VARIABLE:
                variables[i.value] = self.layouts_of(i.value, i.name, axis, mode)
            else:
                entries = self.fixed.batch.get(i.name, ())
                free[i.value] = entries[axis] if axis < len(entries) else None
        targets = [RequiredLayout(v, B, where) for v, where in self.fixed.results.items()]
        cut = CutGraph(self.graph, self.calls, self.reads, self.placement, self.shapes, self.ragged)
        further = {
            later: max(p.hierarchy[later] for p in self.placement.values() if later < len(p.hierarchy))
            for later in range(axis + 1, axes)
        }
        problem = Problem(cut, AxisRequest(
            axis, mode, variables, free, targets, self.pieces, self.fixed.hinted, self.goal.mirrored, self.hardware,
            self.inner_cost, self.fixed.experts if mode == ParallelMode.EXPERT else NO_EXPERTS,
            math.prod(n for later, n in further.items() if self.goal.mode(later) == ParallelMode.TENSOR),
        ))  # fmt: skip
        rest = math.prod(further.values())
        choice, report = choose(problem, self.goal, rest, self.explain)
        for item, option in zip(problem.items, choice, strict=True):
            self.settle(item, item.options[option], axis, axes)
        for i in self.graph.inputs:
            if i.kind != InputKind.VARIABLE and axis < len(self.placement[i.value].hierarchy):
                self.value[i.value].append(B)
        for n, call in zip(self.graph.nodes, self.calls, strict=True):
            made = zip(n.outs, call.outs, strict=True)
            self.shapes.update({o: meta for o, meta in made if o >= 0 and meta is not None})
        return report

    def layouts_of(self, value: int, name: str, axis: int, mode: ParallelMode) -> tuple[Sbp, ...]:
        """The layouts that a variable may have along an axis."""
        where, entries = self.fixed.variables[name]
        if axis >= len(where.hierarchy):
            return (B,)
        entry = entries[axis]
        if entry is not None:
            return (entry,)
        if mode in WHOLE_VARIABLES:
            return (B,)
        shape, parts = self.shapes[value].shape, where.axes[axis]
        cuts = [Split(d) for d, n in enumerate(shape) if n and -n % even_shares(parts) <= n * UNEVEN]
        cuts = cuts or [Split(d) for d, n in enumerate(shape) if n > device_count(parts)]
        if mode == ParallelMode.TENSOR and cuts and len(shape) > 1:
            return tuple(cuts)
        return (B, *cuts)

    def settle(self, item: LayoutItem, signature: Signature, axis: int, axes: int) -> None:
        """Keep the choice of one item."""
        if axis >= len(item.placement.hierarchy):
            return
        parts = item.placement.axes[axis]
        for o, layout in zip(item.outs, signature.outs, strict=True):
            if o >= 0:
                assert layout is not None
                self.value[o].append(layout)
        k = item.node
        if k < 0:
            (v,), (layout,) = item.outs, signature.outs
            if isinstance(layout, Split):
                part = local_shape(self.shapes[v].shape, layout, parts, largest(parts))
                self.shapes[v] = Meta(part, self.shapes[v].dtype)
            return
        self.chosen[k].append(signature)
        self.ragged[k] |= _ragged(self.calls[k], signature, parts)
        for j, need in enumerate(signature.ins):
            self.operands[k][j].append(need)
        if axis + 1 < axes:
            self.calls[k] = largest_local(self.calls[k], signature, parts)


def largest_local(call: OpCall, signature: Signature, parts: Parts) -> OpCall:
    """The op as the device with the largest share along an axis sees it: without weights, the first one."""
    at = largest(parts)
    op, args, kwargs, metas = local_op(call, signature, parts, at)
    ins = tuple(Meta(local_shape(m.shape, s, parts, at), m.dtype) for m, s in zip(call.ins, signature.ins, strict=True))
    rest = iter(metas)
    outs = tuple(next(rest) if m is not None else None for m in call.outs)
    return OpCall(op, substitute(args, Ref), tuple(kwargs), ins, outs)


def _ragged(call: OpCall, signature: Signature, parts: Parts) -> set[tuple[int, int]]:
    """(number of the operand or output, dim) of the dims whose local sizes differ between devices of an axis."""
    tensors = zip((*call.ins, *call.outs), (*signature.ins, *signature.outs), strict=True)
    most, least = largest(parts), smallest(parts)
    return {
        (i, layout.dim)
        for i, (meta, layout) in enumerate(tensors)
        if meta is not None and isinstance(layout, Split)
        if local_shape(meta.shape, layout, parts, most) != local_shape(meta.shape, layout, parts, least)
    }
