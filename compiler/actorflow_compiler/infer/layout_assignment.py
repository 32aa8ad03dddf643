"""The layout pass: give every value of a rewritten step a layout, as hints, budget and hardware allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp, Split
from actorflow_compiler.graph.graph import Graph, InputKind
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_compiler.infer.axes import FixedLayouts, GraphLayouts, infer
from actorflow_compiler.infer.expert_axis import NO_EXPERTS, expert_products, split_experts
from actorflow_compiler.infer.inner_signatures import decompose_inner, inner_cost
from actorflow_compiler.infer.notes import notes_on, ring_notes
from actorflow_compiler.infer.reports import explanation_lines, report_lines
from actorflow_compiler.infer.variables import (
    apply_zero,
    assign_variable_layouts,
    better_for_zero,
    gather_at_use,
    is_hinted,
    open_axes,
    taken_by_others,
)
from actorflow_compiler.placing.place import PlacedStep
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.rewriting.micro_batches import MicroBatchedStep

TO_EVERYBODY = 64 << 10  # bytes: results up to this size go to every rank


@dataclass(frozen=True, slots=True)
class StepLayouts:
    """A step with its graph's layouts decided: of values, variables and results."""

    graph: Graph
    layouts: GraphLayouts
    pieces: int  # micro-batches in an iteration
    everywhere: Placement  # placement of inputs other than variables, and of results that every rank gets
    gathered: Mapping[int, bool]  # result → whether every rank gets it whole; else it keeps its placement and layout
    variables: tuple[Variable, ...]
    times: int = 1  # how often the graph's work is done; in the mirrored view every device does all of it
    notes: tuple[str, ...] = ()
    hardware: Hardware = CPU_CORE  # on whose links values take the quickest routes

    @property
    def homes(self) -> Mapping[str, tuple[Placement, NdSbp]]:
        """Variable → its placement and layout."""
        return {v.name: (v.placement, v.sbp) for v in self.variables}


def assign_layouts(
    pieces: MicroBatchedStep, placed: PlacedStep, captured: Capture, request: StepRequest
) -> StepLayouts:
    """Give variables the hinted layouts, and infer all others.

    Raises LayoutError for hints that do not fit, and for a memory budget that no layout fits.
    """
    found = _assigned(pieces, placed, captured, request, {})
    hints, history, hardware = request.preferences.hints, request.history, request.devices.hardware
    better = better_for_zero(found.variables, captured.parameter, hints, history.fixed, hardware)
    if not better:
        return found
    try:
        return _assigned(pieces, placed, captured, request, better)
    except LayoutError:  # the budget holds the first layouts, and none with the other dims
        return found


def _assigned(
    pieces: MicroBatchedStep, placed: PlacedStep, captured: Capture, request: StepRequest, inferred: Mapping[str, NdSbp]
) -> StepLayouts:
    """The layouts, where ZeRO splits what is best beside the layouts that parameters were ``inferred`` to have."""
    hints, fixed = request.preferences.hints, request.history.fixed
    goal, graph = request.preferences.goal, pieces.graph
    hinted = is_hinted(graph, hints)
    hints = hints if request.mirrored else split_experts(graph, placed.owners, hints, goal)
    hardware = request.devices.hardware
    variables = assign_variable_layouts(captured, graph, placed.owners, hints, fixed, hardware, inferred)
    lie = {v.name: open_axes(v, captured.parameter.get(v.name), hints, fixed, goal) for v in variables}
    goal = replace(goal.with_hints(hints.axes), mirrored=bool(request.mirrored))
    graph = apply_zero(graph, variables, hints.zero, captured.parameter, hardware, inferred)
    if ParallelMode.AUTO in goal.modes:  # variables that may be split are gathered once for each phase
        graph = gather_at_use(graph, {name: (None,) for name, layout in lie.items() if None in layout})
    gathered = {r: graph.metas[r].nbytes <= TO_EVERYBODY for r in graph.results}
    if goal.budget is not None:
        goal = replace(goal, taken=taken_by_others(graph, fixed))
    decided = FixedLayouts(
        {v.name: (v.placement, lie[v.name]) for v in variables},
        {i.name: goal.batch(Split(0, pieces.count)) for i in graph.inputs if i.kind == InputKind.BATCH},
        {r: placed.everywhere for r, all_ranks in gathered.items() if all_ranks},
        hinted,
        expert_products(graph) if ParallelMode.EXPERT in goal.modes else NO_EXPERTS,
    )
    layouts = infer(
        graph,
        decided,
        placed.everywhere,
        pieces.count,
        goal,
        inner_cost,
        request.preferences.explain,
        hardware,
    )
    told = (*notes_on(graph), *ring_notes(graph, layouts, goal))
    notes = (*told, *report_lines(layouts.reports), *explanation_lines(layouts.reports))
    graph, layouts = decompose_inner(graph, layouts)
    inputs = (i for i in graph.inputs if i.kind == InputKind.VARIABLE)
    variables = tuple(replace(v, sbp=layouts.value[i.value]) for v, i in zip(variables, inputs, strict=True))
    return StepLayouts(
        graph, layouts, pieces.count, placed.everywhere, gathered, variables, request.mirrored or 1, notes,
        hardware,
    )  # fmt: skip
