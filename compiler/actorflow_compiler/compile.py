"""A user's step goes in; what can be cut into a plan comes out: capture, place, cut in time, infer, box, lower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from actorflow_compiler.capture.capture import Argument, capture
from actorflow_compiler.capture.mirrored import on_each_device, refuse_parallel
from actorflow_compiler.core.collector import young_only
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.core.torch_internals import traced_on
from actorflow_compiler.cutting.lower import lower
from actorflow_compiler.cutting.lowered import Laid
from actorflow_compiler.cutting.redundant import tell_repeated
from actorflow_compiler.graph.graph import Graph, merge_equal
from actorflow_compiler.hints.constrain import check_constraints
from actorflow_compiler.hints.hints import Hints
from actorflow_compiler.infer import DATA, Fixed, Goal, explained, infer, tell
from actorflow_compiler.infer.folded import fold_by_module
from actorflow_compiler.infer.inner_signatures import inner_cost
from actorflow_compiler.infer.notes import notes_on, tell_traced
from actorflow_compiler.infer.variables import (
    apply_zero,
    gather_at_use,
    is_hinted,
    lay_variables,
    open_axes,
    taken_by_others,
)
from actorflow_compiler.infer.write_out import write_out
from actorflow_compiler.numbers.numbers import Numbers
from actorflow_compiler.placing.automatic import Automatic, Rates, cut_automatically
from actorflow_compiler.placing.stages import computing, place_ops
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.rewriting.expand import expand
from actorflow_compiler.rewriting.pieces import cut_in_time
from actorflow_compiler.substitutes.decompositions import BATCH_NORM, join_norms
from actorflow_compiler.substitutes.random_table import is_random
from actorflow_compiler.values.checks import Check, Checks
from actorflow_compiler.values.decided import Decisions
from actorflow_compiler.values.gradients import NONE, Gradients, Standing
from actorflow_compiler.values.variables import State

TO_EVERYBODY = 64 << 10  # bytes: results up to this size go to every rank


@young_only()
def compile_step(
    name: str,
    step: Callable[[list[Tensor]], list[Tensor]],
    arguments: Sequence[Argument],
    state: State,
    *,
    train: bool,
    world: int,
    device_type: str,
    micro_batches: int,
    hints: Hints,
    fixed: Mapping[str, Variable],
    fresh: bool = False,
    goal: Goal = DATA,
    explain: str | None = None,
    defined: str = "",
    later: bool = False,
    schedule: str = "auto",
    rates: Rates = Rates(),  # noqa: B008 (a frozen value)
    own: Sequence[bool] | None = None,
    doing: Callable[[str], None] = lambda _: None,
    learn: Callable[[Gradients, Decisions, Sequence[Check]], None] = lambda *_: None,
    standing: Standing = NONE,
    numbers: Numbers | None = None,
    value: Callable[[str], Tensor] | None = None,
    checks: Checks | None = None,
) -> Laid:
    """Compile one step for ``world`` devices, up to where it is cut into actors.

    ``fixed`` are variables whose layout an earlier plan has decided.  ``explain`` is a regular
    expression of ops, modules or variables whose alternatives go into the plan's notes.  ``defined`` is the line
    that the step begins in, for errors; ``later`` says that the job has run with another batch, so that this one
    may go in fewer pieces.  ``schedule`` is the schedule's name, and ``rates`` what a device is estimated to do, for
    stages that are cut automatically.  ``own`` is for a step of the mirrored view, which every device runs by itself:
    for each argument whether it has dim 0 for the devices' own items, as all results have then.  ``doing`` is told
    the name of each pass as it begins; ``standing`` is how gradients of other calls stand, and ``learn`` is told what
    the step has to do with them; ``numbers`` takes what it does with numbers that calls may
    change, and ``checks`` which branches only raise on one side.  Raises CaptureError, CallError, LayoutError,
    StateError or PlanError.
    """
    doing("capture")
    step = step if own is None else on_each_device(step, own, world)
    mirrored = 0 if own is None else world
    device = traced_on(device_type)
    captured = capture(
        step, arguments, state, train=train, hints=hints, fresh=fresh, standing=standing, mirrored=mirrored,
        device=device, numbers=numbers, value=None if mirrored else value, checks=None if mirrored else checks,
    )  # fmt: skip
    learn(captured.gradients, captured.decisions, captured.checks)
    homes = {name: home for name, home in hints.homes.items() if name in captured.kinds}
    ranks = computing(world, homes, captured.graph, hints)
    # with automatic stages each of them is the mesh that is asked for
    mesh = (len(ranks),) if hints.stages else goal.mesh_of(len(ranks), world)
    unplaced = Placement(device_type, ranks, mesh)
    everywhere = unplaced if len(ranks) == world else Placement(device_type, tuple(range(world)), (world,))
    doing("place")
    if mirrored:
        refuse_parallel(name, captured.graph, hints, fixed, everywhere)
    captured = replace(captured, graph=join_norms(captured.graph))
    owners = {n: v.placement for n, v in fixed.items() if captured.parameter.get(n, n) not in homes}
    automatic = Automatic(captured.graph)
    if hints.stages is not None:
        rates = replace(rates, memory=rates.memory or goal.budget)
        automatic = cut_automatically(
            captured,
            hints.stages,
            unplaced,
            owners,
            elsewhere=homes.keys(),
            pieces=micro_batches,
            mesh=goal.mesh,
            schedule=schedule,
            rates=rates,
        )
    placed = place_ops(automatic.graph, unplaced, owners, captured.parameter, automatic.begins, homes, world)
    asked = f"micro_batches={micro_batches} of job {name!r}" + (f" ({defined})" if defined else "")
    pieces = cut_in_time(placed.graph, micro_batches, asked, later)
    if world > 1 or pieces.count > 1:
        refuse_random(captured.graph)
    graph = expand(pieces.graph, BATCH_NORM, lambda p: p.size > 1 and not mirrored)
    graph = merge_equal(graph, is_random)
    check_constraints(graph)
    variables = lay_variables(captured, graph, placed.owners, hints, fixed)
    lie = {v.name: open_axes(v, captured.parameter.get(v.name), hints, fixed, goal) for v in variables}
    hinted = is_hinted(graph, hints)
    goal = replace(goal.with_hints(hints.axes), mirrored=bool(mirrored))
    graph = apply_zero(graph, variables, hints.zero)
    if "auto" in goal.modes:  # what may be found to be stored in parts is gathered for each phase apart
        graph = gather_at_use(graph, {name: (None,) for name, layout in lie.items() if None in layout})
    gather = {r: graph.metas[r].nbytes <= TO_EVERYBODY for r in graph.results}
    batch = {i.name: goal.batch(Split(0, pieces.count)) for i in graph.inputs if i.kind == "batch"}
    if goal.budget is not None:
        goal = replace(goal, taken=taken_by_others(graph, fixed))
    decided = Fixed(
        {v.name: (v.placement, lie[v.name]) for v in variables},
        batch,
        {r: everywhere for r, all_ranks in gather.items() if all_ranks},
        hinted,
    )
    doing("infer")
    layouts = infer(graph, decided, everywhere, pieces.count, goal, inner_cost, explain)
    notes = (
        *tell_traced(device, device_type),
        *automatic.notes,
        *pieces.notes,
        *notes_on(graph),
        *tell(layouts.reports),
        *explained(layouts.reports),
    )
    graph, layouts = write_out(graph, layouts)
    variables = tuple(
        replace(v, sbp=layouts.value[i.value])
        for v, i in zip(variables, (i for i in graph.inputs if i.kind == "variable"), strict=True)
    )
    laid = {v.name: (v.placement, v.sbp) for v in variables}
    doing("box and lower")
    program = lower(graph, layouts, pieces.count, everywhere, gather, laid, mirrored or 1)
    notes = (*notes, *tell_repeated(program.repeated, program.flops_done))
    modules = [module for root in state.modules.values() for module, _ in root.named_modules()]
    origins = fold_by_module(graph, layouts, pieces.count, modules, captured.parameter)
    again = any(n.again for n in graph.nodes)
    return Laid(name, world, pieces.count, program, variables, captured.constants, notes, origins, again)


def refuse_random(graph: Graph) -> None:
    """Raise CaptureError for an op that draws random numbers: cut over devices or time they would be other numbers."""
    for n in graph.nodes:
        if is_random(n):
            where = f" in {n.where}" if n.where else ""
            raise CaptureError(
                f"the step draws random numbers with {n.op}{where}, which would be others on several devices or in "
                f"micro-batches than on one; expected: random ops of PyTorch itself, which are drawn alike under every "
                f"plan. Write it with those (torch.rand, torch.randn, …), or draw outside the job and pass the tensor"
            )
