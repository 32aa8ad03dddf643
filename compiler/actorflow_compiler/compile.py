"""A user's step goes in; a plan comes out: capture, place, cut in time, infer, box, lower, segment, cut into actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from actorflow_compiler.capture import Argument, capture
from actorflow_compiler.cut import cut
from actorflow_compiler.decompositions import BATCH_NORM, join_norms
from actorflow_compiler.errors import CaptureError, LayoutError
from actorflow_compiler.expand import expand
from actorflow_compiler.from_fx import RANDOM, Capture
from actorflow_compiler.graph import Graph, merge_equal
from actorflow_compiler.hints import Hints
from actorflow_compiler.infer import Fixed, infer
from actorflow_compiler.lower import lower
from actorflow_compiler.ops import Meta
from actorflow_compiler.pieces import cut_in_time
from actorflow_compiler.placement import Placement
from actorflow_compiler.plan import Plan, Variable
from actorflow_compiler.sbp import B, NdSbp, Sbp, Split, check_fits, local_shape, show
from actorflow_compiler.segment import segment
from actorflow_compiler.stages import place_ops
from actorflow_compiler.variables import State

TO_EVERYBODY = 64 << 10  # bytes: results up to this size go to every rank


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
) -> Plan:
    """Compile one step for ``world`` devices; the plan has no slot counts and orders yet.

    ``fixed`` are variables whose layout an earlier plan has decided.  Raises CaptureError,
    LayoutError or PlanError.
    """
    captured = capture(step, arguments, state, train=train, places=hints.places, fresh=fresh)
    if world > 1 or micro_batches > 1:
        refuse_random(captured.graph)
    everywhere = Placement(device_type, tuple(range(world)), (world,))
    placed = place_ops(
        join_norms(captured.graph), world, device_type, {n: v.placement for n, v in fixed.items()}, captured.parameter
    )
    pieces = cut_in_time(placed.graph, micro_batches if train else 1)
    graph = expand(pieces.graph, BATCH_NORM, lambda p: p.size > 1)
    graph = merge_equal(graph, RANDOM)
    variables = lay_variables(captured, graph, placed.owners, hints, fixed)
    homes = {v.name: (v.placement, v.sbp) for v in variables}
    gather = {r: graph.metas[r].nbytes <= TO_EVERYBODY for r in graph.results}
    batch = {i.name: (Split(0, pieces.count),) for i in graph.inputs if i.kind == "batch"}
    decided = Fixed(homes, batch, {r: everywhere for r, all_ranks in gather.items() if all_ranks})
    layouts = infer(graph, decided, everywhere, pieces.count)
    program = lower(graph, layouts, pieces.count, everywhere, gather, homes)
    segmented = segment(program)
    return cut(name, world, pieces.count, segmented, placed.stages, variables, captured.constants, pieces.notes)


def refuse_random(graph: Graph) -> None:
    """Raise CaptureError for an op that draws random numbers: cut over devices or time they would be other numbers."""
    for n in graph.nodes:
        if n.op in RANDOM:
            where = f" in {n.where}" if n.where else ""
            raise CaptureError(
                f"the step draws random numbers ({n.op}{where}), which would be others on several devices "
                f"or in micro-batches than on one; expected: none in a job that is cut. "
                f"Set dropout to 0, or draw outside the job and pass the tensor"
            )


def lay_variables(
    captured: Capture, graph: Graph, owners: Mapping[str, Placement], hints: Hints, fixed: Mapping[str, Variable]
) -> tuple[Variable, ...]:
    """Where and how every variable lies: as fixed, as hinted, or broadcast; optimizer state lies as its parameter does.

    Raises LayoutError for a hint that does not fit its tensor.
    """
    found: dict[str, Variable] = {}
    metas: dict[str, Meta] = {i.name: graph.metas[i.value] for i in graph.inputs if i.kind == "variable"}
    for name in sorted(metas, key=lambda n: captured.kinds[n] == "optimizer"):
        meta, kind = metas[name], captured.kinds[name]
        if name in fixed:
            found[name] = fixed[name]
            continue
        placement = owners[name]
        sbp: NdSbp = (B,) * len(placement.hierarchy)
        if kind == "optimizer":
            parameter = found[captured.parameter[name]]
            placement = parameter.placement
            sbp = parameter.sbp if parameter.shape == meta.shape else (B,) * len(placement.hierarchy)
        elif name in hints.layouts:
            sbp = fit_hint(name, meta, hints.layouts[name], placement)
        found[name] = Variable(name, meta.shape, meta.dtype, placement, sbp, kind)
    return tuple(found[name] for name in metas)


def fit_hint(name: str, meta: Meta, hint: Sequence[Sbp | None], placement: Placement) -> NdSbp:
    """A hint as the layout of a variable on its placement; raises LayoutError where it does not fit."""
    if len(hint) > len(placement.hierarchy):
        raise LayoutError(
            f"{name} is distributed as {show(h or B for h in hint)}, "
            f"but its placement {placement} has {len(placement.hierarchy)} mesh axis"
        )
    out: list[Sbp] = []
    shape = meta.shape
    for axis, size in enumerate(placement.hierarchy):
        wanted = hint[axis] if axis < len(hint) else None
        entry = check_fits(wanted or B, shape, size, name)
        if not isinstance(entry, Split) and entry != B:
            raise LayoutError(
                f"{name} is distributed as {entry}; "
                f"a parameter can be split or broadcast, a partial sum is only made by ops"
            )
        shape = local_shape(shape, entry, size, 0)
        out.append(entry)
    return tuple(out)
