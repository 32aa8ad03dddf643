"""Cut a captured step into pipeline stages of about equal time, and place each stage on its devices.

The units that are shared among the stages are the visits of the forward pass: stretches of the program between
entering and leaving modules.  Edges between them go forward, so every cut between two visits makes a pipeline:
encoders and decoders, skip connections and tied weights need no special case, they only cost the bytes that cross.
Ops that depend on no state (masks, positions) belong to no unit; they are repeated where they are used.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.ops import FLOATS, Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.core.views import CHEAP_OPS
from actorflow_compiler.graph.flops import flops_of
from actorflow_compiler.graph.graph import Graph, InputKind, Node, call_of
from actorflow_compiler.hints.hints import StagesHint
from actorflow_compiler.placing.partition import PartitionUnit, partition
from actorflow_compiler.placing.variable_shares import WHOLE, VariableShares

SLACK = 0.03  # fraction of the slowest stage's seconds (an estimate) to give up where fewer bytes cross then


@dataclass(frozen=True, slots=True)
class AutomaticStages:
    """A graph whose ops carry the placements of their stages."""

    graph: Graph
    begins: tuple[int, ...] = ()  # the visit that each stage begins with
    notes: tuple[str, ...] = ()


def cut_automatically(
    captured: Capture,
    asked: StagesHint,
    everywhere: Placement,
    fixed: Mapping[str, Placement],
    *,
    elsewhere: Collection[str] = (),
    pieces: int = 1,
    mesh: Sequence[int] = (),
    schedule: ScheduleName = ScheduleName.AUTO,
    hardware: Hardware = CPU_CORE,
    shares: VariableShares = WHOLE,
) -> AutomaticStages:
    """Cut a step into stages of about equal time, at places where few bytes cross.

    A stage whose slowest device is slow, for its speed or for its share of the batch, gets less of the step.
    ``everywhere`` has all devices; ``placements_of`` shares them among the stages, each of which is a ``mesh``.
    Parameters that an earlier plan has placed (``fixed``) stay: the stages follow them, and a step that calls no
    modules is not cut.  Parameters stored ``elsewhere`` take no memory of a stage.  ``pieces`` is the number of
    micro-batches; ``hardware`` says what a device computes and holds, and what joins two; ``shares`` says which part of
    the variables of a stage each of its devices holds.  Raises LayoutError where there are fewer visits than stages,
    for stages that do not divide over the devices, and for ops that a scope places by hand.
    """
    placements = placements_of(asked, everywhere, schedule, mesh)
    by_hand = next((n for n in captured.graph.nodes if n.placement is not None), None)
    if by_hand is not None:
        where = f" in {by_hand.where}" if by_hand.where else ""
        raise LayoutError(
            f"{asked.origin} cuts the whole step, but a scope puts {by_hand.op}{where} on {by_hand.placement}; "
            f"one of both was expected: take the flow.scope.placement out, or place all modules by patterns"
        )
    each = everywhere.size / min(len(placements), everywhere.size)
    units = VisitCosts(captured, pieces, each, hardware, elsewhere, shares)
    notes: tuple[str, ...] = ()
    if not units.costs and fixed:  # for example an optimizer's step: it runs where its state is
        return AutomaticStages(captured.graph)
    follows = units.placed_as(fixed)
    if any(p is not None for p in follows):
        first, where_to = _follow(units.costs, [p or placements[0] for p in follows], placements)
    else:
        first, notes = _cut(units.costs, asked, placements, everywhere, pieces, hardware)
        where_to = placements
    begins = tuple(units.visits[f] for f in first)
    nodes = []
    for n, unit in zip(captured.graph.nodes, units.unit, strict=True):
        nodes.append(n if unit is None else replace(n, placement=where_to[bisect.bisect(first, unit) - 1]))
    return AutomaticStages(replace(captured.graph, nodes=tuple(nodes)), begins, notes)


def placements_of(
    asked: StagesHint, everywhere: Placement, schedule: ScheduleName = ScheduleName.AUTO, mesh: Sequence[int] = ()
) -> tuple[Placement, ...]:
    """The devices of each stage, which are a ``mesh`` if one is given.

    With at most as many stages as devices, each gets an equal number of neighbouring devices.  More stages go
    round the devices, or over them and back (a V) if the schedule wants that.  Raises LayoutError where they do not
    divide, and where a stage has another number of devices than the mesh.
    """
    if asked.placements:
        return asked.placements
    count, world = asked.count, everywhere.size
    if (world % count if count <= world else count % world) != 0:
        near = [s for s in range(1, 2 * max(count, world)) if (world % s if s <= world else s % world) == 0]
        below, above = [s for s in near if s < count][-1:], [s for s in near if s > count][:1]
        raise LayoutError(
            f"{asked.origin}: {count} stages were found for {world} devices; a number that divides {world}, or a "
            f"multiple of it, was expected: take {' or '.join(map(str, [*below, *above]))}, or say with "
            f"flow.place(model, [placement, …]) where each stage is"
        )
    each = max(1, world // count)
    if mesh and math.prod(mesh) != each:
        sizes = " × ".join(map(str, mesh))
        raise LayoutError(
            f"{asked.origin}: each stage has {each} of the {world} devices, and parallel= asks for a mesh of {sizes} = "
            f"{math.prod(mesh)} for each; start the run with --devices {math.prod(mesh) * count}, or change the sizes"
        )
    groups = [everywhere.ranks[k : k + each] for k in range(0, world, each)]
    turns = range(max(1, count // world))
    order = [g for t in turns for g in (reversed(groups) if schedule.is_v_shaped and t % 2 else groups)]
    return tuple(Placement(everywhere.type, tuple(g), tuple(mesh) or (each,)) for g in order)


def _cut(
    units: Sequence[PartitionUnit],
    asked: StagesHint,
    placements: Sequence[Placement],
    everywhere: Placement,
    pieces: int,
    hardware: Hardware,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The first unit of each stage, and notes for the user."""
    stages = len(placements)
    if len(units) < stages:
        raise LayoutError(
            f"{asked.origin}: {stages} stages were found, but the step can be cut into {len(units)} "
            f"part{'s' * (len(units) != 1)} only, so that {stages - len(units)} would have no op; it is cut where "
            f"modules (nn.Module) are called and return, outside of which there are no parts to tell apart: "
            f"make modules of the layers, or ask for at most {len(units)}"
        )
    neighbours = {tuple(dict.fromkeys((*a.ranks, *b.ranks))) for a, b in pairwise(placements) if a != b}
    slowest = min((hardware.link(ranks).bytes_per_s for ranks in neighbours), default=math.inf)
    slowness = [_slowness(p, hardware) for p in placements]
    cut = partial(partition, units, stages, bytes_per_second=slowest, pieces=pieces, slack=SLACK, slowness=slowness)
    if hardware.memory_bytes is None:
        return cut(), ()
    try:
        return cut(memory=hardware.memory_bytes / max(1, stages // everywhere.size)), ()
    except LayoutError as error:  # the schedule may keep fewer activations, by recomputing them
        return cut(), (f"{asked.origin}: {error}; it is cut for equal time",)


def _slowness(placement: Placement, hardware: Hardware) -> float:
    """How many times as long as an equal share takes on a device of speed 1 the last device of a stage takes."""
    shares = zip(placement.ranks, placement.shares, strict=True)
    return max(share * placement.size / hardware.speed(rank) for rank, share in shares)


def _follow(
    units: Sequence[PartitionUnit], follows: Sequence[Placement], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Stages where the parameters already are: one for each run of units, several where neighbours share one."""
    first: list[int] = []
    where: list[Placement] = []
    runs = [(p, len(list(g))) for p, g in groupby(follows)]
    wanted = [(p, len(list(g))) for p, g in groupby(placements)]
    same_order = [p for p, _ in runs] == [p for p, _ in wanted]
    at = 0
    for k, (placement, length) in enumerate(runs):
        stages = min(wanted[k][1], length) if same_order else 1
        first += [at + f for f in partition(units[at : at + length], stages)]
        where += [placement] * stages
        at += length
    return tuple(first), tuple(where)


class VisitCosts:
    """The visits of a graph and their costs; ``devices`` is how many share a stage, and the batch.

    ``costs`` has one unit for each visit, ``work`` the seconds of each node of the graph; None for those that are
    cheap to repeat.
    """

    def __init__(
        self,
        captured: Capture,
        pieces: int,
        devices: float,
        hardware: Hardware,
        elsewhere: Collection[str] = (),
        shares: VariableShares = WHOLE,
    ) -> None:
        self.captured, self.graph, self.elsewhere, self.shares = captured, captured.graph, elsewhere, shares
        self.pieces, self.devices, self.hardware = pieces, devices, hardware
        self.names = {i.value: i.name for i in self.graph.inputs if i.kind == InputKind.VARIABLE}
        self.held: set[int] = set(self.names)  # values that depend on state
        self.work = work = [self._seconds_of(n) for n in self.graph.nodes]
        nodes = list(zip(self.graph.nodes, work, strict=True))
        self.visits = sorted({n.visit for n, w in nodes if n.phase == Phase.FORWARD and w and n.op not in CHEAP_OPS})
        self.unit = [self._unit_of(n, w) for n, w in nodes]  # of each node
        self.first: dict[str, int] = {}  # variable → the unit that uses it first
        self.costs = self._costs(work)

    def placed_as(self, fixed: Mapping[str, Placement]) -> list[Placement | None]:
        """For each unit the placement of what it uses first, or of the unit before; None where nothing is placed."""
        found: list[Placement | None] = [None] * len(self.visits)
        for name, unit in self.first.items():
            if name in fixed and found[unit] is None:
                found[unit] = fixed[name]
        known = next((p for p in found if p is not None), None)
        for k, p in enumerate(found):
            found[k] = known = p or known
        return found

    def _seconds_of(self, n: Node) -> float | None:
        """Seconds of arithmetic, or of reading and writing tensors, whichever is longer.

        None for what depends on no state and is cheap to repeat.
        """
        call, operands = call_of(n, self.graph.metas)
        flops = flops_of(call)
        if flops == 0 and not any(v in self.held for v in operands):
            return None
        self.held.update(o for o in n.outs if o >= 0)
        nbytes: Counter[str] = Counter()  # dtype → bytes read and written
        for meta in (*call.ins, *call.outs):
            if meta is not None:
                nbytes[meta.dtype] += meta.nbytes
        speed = self.hardware.flops_on({dtype: n for dtype, n in nbytes.items() if dtype in FLOATS})
        return max(flops / speed, nbytes.total() / self.hardware.memory_bytes_per_s) / self.devices

    def _unit_of(self, n: Node, work: float | None) -> int | None:
        """The unit that a node belongs to; None for free ones, and for those whose operands say it."""
        if n.phase == Phase.OPTIMIZER or n.visit < 0 or work is None or not self.visits:
            return None
        return max(0, bisect.bisect(self.visits, n.visit) - 1)

    def _costs(self, work: Sequence[float | None]) -> tuple[PartitionUnit, ...]:
        count, metas = len(self.visits), self.graph.metas
        seconds, parameters, activations = [0.0] * count, [0.0] * count, [0.0] * count
        at: dict[int, int] = {}  # value → unit of its maker
        span: dict[int, tuple[int, int]] = {}  # value → the first and the last unit that make or read it
        base: dict[int, int] = {}  # view → its base
        forward: set[int] = set()  # values of the forward pass
        kept: set[int] = set()  # of these: those that the backward pass reads
        for n, own, took in zip(self.graph.nodes, self.unit, work, strict=True):
            reads = {base.get(v, v) for v in n.reads()} & self.held
            unit = own
            if own is None and n.phase == Phase.BACKWARD:  # gradients are added up where the earliest of them is
                unit = min((at[v] for v in reads if v in at), default=None)
            if unit is None or n.phase == Phase.OPTIMIZER:
                continue
            for v in reads:
                low, high = span.get(v, (unit, unit))
                span[v] = min(low, unit), max(high, unit)
            if n.phase == Phase.BACKWARD:
                kept.update(reads & forward)
            if n.op in CHEAP_OPS and len(reads) == 1:
                (source,) = reads
                if source in self.names or metas[source].nbytes <= metas[n.outs[0]].nbytes:
                    base[n.outs[0]] = source  # the base is what crosses or is kept
                    continue
            made = [o for o in n.outs if o >= 0]
            at.update(dict.fromkeys(made, unit))
            span.update(dict.fromkeys(made, (unit, unit)))
            if n.phase == Phase.FORWARD:
                forward.update(made)
            if n.op not in CHEAP_OPS:
                seconds[unit] += took or 0.0
        for v in kept:
            activations[at[v]] += metas[v].nbytes / self.pieces / self.devices
        self.first.update({self.names[v]: low for v, (low, _) in span.items() if v in self.names})
        self._add_state(seconds, parameters)
        crossing = self._crossing(span)
        return tuple(map(PartitionUnit, seconds, parameters, activations, crossing))

    def _crossing(self, span: Mapping[int, tuple[int, int]]) -> list[float]:
        """Bytes that cross the cut before each unit; a parameter of both sides crosses, and its gradient returns."""
        change = [0.0] * (len(self.visits) + 1)
        for v, (low, high) in span.items():
            nbytes = self.graph.metas[v].nbytes
            size = 2.0 * nbytes if v in self.names else nbytes / self.devices
            change[low + 1] += size
            change[high + 1] -= size
        return [max(0.0, total) for total in accumulate(change[:-1])]

    def _add_state(self, seconds: list[float], parameters: list[float]) -> None:
        """Add bytes of parameters, gradients and optimizer state to ``parameters``, their update to ``seconds``."""
        kinds = self.captured.kinds
        updated = {self.names[old] for old, _ in self.graph.updates}
        trained = {name for name in updated if kinds[name] == "parameter"}
        for v, name in self.names.items():
            owner = self.captured.parameter.get(name, name)
            if owner not in self.first or owner in self.elsewhere:
                continue
            unit, size, shares = self.first[owner], self.graph.metas[v].nbytes, self.shares
            if name == owner:
                held = shares.parameter(owner) + (shares.gradient(owner) if name in trained else 0.0)
            else:
                held = shares.state(owner)
            parameters[unit] += size * held
            if name in trained or name != owner:
                seconds[unit] += 2 * size * shares.state(owner) / self.hardware.memory_bytes_per_s
