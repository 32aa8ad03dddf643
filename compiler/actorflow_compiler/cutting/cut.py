"""Cut a program with segments into actors connected by registers: the plan, without slot counts and orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.cutting.actor_origins import origins_of
from actorflow_compiler.cutting.bodies import BuiltBody, build_body
from actorflow_compiler.cutting.gathers import ChunkUse, delays, is_gather, micro_batch_delays, rounds
from actorflow_compiler.cutting.lower import ItemKind, ProgramItem, resolve
from actorflow_compiler.cutting.segment import Segment, SegmentedProgram
from actorflow_compiler.cutting.stores import views_of_variables
from actorflow_compiler.cutting.traffic import MemoryTraffic, memory_traffic
from actorflow_compiler.graph.graph import CALL_INPUTS, InputKind
from actorflow_compiler.plan.origins import Origins
from actorflow_compiler.plan.plan import (
    LAST,
    SUM,
    Actor,
    ActorKind,
    Body,
    Collective,
    Combine,
    CombineKind,
    Comm,
    Constant,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Operand,
    Plan,
    Plane,
    Read,
    Register,
    Result,
    Send,
    Step,
    Summary,
    Target,
    TensorSpec,
    ToResult,
    Variable,
)  # fmt: skip
from actorflow_compiler.plan.rank_differences import (
    BodyOfClass,
    CommOfClass,
    GroupSides,
    OfClass,
    SendSides,
    on_rank,
    varies,
)
from actorflow_compiler.plan.verify import verify
from actorflow_compiler.plan.workspace import products, workspace_bytes

INLINE = 64 << 10  # sends of up to so many bytes are part of the control message
LETTERS = {
    Phase.FORWARD: "F", Phase.BACKWARD: "B", Phase.WEIGHT: "W", Phase.OPTIMIZER: "O", Phase.SOURCE: "source",
}  # fmt: skip


@dataclass(slots=True)
class ActorDraft:
    """An actor being put together on one rank."""

    name: str
    rank: int
    queue: str
    kind: ActorKind
    rate: int
    stage: int
    items: list[ProgramItem] = field(default_factory=list)
    comm: Comm | None = None
    moves: list[tuple[int, int]] = field(default_factory=list)  # of a comm: (operand, target)
    after: list[int] = field(default_factory=list)  # of a comm: values that are made before it begins
    sides: list[GroupSides | SendSides] = field(default_factory=list)  # of a comm: those of all ranks
    result: int | None = None  # of a sink
    level: int = 0  # see ``segment.py``
    gathers: Phase | None = None  # variables, for forward or backward ops
    flops: dict[str, float] = field(default_factory=dict)  # by the dtype of their operands


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What a plan contains beside its actors and registers."""

    name: str  # of the job
    world: int  # ranks
    pieces: int  # micro-batches in an iteration
    variables: tuple[Variable, ...] = ()
    constants: tuple[Constant, ...] = ()
    notes: tuple[str, ...] = ()
    origins: Origins = field(default_factory=Origins)


@dataclass(frozen=True, slots=True)
class CutPlan:
    """A plan in which nothing delays the gathers of variables, and what may delay them."""

    free: Plan
    chains: tuple[tuple[ChunkUse, ...], ...]  # see ``gathers.delays``
    rounds: Mapping[int, int]  # see ``gathers.rounds``; of actors that gathers of a later micro-batch may wait for
    of_class: Mapping[int, OfClass] = field(default_factory=dict)  # actor → what other ranks of its class do otherwise

    def plan(self, ahead: int | None, shared: bool = False) -> Plan:
        """The plan with ``ahead`` chunks of each pass of a stage in memory at a time, or of both; None: any number."""
        plan, registers = self.free, list(self.free.registers)
        if ahead is not None:
            registers += delays(self.chains, ahead, len(registers))
            several = [chain for chain in self.chains if plan.actor(chain[0].gathers[0]).rate > 1]
            registers += micro_batch_delays(several, ahead, len(registers), self.rounds, shared)
        return verify(replace(plan, registers=tuple(registers)))


def cut(header: PlanHeader, segmented: SegmentedProgram) -> CutPlan:
    """Make the plan of the listed ranks; its origins are those of the header (the graph's) and of the actors."""
    cutter = _Cutter(header, segmented)
    plan = cutter.plan()
    origins = origins_of(header.origins, segmented.program, cutter.made)
    return CutPlan(replace(plan, origins=origins), *cutter.chains(plan), cutter.of_class)


class _Cutter:
    """Drafts actors from the items, connects them by registers, then builds their bodies.

    The number of a draft is that of its actor.
    """

    def __init__(self, header: PlanHeader, segmented: SegmentedProgram) -> None:
        self.header, self.world, self.pieces = header, header.world, header.pieces
        self.segmented, self.program = segmented, segmented.program
        listed = self.program.listed
        self.ranks = [rank for rank in range(self.world) if rank in listed]
        self.taken = [v for v, (_, kind) in self.program.inputs.items() if kind in CALL_INPUTS]  # by sources
        self.drafts: list[ActorDraft] = []
        self.number: dict[object, int] = {}  # key of a draft → its number
        self.maker: dict[tuple[int, int], int] = {}  # (local value, rank) → draft
        self.joins: dict[tuple[int, int], tuple[int, Combine]] = {}  # (joined value, rank) → (value of the pieces, how)
        self.joined: dict[tuple[int, int], list[int]] = {}  # (value of the pieces, rank) → the values joined from it
        self.updated_by: dict[int, tuple[str, ...]] = {}  # actor → variables that its body updates in place
        self.bodies: dict[tuple[object, ...], BuiltBody] = {}  # what it is made of → body
        self.indices: dict[int, int] = {}  # id of a body that was built → its index
        # id of a body that was built, and the sizes of its values → what its ops read and write
        self.traffic: dict[tuple[int, tuple[int, ...]], MemoryTraffic] = {}
        self.views = views_of_variables(self.program)
        self.made: dict[int, tuple[BuiltBody, list[ProgramItem]]] = {}  # actor → its body and the items of it
        self.of_class: dict[int, OfClass] = {}  # see ``CutPlan``

    def plan(self) -> Plan:
        self.draft_actors()
        self.draft_sinks()
        for (joined, rank), (source, _) in self.joins.items():
            self.joined.setdefault((self.find(source, rank), rank), []).append(joined)
        writes = self.written_variables()
        registers, at = self.make_registers(writes)
        bodies: dict[Body, int] = {}
        actors = []
        for number, draft in enumerate(self.drafts):
            actors.append(self.actor(number, draft, at, writes, bodies, registers))
        registers += self.variable_registers(actors, len(registers))
        registers += self.waiting_registers(len(registers))
        program = self.program
        done, useful = program.flops_done, program.flops
        summary = Summary(flops=useful, redundant_flops=(done - useful) / done if done else 0.0)
        results = tuple(
            Result(i, meta.shape, meta.dtype, place, sbp) for i, (_, place, sbp, meta) in enumerate(program.results)
        )
        return Plan(
            self.header.name,
            self.world,
            self.pieces,
            tuple(bodies),
            tuple(actors),
            tuple(registers),
            self.header.variables,
            results,
            constants=self.header.constants,
            notes=self.header.notes,
            summary=summary,
            ranks=tuple(self.ranks) if len(self.ranks) < self.world else (),
        )

    def find(self, value: int, rank: int) -> int:
        return resolve(value, self.program.alias, rank)

    # ---- actors

    def draft(self, key: object, new: ActorDraft) -> ActorDraft:
        """The draft with this key; ``new`` becomes it if there is none."""
        if key not in self.number:
            self.number[key] = len(self.drafts)
            self.drafts.append(new)
        return self.drafts[self.number[key]]

    def draft_actors(self) -> None:
        """Draft the actors of all items."""
        for rank in self.ranks if self.taken else ():
            self.draft_source(rank, self.taken)
        labels = self.labels()
        for item, segment, level in zip(
            self.program.items, self.segmented.segments, self.segmented.comm_level, strict=True
        ):
            if item.kind is ItemKind.JOIN:
                for rank in self.program.listed.of(item.placement):
                    self.joins[(item.writes[0], rank)] = (item.reads[0], item.combine)
            elif item.kind is ItemKind.COMM:
                self.draft_comm(item, level)
            elif item.phase == Phase.SOURCE:
                for rank in item.steps:
                    self.draft_source(rank, item.writes).items.append(item)
            elif any(item.steps.values()):
                assert segment is not None
                self.draft_compute(item, segment, labels[(segment, item.stage)])

    def labels(self) -> dict[tuple[Segment, int], str]:
        """(Segment, stage) → the name of its actors, without their ranks."""
        numbered: dict[tuple[Phase, int], dict[Segment, None]] = {}  # (phase, stage) → its segments in order
        for item, segment in zip(self.program.items, self.segmented.segments, strict=True):
            if segment is not None and item.phase != Phase.SOURCE and any(item.steps.values()):
                numbered.setdefault((segment.phase, item.stage), {})[segment] = None
        for (phase, stage), of_kind in numbered.items():
            if phase == Phase.OPTIMIZER:  # its ops are in the order of the parameters, its parts in that of gradients
                numbered[phase, stage] = dict.fromkeys(sorted(of_kind, key=lambda s: (s.level, s.part)))
        return {
            (segment, stage): f"{'F' * segment.joined}{LETTERS[phase]}{stage}{f'.{index}' if index else ''}"
            for (phase, stage), of_kind in numbered.items()
            for index, segment in enumerate(of_kind)
        }

    def draft_source(self, rank: int, writes: Iterable[int]) -> ActorDraft:
        """The draft of a rank's source, which makes these values."""
        key = ("source", rank)
        one = self.draft(key, ActorDraft(f"source@{rank}", rank, "source", ActorKind.SOURCE, 1, 0))
        self.maker.update({(v, rank): self.number[key] for v in writes})
        return one

    def draft_compute(self, item: ProgramItem, segment: Segment, label: str) -> None:
        """Add an item to the drafts of its segment, one on each rank."""
        rate = self.pieces if segment.pieces else 1
        for rank, steps in item.steps.items():
            if not steps:
                continue
            key = (segment, rank)
            one = self.draft(
                key, ActorDraft(f"{label}@{rank}", rank, "compute", ActorKind(segment.phase), rate, item.stage)
            )  # fmt: skip
            one.level = segment.level
            one.items.append(item)
            one.flops[item.flops_dtype] = one.flops.get(item.flops_dtype, 0.0) + item.flops.get(rank, 0.0)
            self.maker.update({(v, rank): self.number[key] for s in steps for v in s.outs if v >= 0})

    def draft_comm(self, item: ProgramItem, level: tuple[int, int]) -> None:
        """Add a communication to the draft that it leaves with, one on each rank."""
        stage, rate = item.stage, self.pieces if item.pieces else 1
        for rank, comm in item.comms.items():
            label = f"{comm.label}{stage}{LETTERS[item.phase][0]}{level[0]}"
            if isinstance(comm, Send):
                key: object = ("send", comm.ranks, item.phase, item.pieces, level, stage)
                queue, kind, name = f"send:{comm.to_rank}", ActorKind.SEND, f"{label}:{rank}>{comm.to_rank}"
            else:
                key = (comm.label, comm.ranks, item.phase, item.pieces, level, stage, rank)
                queue, kind, name = "comm", ActorKind.BOXING, f"{label}.{level[1]}@{rank}"
            one = self.draft(key, ActorDraft(name, rank, queue, kind, rate, stage, comm=comm))
            one.level, one.gathers = level[0], item.phase if is_gather(self.program, item) else None
            if one.moves and isinstance(one.comm, Collective) and isinstance(comm, Collective):  # no all-reduce has any
                one.comm = replace(one.comm, exchanges=one.comm.exchanges + comm.exchanges)
            one.moves += [(v, w) for v, w in zip(item.reads, item.writes, strict=True)]
            one.after += item.after
            one.sides += [item.sides] if item.sides is not None else []
            to = comm.to_rank if isinstance(comm, Send) else rank
            self.maker.update({(w, to): self.number[key] for w in item.writes})

    def draft_sinks(self) -> None:
        """Draft the sinks, one for each result on each rank that holds it."""
        for index, (value, place, _, _) in enumerate(self.program.results):
            for rank in self.program.listed.of(place):
                self.drafts.append(
                    ActorDraft(
                        f"sink{index}@{rank}", rank, "sink", ActorKind.SINK, 1, 0, moves=[(value, -1)], result=index
                    )
                )

    # ---- registers

    def written_variables(self) -> dict[tuple[int, int], list[str]]:
        """(local value, rank) → the variables that it becomes."""
        found: dict[tuple[int, int], list[str]] = {}
        for name, value in self.program.updates:
            for rank in self.ranks:
                if (value, rank) in self.program.metas:
                    found.setdefault((self.find(value, rank), rank), []).append(name)
        return found

    def make_registers(
        self, writes: Mapping[tuple[int, int], list[str]]
    ) -> tuple[list[Register], dict[tuple[int, int], FromRegister]]:
        """Registers for all values that pass from actor to actor; values with the same readers share one.

        Also returns where each (value, rank) is.
        """
        groups: dict[tuple[int, int, tuple[int, ...], bool], list[int]] = {}
        unions: dict[tuple[int, int, bool], tuple[int, ...]] = {}
        for (value, rank), readers in self.readers_of_values(writes).items():
            joined = (value, rank) in self.joins
            producer = self.maker[self._made(value, rank)]
            key = tuple(readers)
            if self.drafts[producer].comm is not None:  # all that a communication moves is one register
                key = unions.setdefault((producer, rank, joined), key)
                unions[(producer, rank, joined)] = tuple(dict.fromkeys((*key, *readers)))
                key = ()
            groups.setdefault((producer, rank, key, joined), []).append(value)
        registers: list[Register] = []
        at: dict[tuple[int, int], FromRegister] = {}
        for (producer, rank, key, joined), values in groups.items():
            every = key or unions[(producer, rank, joined)]
            rate = self.drafts[producer].rate
            fill = rate if joined else 1
            tokens = rate // fill
            # a reader that fires once in an iteration reads only joined values, which are one token
            reads = tuple(Read(r, self.drafts[r].rate // tokens) for r in every)
            specs = []
            for i, value in enumerate(values):
                at[(value, rank)] = FromRegister(len(registers), i)
                specs.append(self.spec(value, rank))
            registers.append(Register(len(registers), producer, reads, tuple(specs), fill=fill))
        return registers, at

    def readers_of_values(
        self, writes: Mapping[tuple[int, int], list[str]]
    ) -> dict[tuple[int, int], dict[int, None]]:  # fmt: skip
        """(Value, rank) → the drafts that read it, for all values that need a register."""
        wanted: dict[tuple[int, int], dict[int, None]] = {}
        for number, draft in enumerate(self.drafts):
            for value in self.operand_values(draft):
                if self.maker.get(self._made(value, draft.rank)) not in (None, number):
                    wanted.setdefault((value, draft.rank), {})[number] = None
        for members in self.collectives():  # all members need equal registers, even if not all of them have readers
            for _, out in members[0].moves:
                ends = {v: None for d in members for v in [out, *self._joins_of(out, d.rank)] if (v, d.rank) in wanted}
                for d in members:
                    for value in ends or ([] if (out, d.rank) in writes else [out]):
                        wanted.setdefault((value, d.rank), {})
        return wanted

    def collectives(self) -> list[list[ActorDraft]]:
        """The drafts of each collective."""
        found: dict[int, list[ActorDraft]] = {}
        for draft in self.drafts:
            if isinstance(draft.comm, Collective):
                found.setdefault(draft.comm.id, []).append(draft)
        return list(found.values())

    def _made(self, value: int, rank: int) -> tuple[int, int]:
        """(Value, rank) itself, or of a joined value the pieces that it is joined from."""
        if (value, rank) in self.joins:
            return self.find(self.joins[(value, rank)][0], rank), rank
        return value, rank

    def spec(self, value: int, rank: int) -> TensorSpec:
        program = self.program
        meta = program.metas[(value, rank)]
        combine = self.joins[(value, rank)][1] if (value, rank) in self.joins else LAST
        return TensorSpec(meta.shape, meta.dtype, program.sbp.get(value, ""), combine, program.names.get(value, ""))

    def operand_values(self, draft: ActorDraft) -> list[int]:
        """The local values that an actor needs from elsewhere, in order."""
        if draft.comm is not None or draft.result is not None:
            return list(dict.fromkeys(self.find(v, draft.rank) for v, _ in draft.moves))
        made = {o for i in draft.items for s in i.steps[draft.rank] for o in s.outs}
        reads = [self.find(v, draft.rank) for i in draft.items for s in i.steps[draft.rank] for v in s.reads()]
        return [v for v in dict.fromkeys(reads) if v not in made]

    # ---- the finished actors

    def operand(self, value: int, rank: int, at: Mapping[tuple[int, int], FromRegister]) -> Operand:
        if (value, rank) in at:
            return at[(value, rank)]
        name, kind = self.program.inputs[value]
        if kind == InputKind.SCALAR:
            return OfScalar(name)
        return OfPiece() if kind == InputKind.PIECE else OfVariable(name)

    def actor(
        self, number: int, draft: ActorDraft, at: Mapping[tuple[int, int], FromRegister],
        writes: Mapping[tuple[int, int], list[str]], bodies: dict[Body, int], registers: Sequence[Register],
    ) -> Actor:  # fmt: skip
        rank = draft.rank
        if draft.result is not None:
            value = self.find(draft.moves[0][0], rank)
            return Actor(
                number,
                draft.name,
                rank,
                draft.queue,
                draft.kind,
                operands=(self.operand(value, rank, at),),
                targets=(ToResult(draft.result),),
            )
        if draft.comm is not None:
            return self.comm_actor(number, draft, at, writes)
        inputs = self.operand_values(draft)
        if draft.kind is ActorKind.SOURCE:
            operands: list[Operand] = [OfInput(self.program.inputs[v][0]) for v in self.taken]
            inputs = self.taken
        else:
            operands = [self.operand(v, rank, at) for v in inputs]
        outputs = self.outputs(draft, inputs, at, writes)
        built = self.built([s for i in draft.items for s in i.steps[rank]], inputs, outputs, rank)
        self.updated_by[number] = built.updated
        self.made[number] = built, draft.items
        if id(built.body) not in self.indices:  # those of ranks that compute the same are one object
            body = on_rank(built.body, rank) if varies(built.body) else built.body
            self.indices[id(built.body)] = bodies.setdefault(body, len(bodies))
        index = self.indices[id(built.body)]
        if varies(built.body):
            self.of_class[number] = BodyOfClass(built.body)
        nbytes = self.sizes(built, rank)
        key = id(built.body), nbytes
        if key not in self.traffic:
            self.traffic[key] = memory_traffic(built.body, nbytes)
        traffic = self.traffic[key]
        return Actor(
            number, draft.name, rank, draft.queue, draft.kind, draft.rate, index, tuple(operands), built.targets,
            flops=sum(draft.flops.values()), stage=draft.stage, workspace=self.workspace(built, nbytes, registers),
            flops_dtype=max(draft.flops, key=draft.flops.__getitem__, default=""),
            traffic=traffic.each, fused_traffic=traffic.fused,
        )  # fmt: skip

    def built(
        self, steps: Sequence[Step], inputs: Sequence[int], outputs: Sequence[tuple[int, Target]], rank: int
    ) -> BuiltBody:  # fmt: skip
        """The body of an actor; it is built once for all ranks that compute the same."""
        found = {v: self.find(v, rank) for s in steps for v in s.reads()}
        updates = [(v, target if isinstance(target, OfVariable) else None) for v, target in outputs]
        key = (tuple(map(id, steps)), tuple(found.values()), tuple(inputs), tuple(updates))
        if key not in self.bodies:
            variables = {v: self.program.inputs[v][0] for v in inputs if self.program.is_variable(v)}
            self.bodies[key] = build_body(steps, inputs, outputs, variables, found.__getitem__)
        one = self.bodies[key]
        updated = {OfVariable(name) for name in one.updated}
        return replace(one, targets=tuple(target for _, target in outputs if target not in updated))

    def sizes(self, built: BuiltBody, rank: int) -> tuple[int, ...]:
        """The bytes of each value of a body; 0 for numbers."""
        metas = self.program.metas
        return tuple([metas[(v, rank)].nbytes if (v, rank) in metas else 0 for v in built.values])

    def workspace(self, built: BuiltBody, nbytes: Sequence[int], registers: Sequence[Register]) -> int:
        """The bytes that a firing needs beside its operands and the room in registers."""
        body = built.body
        room, summed, joined = [0] * len(body.outputs), [], 0
        for at, target in enumerate(built.targets):
            if isinstance(target, FromRegister):
                spec = registers[target.register].tensors[target.index]
                room[at] = nbytes[body.outputs[at]]
                if spec.combine == SUM and registers[target.register].fill > 1:
                    summed.append(at)
                elif spec.combine.kind is CombineKind.CAT and registers[target.register].fill > 1:
                    joined += spec.nbytes
        for at in {*summed} - {*products(body, summed)}:
            room[at] = 0
        return workspace_bytes(body, nbytes, room, joined)

    def outputs(
        self,
        draft: ActorDraft,
        inputs: list[int],
        at: Mapping[tuple[int, int], FromRegister],
        writes: Mapping[tuple[int, int], list[str]],
    ) -> list[tuple[int, Target]]:
        """The values that an actor gives to others, with their targets."""
        rank = draft.rank
        made = [o for i in draft.items for s in i.steps[rank] for o in s.outs if o >= 0]
        pairs: list[tuple[int, Target]] = []
        for value in dict.fromkeys([*(inputs if draft.kind is ActorKind.SOURCE else ()), *made]):
            pairs += [(value, OfVariable(name)) for name in writes.get((value, rank), [])]
            pairs += [(value, at[(r, rank)]) for r in [value, *self._joins_of(value, rank)] if (r, rank) in at]
        return pairs

    def _joins_of(self, value: int, rank: int) -> list[int]:
        return self.joined.get((value, rank), [])

    def comm_actor(
        self, number: int, draft: ActorDraft, at: Mapping[tuple[int, int], FromRegister],
        writes: Mapping[tuple[int, int], list[str]],
    ) -> Actor:  # fmt: skip
        assert draft.comm is not None
        rank, comm = draft.rank, draft.comm
        to = comm.to_rank if isinstance(comm, Send) else rank
        operands: list[Operand] = []
        targets: list[Target] = []
        picked = []
        nbytes = 0
        for i, (value, out) in enumerate(draft.moves):
            operand = self.operand(self.find(value, rank), rank, at)
            nbytes += self.program.metas[(out, to)].nbytes
            ends: list[Target] = [at[(r, to)] for r in [out, *self._joins_of(out, to)] if (r, to) in at]
            for end in [*ends, *(OfVariable(name) for name in writes.get((out, to), ()))]:
                operands.append(operand)
                targets.append(end)
                picked.append(i)
        if isinstance(comm, Send):
            comm = replace(comm, plane=Plane.INLINE if nbytes <= INLINE else Plane.GLOO)
        else:
            comm = replace(comm, exchanges=tuple(comm.exchanges[i] for i in picked if comm.exchanges))
        if draft.sides:
            self.of_class[number] = CommOfClass(tuple(draft.sides), tuple(picked))
        return Actor(
            number,
            draft.name,
            rank,
            draft.queue,
            draft.kind,
            draft.rate,
            None,
            tuple(operands),
            tuple(targets),
            comm,
            stage=draft.stage,
        )

    def variable_registers(self, actors: Sequence[Actor], first: int) -> list[Register]:
        """Registers without tensors that order the writer of a variable and its readers.

        An actor that reads a view of the variable, made by another actor, is a reader as well.
        """
        writers, readers = self.variable_users(actors)
        groups: dict[tuple[int, tuple[int, ...]], None] = {}
        for key, writer in writers.items():
            every = [r for r in readers.get(key, {}) if r != writer]
            same_rate = [r for r in every if actors[r].rate == actors[writer].rate]  # these alternate firing by firing
            for some in (same_rate, [r for r in every if r not in same_rate]):
                if some:
                    groups[(writer, tuple(some))] = None
        found: list[Register] = []
        for writer, others in groups:
            rate = actors[writer].rate
            fill = 1 if all(actors[r].rate == rate for r in others) else rate
            reads = tuple(Read(r, actors[r].rate // (rate // fill)) for r in others)
            found.append(Register(first + len(found), writer, reads, (), slots=1, initial=1, fill=fill))
        return found

    def waiting_registers(self, first: int) -> list[Register]:
        """Registers without tensors that let communications wait for values that they do not move."""
        found: dict[tuple[int, int], None] = {}
        for number, draft in enumerate(self.drafts):
            for value in draft.after:
                maker = self.maker.get((self.find(value, draft.rank), draft.rank), number)
                if self.drafts[maker].rate == draft.rate and maker != number:
                    found[maker, number] = None
        return [Register(first + k, maker, (Read(waits),), ()) for k, (maker, waits) in enumerate(found)]

    def variable_users(
        self, actors: Sequence[Actor]
    ) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], dict[int, None]]]:
        """(Variable, rank) → the actor that writes it; the same → the actors that read it or a view of it."""
        writers: dict[tuple[str, int], int] = {}
        readers: dict[tuple[str, int], dict[int, None]] = {}
        updated = {name for name, _ in self.program.updates}
        for actor in actors:
            for target in actor.targets:
                if isinstance(target, OfVariable):
                    writers[(target.name, actor.rank)] = actor.id
            for operand in actor.operands:
                if isinstance(operand, OfVariable) and operand.name in updated:
                    readers.setdefault((operand.name, actor.rank), {})[actor.id] = None
            for name in self.updated_by.get(actor.id, ()):
                writers[(name, actor.rank)] = actor.id
        for number, draft in enumerate(self.drafts):
            for value in self.operand_values(draft):
                for name in self.views.get(value, frozenset()) & updated:
                    readers.setdefault((name, draft.rank), {})[number] = None
        return writers, readers

    def chains(self, plan: Plan) -> tuple[tuple[tuple[ChunkUse, ...], ...], Mapping[int, int]]:
        """The chunks of gathered variables of each stage and rank, in the order of their use, and actors' rounds."""
        several = any(draft.gathers and draft.rate > 1 for draft in self.drafts)
        joined = rounds(plan) if several else {}
        joined = {a: n for a, n in joined.items() if self.drafts[a].kind is not ActorKind.WEIGHT}
        chunks: dict[tuple[int, int, int, Phase, int], list[int]] = {}  # a chunk's gathers are of one level
        for number, draft in enumerate(self.drafts):
            if draft.gathers is not None:
                key = (draft.rank, draft.stage, draft.rate, draft.gathers, draft.level)
                chunks.setdefault(key, []).append(number)
        found: dict[tuple[int, int, int], list[ChunkUse]] = {}
        for (rank, stage, rate, phase, level), gathers in chunks.items():
            made = (register for number in gathers for register in plan.outputs_of[number])
            reads = dict.fromkeys(read.actor for register in made for read in register.readers)
            readers = tuple((r, self.drafts[r].level) for r in reads if self.drafts[r].rate == rate)
            least = min((joined[r] for r in reads if r in joined), default=0)
            found.setdefault((rank, stage, rate), []).append(ChunkUse(tuple(gathers), level, phase, readers, least))
        chains = (tuple(sorted(chain, key=lambda use: (use.level, use.gathers))) for chain in found.values())
        return tuple(chains), joined
