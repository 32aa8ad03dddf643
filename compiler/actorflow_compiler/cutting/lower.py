"""Lower a graph with layouts to what every rank does, op by op, with the communication in between.

A *local value* has one number on all ranks that hold a part of it; its shape may differ from rank to rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from actorflow_compiler.boxing.aligned import MOST, NotAlignedError, ring_hop
from actorflow_compiler.boxing.group_exchanges import GroupExchanges
from actorflow_compiler.boxing.linked_routes import LinkedRoutes
from actorflow_compiler.boxing.routes import BoxCopy, Hop, HopKind
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Arg, Meta, Phase, Ref, Symbol, substitute_all
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp, Parts, local_shape, show
from actorflow_compiler.custom_ops.ring_attention import PASS_ON, RING, RING_BACKWARD, all_alike
from actorflow_compiler.cutting.listed_ranks import EVERY_RANK, ListedRanks, RankClasses
from actorflow_compiler.cutting.redundant import RedundantOp
from actorflow_compiler.graph.flops import dtype_of_flops, flops_of
from actorflow_compiler.graph.graph import CALL_INPUTS, InputKind, Node, call_of
from actorflow_compiler.hints.constrain import CONSTRAIN
from actorflow_compiler.infer import FREE_KINDS
from actorflow_compiler.infer.layout_assignment import StepLayouts
from actorflow_compiler.plan.plan import (
    LAST,
    SUM,
    Box,
    Collective,
    CollectiveKind,
    Combine,
    CombineKind,
    Comm,
    Exchange,
    Send,
    Step,
)
from actorflow_compiler.plan.rank_differences import (
    GroupSides,
    SendSides,
    UnlikeError,
    merged,
    merged_steps,
    same_arguments,
)  # fmt: skip
from actorflow_compiler.plan.region import coordinates, device_shape
from actorflow_compiler.signatures import OpCall, Signature, is_placed, local_op, signatures
from actorflow_compiler.signatures.local_mismatch import check_local_call

JOINS = frozenset({"actorflow.accumulate", "actorflow.pack", "actorflow.last"})
PhaseStage = tuple[Phase, int]  # phase and virtual pipeline stage


class ItemKind(StrEnum):
    """What an item of a program does."""

    COMPUTE = "compute"  # ``steps`` on each rank
    COMM = "comm"  # a collective, or a send from one rank to another
    JOIN = "join"  # the pieces of ``reads[0]`` become ``writes[0]``, combined as ``combine`` says


@dataclass(frozen=True, slots=True)
class ProgramItem:
    """One thing that ranks of a placement do: computing, a communication, or joining micro-batches."""

    kind: ItemKind
    phase: Phase
    placement: Placement
    pieces: bool  # whether it is done for each micro-batch
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    steps: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)  # rank → steps over local values
    comms: Mapping[int, Comm] = field(default_factory=dict)  # rank → its side; reads[i] moves to writes[i]
    combine: Combine = LAST
    flops: Mapping[int, float] = field(default_factory=dict)  # rank → of one firing
    where: str = ""
    bucket: int | None = None  # of a collective: those in the same bucket leave together
    stage: int = 0  # the virtual pipeline stage
    again: bool = False  # a forward op that is recomputed for the backward pass
    line: str = ""  # of the user's script
    flops_dtype: str = ""  # of the operands, by bytes; empty where there are no FLOPs
    groups: frozenset[tuple[int, ...]] = frozenset()  # of ranks that communicate so, also of those that are not listed
    after: tuple[int, ...] = ()  # of a communication: values that are made before it begins, beside what it reads
    sides: GroupSides | SendSides | None = None  # of a communication: those of all ranks, if some are not listed


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """All items, in an order in which they can run.

    Items say what listed ranks do, which are all ranks, or one of each class.  First ranks of placements are listed.
    """

    items: tuple[ProgramItem, ...]
    metas: Mapping[tuple[int, int], Meta]  # (local value, rank) → shape and dtype
    alias: Mapping[tuple[int, int], int]  # (local value, rank) → the value that it is on that rank
    sbp: Mapping[int, str]  # local value → its SBP, for people
    names: Mapping[int, str]
    inputs: Mapping[int, tuple[str, InputKind]]  # local value → (name, kind) of an input
    updates: tuple[tuple[str, int], ...]  # variable → local value
    results: tuple[tuple[int, Placement, NdSbp, Meta], ...]  # local value, where, how, logical meta
    flops: float  # useful ones in an iteration: of one device that computes everything once
    flops_done: float  # of all devices in an iteration
    repeated: Mapping[RedundantOp, float] = field(default_factory=dict)  # op → FLOPs of ``flops_done`` beyond ``flops``
    listed: ListedRanks = EVERY_RANK

    def is_variable(self, value: int) -> bool:
        """Whether a local value is a variable."""
        return value in self.inputs and self.inputs[value][1] == InputKind.VARIABLE


def lower(step: StepLayouts) -> LoweredProgram:
    """Lower every op to what each rank does of it, preceded by the communication that its operands need."""
    return _Lowering(step).run(step.gathered, step.homes)


def lower_folded(step: StepLayouts, world: int, alike: float = 0.0, runs: bool = False) -> LoweredProgram:
    """As ``lower``, for one rank of each class of ranks that are alike on the step's hardware.

    With ``alike``, ranks count as such where the parts that they hold differ by no more than this share.  A program
    that ``runs`` has also what its ranks do differently (``rank_differences``), which takes time for each of them.

    All ranks are listed where ranks send to others that are alike, but not one to one.  Raises PlanError where so many
    ranks exchange parts that do not fit together that these cannot be compared.
    """
    classes = RankClasses(world, [step.everywhere], step.hardware.link, step.hardware.speed, alike)
    for value, meta in step.graph.metas.items():
        if value in step.layouts.value:
            classes.lies((meta.shape, step.layouts.value[value], step.layouts.placement[value]))
    for variable in step.variables:
        classes.lies((variable.shape, variable.sbp, variable.placement))
    listed = classes.listed()
    while True:
        lowering = _Lowering(step, listed, classes, world if runs else 0)
        try:
            program = lowering.run(step.gathered, step.homes)
        except NotAlignedError as error:
            raise PlanError(
                f"a tensor of shape {error} was found, between so many ranks that hold parts that do not fit together, "
                "which are compared pair by pair; expected layouts in which each dimension is split by one mesh axis, "
                "or sizes that all mesh axes which split them divide: change the layout, or plan for fewer devices"
            ) from None
        found = classes.listed()
        if found == listed:
            break
        listed = found
    if lowering.apart or any(item.placement.ranks[0] not in listed for item in program.items):
        return lower(step)
    return program


@dataclass(frozen=True, slots=True)
class _HopContext:
    """The properties that all items of one hop share."""

    source: Placement  # of the items that run at the sources
    target: Placement  # of the items that run at the targets
    made_in: PhaseStage  # of the sources
    when: PhaseStage  # of the targets
    pieces: bool  # for each micro-batch


class _Lowering:
    def __init__(
        self,
        step: StepLayouts,
        listed: ListedRanks = EVERY_RANK,
        classes: RankClasses | None = None,
        world: int = 0,  # of a program that runs, of which not all ranks are listed
    ) -> None:
        self.listed, self.classes = listed, classes
        self.alike = listed.classes(world)  # listed rank → its class; empty if differences do not matter
        self.copied: dict[tuple[int, int, int], tuple[Hop, _Copied]] = {}  # (id of hop, target, source) → of a class
        most = math.inf if classes is None or world else MOST
        self.routes = LinkedRoutes(step.hardware, most)
        self.apart = False  # whether the listed ranks do not do for all, as one of them sends to one that is not listed
        self.sides: dict[int, tuple[Hop, GroupExchanges]] = {}  # id of hop → what ranks exchange in it
        self.same: dict[Exchange, Exchange] = {}  # one object for equal ones
        self.grouped: dict[int, _Groups] = {}  # id of a hop's groups → these, with the listed ranks
        self.paired: dict[int, tuple[Hop, frozenset[tuple[int, ...]]]] = {}  # id of a hop → who sends to whom
        graph, everywhere = step.graph, step.everywhere
        self.graph, self.layouts, self.pieces, self.times = graph, step.layouts, step.pieces, step.times
        self.by_all: tuple[Placement, NdSbp] = (everywhere, (B,) * len(everywhere.hierarchy))
        self.items: list[ProgramItem] = []
        self.metas: dict[tuple[int, int], Meta] = {}
        self.alias: dict[tuple[int, int], int] = {}
        self.sbp: dict[int, str] = {}
        self.names: dict[int, str] = {}
        # (value, placement, layout, of what is boxed anew for each phase and stage those of the reader) → local value
        self.boxed: dict[tuple[int, Placement, NdSbp, tuple[PhaseStage, bool] | None], int] = {}
        self.kind = {i.value: i.kind for i in graph.inputs}
        # value → phase (None: it is a variable or constant) and stage of its maker, and whether it is for each piece
        self.maker: dict[int, tuple[tuple[Phase | None, int], bool]] = {}
        self.first: dict[Placement, int] = {}  # placement → its first stage, to which boxing of variables belongs
        for n in sorted(graph.nodes, key=lambda n: n.stage):
            if n.placement is not None:
                self.first.setdefault(n.placement, n.stage)
        made = {o: n.pieces for n in graph.nodes for o in n.outs}
        self.moving = {old for old, new in graph.updates if made.get(new, False)}  # variables that each piece updates
        self.computed: set[int] = set()  # values that an op makes
        self.collected: set[int] = set()  # values that a collective makes once in an iteration
        self.next = max(graph.metas, default=0) + 1
        self.comm_id = 0
        self.flops = self.flops_done = 0.0
        self.repeated: dict[RedundantOp, float] = {}
        self._calls: dict[OpCall, OpCall] = {}  # one object for equal ones
        self._fitting: set[tuple[OpCall, OpCall]] = set()  # (whole, local) that have been checked
        self._along: dict[tuple[OpCall, Signature, Parts, int], tuple[OpCall, tuple[Meta, ...]]] = {}
        self._local: dict[
            tuple[OpCall, tuple[Signature, ...], tuple[int, ...], tuple[Parts, ...]], tuple[OpCall, tuple[Meta, ...]]
        ] = {}

    def new(self, sbp: NdSbp, name: str) -> int:
        self.sbp[self.next], self.names[self.next] = show(sbp), name
        self.next += 1
        return self.next - 1

    def run(self, gather: Mapping[int, bool], homes: Mapping[str, tuple[Placement, NdSbp]]) -> LoweredProgram:
        names = {i.value: i.name for i in self.graph.inputs}
        for i in self.graph.inputs:
            where, sbp = homes[i.name] if i.kind == InputKind.VARIABLE else self.by_all
            self.begin(i.value, where, sbp, i.name)
            taken = i.kind in CALL_INPUTS  # by sources; a constant is there, as a variable is
            self.maker[i.value] = ((Phase.SOURCE if taken else None, 0), False)
        for k, n in enumerate(self.graph.nodes):
            self.node(k, n)
        news = [
            (names[old], new, self.obtain(new, *homes[names[old]], (Phase.OPTIMIZER, self.maker[new][0][1])))
            for old, new in self.graph.updates
        ]
        results = []
        for r in self.graph.results:
            place, sbp = self.by_all if gather[r] else (self.layouts.placement[r], self.layouts.value[r])
            when = (Phase.FORWARD, self.maker[r][0][1])
            results.append((self.obtain(r, place, sbp, when), place, sbp, self.graph.metas[r]))
        read = {v for item in self.items for v in item.reads} | {value for value, *_ in results}
        updates = [(name, self.update(new, value, value in read, *homes[name])) for name, new, value in news]
        inputs = {i.value: (i.name, i.kind) for i in self.graph.inputs}
        return LoweredProgram(
            tuple(self.items), self.metas, self.alias, self.sbp, self.names, inputs, tuple(updates), tuple(results),
            self.flops, self.flops_done, self.repeated, self.listed,
        )  # fmt: skip

    def update(self, new: int, value: int, read: bool, where: Placement, sbp: NdSbp) -> int:
        """The local value that becomes a new value of a variable: a copy, unless an op or collective made it for that.

        ``value`` is the new value in the variable's layout; ``read`` says whether anything else reads it.
        """
        if (value == new and value in self.computed) or (value in self.collected and not read):
            return value
        out = self.new(sbp, self.names[value])
        ranks = self.listed.of(where)
        for rank in ranks:
            self.metas[(out, rank)] = self.metas[(value, rank)]
        steps = dict.fromkeys(ranks, (Step("actorflow.identity", (Ref(value),), (), (out,)),))
        (_, stage), pieces = self.maker[new]  # running statistics are updated with every micro-batch
        self.items.append(
            ProgramItem(ItemKind.COMPUTE, Phase.OPTIMIZER, where, pieces, (value,), (out,), steps, stage=stage)
        )
        return out

    def begin(self, value: int, where: Placement, sbp: NdSbp, name: str) -> None:
        """Record that a logical value exists on a placement in a layout."""
        self.boxed[(value, where, sbp, None)] = value
        self.sbp[value], self.names[value] = show(sbp), name
        self.lies(value, self.graph.metas[value], sbp, where)

    def lies(self, value: int, meta: Meta, sbp: NdSbp, where: Placement) -> None:
        """Record the shapes of a value's parts."""
        if self.classes is not None:
            self.classes.lies((meta.shape, sbp, where))
        for index, rank in self.listed.among(where):
            self.metas[(value, rank)] = Meta(device_shape(meta.shape, sbp, where, index), meta.dtype)

    def node(self, k: int, n: Node) -> None:
        """Lower node number k of the graph."""
        assert n.placement is not None
        call, operands = call_of(n, self.graph.metas)
        reads = [
            self.obtain(v, n.placement, need, (n.phase, n.stage), n.pieces and n.op == CONSTRAIN)
            for v, need in zip(operands, self.layouts.operands[k], strict=True)
        ]
        for o in n.outs:
            if o >= 0:
                self.begin(
                    o,
                    n.placement,
                    self.layouts.value[o],
                    f"{n.where}:{n.op.split('.')[1]}" if n.where else n.op.split(".")[1],
                )
                self.maker[o] = ((n.phase, n.stage), n.pieces)
        if n.op == PASS_ON and any(s.inner for s in self.layouts.chosen[k]):
            self.pass_on(k, n, n.placement, call, reads)
        elif n.op in JOINS:
            self.join(n, n.placement, reads[0])
        elif n.op == CONSTRAIN:  # another name for the same parts
            ranks = self.listed.of(n.placement)
            self.alias.update({(n.outs[0], rank): reads[0] for rank in ranks})
            nothing: dict[int, tuple[Step, ...]] = dict.fromkeys(ranks, ())
            self.items.append(
                ProgramItem(
                    ItemKind.COMPUTE, n.phase, n.placement, n.pieces, (reads[0],), n.outs, nothing, stage=n.stage
                )
            )  # fmt: skip
        else:
            self.compute(k, n, n.placement, call, reads)

    def pass_on(self, k: int, n: Node, placement: Placement, call: OpCall, reads: Sequence[int]) -> None:
        """Lower an op by which each device's block of a value goes to the next device of a ring."""
        (axis,) = (axis for axis, s in enumerate(self.layouts.chosen[k]) if s.inner)
        hop = ring_hop(call.ins[0].shape, placement, self.layouts.value[n.outs[0]], axis)
        if self.classes is not None:
            self.classes.moves(hop)
        when = (n.phase, n.stage)
        self.collective(hop, reads[0], n.outs[0], _HopContext(placement, placement, when, when, n.pieces))
        self.items[-1] = replace(self.items[-1], after=(reads[1],), where=n.where, line=n.line)

    def join(self, n: Node, placement: Placement, read: int) -> None:
        """Lower an op that joins the pieces of a value."""
        how = {"actorflow.accumulate": SUM, "actorflow.last": LAST}
        combine = how[n.op] if n.op in how else Combine(CombineKind.CAT, n.args[1])
        self.items.append(
            ProgramItem(
                ItemKind.JOIN, n.phase, placement, False, (read,), (n.outs[0],), combine=combine, where=n.where,
                stage=n.stage,
            )
        )  # fmt: skip

    def compute(self, k: int, n: Node, placement: Placement, call: OpCall, reads: Sequence[int]) -> None:
        """Lower an op to what each rank computes, and count its FLOPs."""
        if self.classes is not None and n.op in (RING, RING_BACKWARD) and not all_alike(call.args[-2]):
            for axis, s in enumerate(self.layouts.chosen[k]):
                self.classes.of(placement)[axis].update(range(placement.hierarchy[axis]) if s.inner else ())
        steps: dict[int, tuple[Step, ...]] = {}
        each: dict[int, float] = {}
        alike: dict[int, tuple[tuple[Step, ...], float]] = {}  # ranks that run the same have the same steps
        placed = bool(self.alike) and any(is_placed(call, s) for s in self.layouts.chosen[k])
        for index, rank in self.listed.among(placement):
            local, metas = self.localised(
                call, self.layouts.chosen[k], coordinates(placement, index), placement.axes, n.line or n.where
            )
            made = iter(metas)
            for o, meta in zip(n.outs, call.outs, strict=True):
                if meta is not None:
                    self.metas[(o, rank)] = next(made)
            step = self.of_class(k, n, call, reads, rank) if placed else None
            if step is not None:
                steps[rank], each[rank] = (step,), flops_of(local)
                continue
            if id(local) not in alike:
                given = substitute_all(local.args, local.kwargs, lambda i: Ref(reads[i]))
                alike[id(local)] = (Step(local.op, *given, n.outs),), flops_of(local)
            steps[rank], each[rank] = alike[id(local)]
        work = sum(flops * self.listed.stands_for(placement, rank) for rank, flops in each.items())
        times = self.pieces if n.pieces else 1
        useful = self.times * flops_of(call)
        self.flops += times * useful
        self.flops_done += times * work
        if work > useful:
            splits = any(len(signatures(call, parts)) > 1 for parts in placement.axes)
            key = RedundantOp(n.op, n.where, splits)
            self.repeated[key] = self.repeated.get(key, 0.0) + times * (work - useful)
        outs = tuple(o for o in n.outs if o >= 0)
        self.computed.update(outs)
        self.items.append(
            ProgramItem(
                ItemKind.COMPUTE,
                n.phase,
                placement,
                n.pieces,
                tuple(reads),
                outs,
                steps,
                flops=each if work else {},
                where=n.where,
                stage=n.stage,
                line=n.line,
                flops_dtype=dtype_of_flops(call) if work else "",
            )
        )

    def of_class(self, k: int, n: Node, call: OpCall, reads: Sequence[int], rank: int) -> Step | None:
        """The op as all ranks of a class run it; None if they run the same.  Unlike ones will be of other classes."""
        place, chosen = n.placement, self.layouts.chosen[k]
        assert place is not None
        assert self.classes is not None
        try:
            made = {
                r: self.localised(call, chosen, coordinates(place, place.index(r)), place.axes, n.line or n.where)[0]
                for r in _within(place, self.alike[rank])
            }
            if all(local is made[rank] for local in made.values()):
                return None
            given = {r: substitute_all(local.args, local.kwargs, lambda i: Ref(reads[i])) for r, local in made.items()}
            return merged_steps({r: Step(made[r].op, *given[r], n.outs) for r in made})
        except UnlikeError:
            for at, parts in zip(self.classes.of(place), place.hierarchy, strict=True):
                at.update(range(parts))
            return None

    def localised(
        self, call: OpCall, chosen: tuple[Signature, ...], at: tuple[int, ...], axes: tuple[Parts, ...], line: str
    ) -> tuple[OpCall, tuple[Meta, ...]]:
        """The op as the device at these mesh coordinates runs it, and the metas of its outputs that are used.

        Raises PlanError, with the user's line, if the local operands do not fit each other.
        """
        key = (call, chosen, at, axes)
        found = self._local.get(key)
        if found is None:
            local, outs = call, tuple(m for m in call.outs if m is not None)
            for signature, index, parts in zip(chosen, at, axes, strict=True):
                local, outs = self.along_axis(local, signature, parts, index)
            if (call, local) not in self._fitting:
                check_local_call(call, local, line)
                self._fitting.add((call, local))
            found = self._local[key] = local, outs
        return found

    def along_axis(
        self, call: OpCall, signature: Signature, parts: Parts, index: int
    ) -> tuple[OpCall, tuple[Meta, ...]]:
        """As ``localised`` for one mesh axis; what is alike along one axis is made once for all places on the next."""
        key = (call, signature, parts, index)
        found = self._along.get(key)
        if found is None:
            op, args, kwargs, outs = local_op(call, signature, parts, index)
            ins = tuple(
                Meta(local_shape(m.shape, s, parts, index), m.dtype)
                for m, s in zip(call.ins, signature.ins, strict=True)
            )
            rest = iter(outs)
            local = OpCall(
                op, args, tuple(kwargs), ins, tuple(next(rest) if m is not None else None for m in call.outs)
            )
            found = self._along[key] = self._calls.setdefault(local, local), outs
        return found

    def obtain(self, value: int, where: Placement, sbp: NdSbp, when: PhaseStage, anew: bool = False) -> int:
        """The local value that is ``value`` on a placement in a layout; adds its boxing if need be.

        ``when`` is that of the reader.  With ``anew`` a variable is boxed for each micro-batch, as is necessary where
        each of them changes it.
        """
        anew = anew or value in self.moving
        if (value, where, sbp, None) in self.boxed:
            return self.boxed[(value, where, sbp, None)]
        apart: tuple[PhaseStage, bool] | None = None
        if self.kind.get(value) == InputKind.VARIABLE and self.layouts.placement[value] == where:
            apart = (when, anew)  # gathered parameters are not kept for the backward pass or another stage
        key = (value, where, sbp, apart)
        if key in self.boxed:
            return self.boxed[key]
        meta = self.graph.metas[value]
        if self.kind.get(value) in FREE_KINDS:
            if all(entry == B for entry in sbp):
                self.boxed[key] = value
                return value
            source, whole = where, (B,) * len(where.hierarchy)
            hops = self.routes.find(meta, where, whole, where, sbp)
            here = value
        else:
            source = self.layouts.placement[value]
            hops = self.routes.find(meta, source, self.layouts.value[value], where, sbp)
            here = self.boxed[(value, source, self.layouts.value[value], None)]
        (phase, stage), pieces = self.maker[value]
        made_in: PhaseStage
        if phase is None:
            made_in, pieces = when if source == where else (when[0], self.first.get(source, when[1])), anew
        else:
            made_in = phase, stage
        for k, hop in enumerate(hops):
            after = (value, hop.target, hop.target_sbp, apart)
            if after not in self.boxed:
                done = all(later.kind is HopKind.LOCAL for later in hops[k + 1 :])  # the rest belongs to the reader
                to = where if hop.target == where else source  # intermediate values are on devices of the source
                there = (made_in[0], when[1])  # on the reader's placement they are of the reader's stage
                begins = there if hop.source == where != source else made_in
                ends = when if done else there if to == where != source else made_in
                at = where if hop.source == where else source
                self.boxed[after] = self.hop(hop, here, meta, _HopContext(at, to, begins, ends, pieces))
            here = self.boxed[after]
        return here

    def hop(self, hop: Hop, value: int, meta: Meta, context: _HopContext) -> int:
        """Add the items of one hop; returns the local value at its end."""
        out = self.new(hop.target_sbp, self.names[value])
        self.lies(out, meta, hop.target_sbp, hop.target)
        if self.classes is not None:
            self.classes.moves(hop)
        if hop.groups:
            self.collective(hop, value, out, context)
        else:
            self.copy(hop, value, out, context)
        return out

    def collective(self, hop: Hop, value: int, out: int, context: _HopContext) -> None:
        """A hop that is a collective in each of its groups."""
        groups = self.groups(hop)
        ids = [self.count() for _ in range(groups.count)]
        exchanges = self.exchanges(hop)
        comms = {
            rank: Collective(CollectiveKind(hop.kind), ids[number], group, exchanges.of(rank, group))
            for number, group, ranks in groups.listed
            for rank in ranks
        }
        self.apart = self.apart or hop.groups[0][0] not in self.listed  # the first one's bytes count for buckets
        phase, stage = context.made_in
        self.items.append(
            ProgramItem(
                ItemKind.COMM, phase, context.source, context.pieces, (value,), (out,), comms=comms, stage=stage,
                groups=groups.all, sides=GroupSides(groups.of_rank, exchanges) if self.alike else None,
            )
        )  # fmt: skip
        if not context.pieces:
            self.collected.add(out)

    def groups(self, hop: Hop) -> _Groups:
        """The groups of a hop; those with as many ranks of each class have one number."""
        found = self.grouped.get(id(hop.groups))
        if found is None:
            numbers: dict[object, int] = {}
            listed = []
            for group in hop.groups:
                ranks = tuple(rank for rank in group if rank in self.listed)
                if ranks:
                    members = self.listed.members(group)
                    listed.append((numbers.setdefault(members, len(numbers)), group, ranks))
            of_rank = {rank: group for group in hop.groups for rank in group} if self.alike else {}
            found = _Groups(hop.groups, frozenset(hop.groups), listed, len(numbers), of_rank)
            self.grouped[id(hop.groups)] = found
        return found

    def exchanges(self, hop: Hop) -> GroupExchanges:
        """What ranks exchange in a hop, found once for all that move alike."""
        if id(hop) not in self.sides:
            self.sides[id(hop)] = hop, GroupExchanges(hop, self.same)
        return self.sides[id(hop)][1]

    def count(self) -> int:
        """The id of a new communication."""
        self.comm_id += 1
        return self.comm_id - 1

    def copy(self, hop: Hop, value: int, out: int, context: _HopContext) -> None:
        """A hop without collectives: cut parts at the sources, send them where need be, arrange them at the targets."""
        source, made_in, pieces = context.source, context.made_in, context.pieces
        gathered: dict[int, list[tuple[int, BoxCopy]]] = {}  # target rank → its parts as local values
        cuts: dict[int, dict[Box, Step]] = {}  # source rank → box of a part → the step that cuts it
        sends: list[tuple[int, int, list[int], SendSides | None]] = []  # from, to, values: part, received part, …
        begins: dict[int, list[Arg]] = {}  # target rank → where its parts begin
        self.apart = self.apart or any(
            (to := hop.target.ranks[t]) not in self.listed and to != origin
            for s, origin in (self.listed.among(hop.source) if self.classes is not None else ())
            for t in hop.targets(s)
        )
        for t, to in self.listed.among(hop.target):
            sources = hop.sources(t)
            if not sources and any(hop.sources(hop.target.index(rank)) for rank in self.alike.get(to, ())):
                self.apart = True
            for s in sources:
                origin = hop.source.ranks[s]
                if origin not in self.listed:
                    self.apart = True
                    continue
                parts = self.of_pair(hop, t, s)
                moved = []
                for part, start, end in zip(parts.copies, parts.starts, parts.ends, strict=True):
                    number = self.cut(value, origin, part, start, cuts)
                    begins.setdefault(to, []).append(end)
                    if origin != to:
                        arrived = self.new(hop.target_sbp, self.names[value])
                        self.metas[(arrived, to)] = self.metas[(number, origin)]
                        moved.append((number, arrived))
                        number = arrived
                    gathered.setdefault(to, []).append((number, part))
                if moved:
                    sends.append((origin, to, [n for pair in moved for n in pair], parts.sends))
        pre = made_in if hop.kind is HopKind.SEND or made_in[0] == Phase.SOURCE else context.when
        if cuts:
            cut = {rank: tuple(steps.values()) for rank, steps in cuts.items()}
            writes = tuple(o for steps in cut.values() for s in steps for o in s.outs)
            self.items.append(
                ProgramItem(
                    ItemKind.COMPUTE, pre[0], source, pieces, (value,), writes, cut,
                    stage=pre[1],
                )
            )  # fmt: skip
        of_all = self.pairs(hop) if sends else frozenset()
        for origin, to, pairs, sides in sends:
            comm = Send(self.count(), origin, to)
            self.items.append(
                ProgramItem(
                    ItemKind.COMM, made_in[0], source, pieces, tuple(pairs[::2]), tuple(pairs[1::2]),
                    comms={origin: comm}, stage=made_in[1], groups=of_all, sides=sides,
                )
            )  # fmt: skip
        type_, listed = context.target.type, self.listed.of(hop.target)
        same: dict[tuple[Step, ...], tuple[Step, ...]] = {}  # one object for ranks that do the same
        made = {to: self.arranged(hop, out, to, gathered.get(to, ()), begins.get(to, ()), type_) for to in listed}
        steps = {to: same.setdefault(of_rank, of_rank) for to, of_rank in made.items()}
        reads = tuple(sorted({n for parts in gathered.values() for n, _ in parts}))
        phase, stage = context.when if hop.kind is HopKind.SEND else pre
        self.items.append(
            ProgramItem(ItemKind.COMPUTE, phase, context.target, pieces, reads, (out,), steps, stage=stage)
        )

    def of_pair(self, hop: Hop, t: int, s: int) -> _Copied:
        """What target device t takes of source device s in a hop without groups, and those that are of their classes.

        Unlike ones make all ranks listed.
        """
        key = (id(hop), t, s)
        if key not in self.copied:
            copies = hop.pair(t, s)
            plain = _Copied(copies, tuple(c.source.start for c in copies), tuple(c.target.start for c in copies))
            try:
                found = self.of_pairs(hop, t, s) if self.alike else plain
            except UnlikeError:
                self.apart, found = True, plain
            self.copied[key] = hop, found
        return self.copied[key][1]

    def of_pairs(self, hop: Hop, t: int, s: int) -> _Copied:
        """As ``of_pair``; raises UnlikeError where the ranks of a class do otherwise."""
        to, origin = hop.target.ranks[t], hop.source.ranks[s]
        sources = hop.sources(t)
        sizes = tuple((c.source.size, c.target.size) for c in hop.pair(t, s))
        at, sent = sources.index(s), {}
        starts: list[dict[int, Arg]] = [{} for _ in sizes]
        ends: list[dict[int, Arg]] = [{} for _ in sizes]
        for rank in _within(hop.target, self.alike[to]):
            device = hop.target.index(rank)
            others = hop.sources(device)
            copies = hop.pair(device, others[at]) if len(others) == len(sources) else ()
            if tuple((c.source.size, c.target.size) for c in copies) != sizes:
                raise UnlikeError
            sender = hop.source.ranks[others[at]]
            sent[sender] = rank
            for copy, begin, end in zip(copies, starts, ends, strict=True):
                begin[sender], end[rank] = copy.source.start, copy.target.start
        if sorted(sent) != sorted(self.alike[origin]) or any((a == b) != (origin == to) for a, b in sent.items()):
            raise UnlikeError
        return _Copied(hop.pair(t, s), tuple(map(merged, starts)), tuple(map(merged, ends)), SendSides(sent))

    def pairs(self, hop: Hop) -> frozenset[tuple[int, ...]]:
        """The ranks of which one sends to the other in a hop, (from, to); also those that are not listed."""
        if id(hop) not in self.paired:
            found = ((hop.source.ranks[s], rank) for t, rank in enumerate(hop.target.ranks) for s in hop.sources(t))
            self.paired[id(hop)] = hop, frozenset(pair for pair in found if pair[0] != pair[1])
        return self.paired[id(hop)][1]

    def arranged(
        self, hop: Hop, out: int, rank: int, parts: Sequence[tuple[int, BoxCopy]], begins: Sequence[Arg], device: str
    ) -> tuple[Step, ...]:
        """The steps that make ``out`` of its parts on a rank; none if one part is all of it, which it then aliases.

        ``begins`` says where each part begins in ``out``.
        """
        meta = self.metas[(out, rank)]
        if len(parts) == 1 and parts[0][1].target == Box((0,) * len(meta.shape), meta.shape):
            self.alias[(out, rank)] = parts[0][0]
            return ()
        dtype = Symbol(f"torch.{meta.dtype}")
        if (
            not parts
        ):  # a term of zeros, as another rank holds all of the sum; there is no operand to take a device from
            where = (("dtype", dtype), ("device", Symbol(f"device:{device}")))
            return (Step("aten.zeros.default", (meta.shape,), where, (out,)),)
        args: tuple[Arg, ...] = (
            tuple(Ref(n) for n, _ in parts), meta.shape, tuple(begins), dtype,
            *((True,) if hop.add else ()),
        )  # fmt: skip
        return (Step("actorflow.arrange", args, (), (out,)),)

    def cut(self, value: int, rank: int, part: BoxCopy, start: Arg, cuts: dict[int, dict[Box, Step]]) -> int:
        """The local value that is a rectangle of another one; adds a step to ``cuts`` that cuts it if need be.

        ``start`` is where the rectangle begins, on all ranks of the class.
        """
        meta = self.metas[(value, rank)] if (value, rank) in self.metas else self.graph.metas[value]
        if part.source == Box((0,) * len(meta.shape), meta.shape):
            return value
        args = (Ref(value), start, part.source.size)
        steps = cuts.setdefault(rank, {})
        if part.source in steps:
            self.apart = self.apart or not same_arguments(start, steps[part.source].args[1])
            return steps[part.source].outs[0]
        number = self.new((), self.names[value])
        self.metas[(number, rank)] = Meta(part.source.size, meta.dtype)
        steps[part.source] = Step("actorflow.carve", args, (), (number,))
        return number


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    """What one device takes of another one in a hop, and, where they are of classes, what others of these do."""

    copies: tuple[BoxCopy, ...]
    starts: tuple[Arg, ...]  # where each begins in the source
    ends: tuple[Arg, ...]  # and in the target
    sends: SendSides | None = None


def _within(place: Placement, ranks: Sequence[int]) -> Sequence[int]:
    """These ranks, which are of one class; raises UnlikeError if some of them are not in the placement."""
    if any(rank not in place for rank in ranks):
        raise UnlikeError
    return ranks


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a hop."""

    order: tuple[tuple[int, ...], ...]  # as the hop has them
    all: frozenset[tuple[int, ...]]
    listed: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]  # number, group with listed ranks, these
    count: int  # numbers
    of_rank: Mapping[int, tuple[int, ...]]  # rank → its group; empty if that of unlisted ranks does not matter


def resolve(value: int, alias: Mapping[tuple[int, int], int], rank: int) -> int:
    """The local value that a value is an alias of on a rank, or the value itself."""
    while (value, rank) in alias:
        value = alias[(value, rank)]
    return value
