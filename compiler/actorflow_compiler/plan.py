"""The plan: frozen data that says which actors there are on every rank and which registers join them.

A plan is a synchronous dataflow graph.  An actor fires when each register it reads holds a token,
each register it writes has a free slot, and it is its turn on its queue.  See ``verify`` for what
makes a plan legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from actorflow_compiler.errors import PlanError
from actorflow_compiler.ops import ITEM_BYTES, Arg, refs
from actorflow_compiler.placement import Placement
from actorflow_compiler.sbp import NdSbp, numel

KINDS = ("source", "forward", "backward", "weight", "optimizer", "boxing", "send", "sink")
COMMS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a body; value numbers are local to the body."""

    op: str  # "aten.mm.default", "actorflow.unpack"
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int, ...]  # -1 where an output is not used

    def reads(self) -> Iterator[int]:
        """The values that the step reads."""
        yield from refs(self.args)
        yield from refs(tuple(v for _, v in self.kwargs))


@dataclass(frozen=True, slots=True)
class Body:
    """What an actor computes: values 0 … inputs-1 are its operands, ``outputs`` go to its targets in order."""

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a register: the local part as a token holds it."""

    shape: tuple[int, ...]  # local
    dtype: str
    sbp: str  # how the logical tensor lies over its placement, for people
    combine: str = ""  # how one token is made of several firings: "" (the last) | "sum" | "cat:DIM"
    name: str = ""  # the logical value, for people

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return numel(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Read:
    """A consumer of a register; it holds each token for ``firings`` of its firings, then gives the slot back."""

    actor: int
    firings: int = 1


@dataclass(frozen=True, slots=True)
class Register:
    """The typed buffer between one producer and its consumers.

    A token of ``tensors`` is complete after ``fill`` firings of the producer; ``slots`` tokens may
    exist at a time; ``initial`` of them exist before anything fires.  Token number n lies in slot
    n mod slots.  The readers are all on one rank: the producer's own, or (for a "send" actor) the
    rank that it sends to; the slots are on the readers' rank.  A register without tensors carries
    only the order (a variable that was updated in place).
    """

    id: int
    producer: int
    readers: tuple[Read, ...]
    tensors: tuple[TensorSpec, ...]
    slots: int = 1
    initial: int = 0
    fill: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class FromRegister:
    """Operand or target: tensor ``index`` of a register's current token."""

    register: int
    index: int


@dataclass(frozen=True, slots=True)
class OfVariable:
    """Operand: the rank's part of a variable or constant.  Target: it is overwritten in place."""

    name: str


@dataclass(frozen=True, slots=True)
class OfScalar:
    """Operand: a Python number read at each call, such as a learning rate."""

    name: str


@dataclass(frozen=True, slots=True)
class OfPiece:
    """Operand: the number of this firing within its iteration, 0 … rate-1, as a Python int."""


@dataclass(frozen=True, slots=True)
class OfInput:
    """Operand of a source: the rank's copy of a logical argument of the call, whole."""

    name: str


@dataclass(frozen=True, slots=True)
class ToResult:
    """Target of a sink: result number ``index`` of the call."""

    index: int


Operand = FromRegister | OfVariable | OfScalar | OfPiece | OfInput
Target = FromRegister | OfVariable | ToResult


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One tensor's part in a collective, seen from one rank: what it sends to and gets from each member.

    Boxes to send are in coordinates of the input; boxes received are in coordinates of the output,
    which starts as zeros; ``add`` adds what is received, else it is placed.
    """

    send: tuple[tuple[Box, ...], ...]  # for each member of the group
    receive: tuple[tuple[Box, ...], ...]  # for each member of the group
    add: bool = False


@dataclass(frozen=True, slots=True)
class Comm:
    """The communication that a boxing or send actor does; it moves operand i to target i.

    all_reduce sums every operand over the group.  The other collectives follow ``exchanges``.  A
    send moves its operands to the one other rank, where they fill the register it writes.
    """

    kind: str
    id: int  # the logical communication; the members of a collective share it
    group: tuple[int, ...]  # ranks, alike for all members; (from, to) for a send
    exchanges: tuple[Exchange, ...] = ()
    plane: str = "gloo"  # "inline": in the control message; "gloo": torch.distributed; "shared": in shared memory


@dataclass(frozen=True, slots=True)
class Actor:
    """One firing unit on one rank.

    Queues: "compute" (the compute thread), "comm" (collectives), "send:R" (transfers to rank R),
    "source" and "sink" (never blocked by computing).  An actor has a body, or a comm, or neither
    (sources and sinks may pass operands through: operand i goes to target i).
    """

    id: int
    name: str
    rank: int
    queue: str
    kind: str
    rate: int = 1  # firings in an iteration
    body: int | None = None
    operands: tuple[Operand, ...] = ()
    targets: tuple[Target, ...] = ()
    comm: Comm | None = None
    flops: float = 0.0  # of one firing
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Variable:
    """State that outlives an iteration and where it lies."""

    name: str
    shape: tuple[int, ...]  # logical
    dtype: str
    placement: Placement
    sbp: NdSbp
    kind: str  # "parameter" | "buffer" | "optimizer" | "tensor"


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a call gives back; where its parts lie when the sinks have fired."""

    index: int
    shape: tuple[int, ...]  # logical
    dtype: str
    placement: Placement
    sbp: NdSbp


@dataclass(frozen=True, slots=True)
class Order:
    """The frozen firing order of one queue of one rank, for one iteration; it repeats for ever."""

    rank: int
    queue: str
    actors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor that the step holds or makes of numbers; every rank gets it whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True)
class RankBytes:
    """The memory of one rank, in bytes."""

    rank: int
    parameters: int
    optimizer: int
    activations: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a person wants to know first."""

    stages: tuple[str, ...] = ()  # text of each stage's placement
    actors: int = 0
    flops: float = 0.0  # useful floating-point operations in an iteration
    redundant_flops: float = 0.0  # fraction of all that is done more than once
    memory: tuple[RankBytes, ...] = ()
    moved: tuple[tuple[str, int], ...] = ()  # (kind of communication, bytes in an iteration)


@dataclass(frozen=True)
class Plan:
    """A whole plan, or the part of it that some ranks need (``for_rank``).

    ``actors[i].id == i`` does not hold for a part: use ``actor(id)`` and ``register(id)``.
    """

    name: str
    world: int  # ranks
    pieces: int  # micro-batches in an iteration
    bodies: tuple[Body, ...]
    actors: tuple[Actor, ...]
    registers: tuple[Register, ...]
    variables: tuple[Variable, ...] = ()
    results: tuple[Result, ...] = ()
    orders: tuple[Order, ...] = ()
    constants: tuple[Constant, ...] = ()
    notes: tuple[str, ...] = ()
    summary: Summary = field(default_factory=Summary)
    ranks: tuple[int, ...] = ()  # the ranks whose actors are listed; empty: all of them

    @cached_property
    def _actors(self) -> dict[int, Actor]:
        return {a.id: a for a in self.actors}

    @cached_property
    def _registers(self) -> dict[int, Register]:
        return {r.id: r for r in self.registers}

    @cached_property
    def _variables(self) -> dict[str, Variable]:
        return {v.name: v for v in self.variables}

    def variable(self, name: str) -> Variable | None:
        """The variable of this name; None where it is a constant's."""
        return self._variables.get(name)

    def actor(self, id: int) -> Actor:
        """The actor with this number."""
        return self._actors[id]

    def register(self, id: int) -> Register:
        """The register with this number."""
        return self._registers[id]

    @cached_property
    def inputs_of(self) -> dict[int, tuple[Register, ...]]:
        """Actor → the registers that it reads (with or without taking tensors from them)."""
        found: dict[int, list[Register]] = {a.id: [] for a in self.actors}
        for register in self.registers:
            for read in register.readers:
                if read.actor in found:
                    found[read.actor].append(register)
        return {a: tuple(rs) for a, rs in found.items()}

    @cached_property
    def outputs_of(self) -> dict[int, tuple[Register, ...]]:
        """Actor → the registers that it writes."""
        found: dict[int, list[Register]] = {a.id: [] for a in self.actors}
        for register in self.registers:
            if register.producer in found:
                found[register.producer].append(register)
        return {a: tuple(rs) for a, rs in found.items()}

    def home(self, register: Register) -> int:
        """The rank whose memory holds the register's slots: the readers'."""
        comm = self.actor(register.producer).comm
        if comm is not None and comm.kind == "send":
            return comm.group[1]
        return self.actor(register.producer).rank

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that exchange register messages with ``rank``, ascending."""
        found: set[int] = set()
        for actor in self.actors:
            if actor.comm is not None and actor.comm.kind == "send" and rank in actor.comm.group:
                found.update(actor.comm.group)
        return tuple(sorted(found - {rank}))

    def for_rank(self, rank: int) -> Plan:
        """What one rank needs: its actors, the senders that fill its registers, their registers, its orders."""
        sends = {a.id for a in self.actors if a.comm is not None and a.comm.kind == "send" and a.comm.group[1] == rank}
        mine = {a.id for a in self.actors if a.rank == rank}
        used = sorted({a.body for a in self.actors if a.id in mine and a.body is not None})
        number = {old: new for new, old in enumerate(used)}
        actors = tuple(
            replace(a, body=None if a.body is None or a.id not in mine else number[a.body])
            for a in self.actors
            if a.id in mine or a.id in sends
        )
        registers = tuple(r for r in self.registers if r.producer in mine or r.producer in sends)
        return replace(
            self,
            bodies=tuple(self.bodies[b] for b in used),
            actors=actors,
            registers=registers,
            orders=tuple(o for o in self.orders if o.rank == rank),
            ranks=(rank,),
        )


def tokens_per_iteration(plan: Plan, register: Register) -> int:
    """How many tokens of a register one iteration makes."""
    return plan.actor(register.producer).rate // register.fill


def verify(plan: Plan) -> Plan:
    """Return the plan if it is legal, else raise PlanError that names the actor or register.

    Checked: numbers are unique and known; kinds and comms are of the known ones; readers of a
    register are on its home rank; rates balance (producer.rate / fill == reader.rate / firings,
    both whole); slots ≥ max(1, initial); a body fits its operands and targets and reads only values
    it has; every operand or target register is read or written by that actor; every queue's order
    holds each of its actors ``rate`` times.
    """

    def fail(where: str, what: str) -> None:
        raise PlanError(f"plan {plan.name!r}: {where}: {what}")

    if len(plan._actors) != len(plan.actors) or len(plan._registers) != len(plan.registers):
        fail("numbers", "two actors or two registers share a number")
    whole = not plan.ranks
    for register in plan.registers:
        where = f"register {register.id}"
        if register.producer not in plan._actors:
            fail(where, f"its producer, actor {register.producer}, does not exist")
        producer = plan.actor(register.producer)
        where += f" of {producer.name}"
        if register.slots < max(1, register.initial):
            fail(where, f"{register.slots} slots cannot hold {register.initial} initial tokens")
        if register.fill < 1 or producer.rate % register.fill:
            fail(where, f"{producer.rate} firings do not make whole tokens of {register.fill}")
        home = plan.home(register)
        for read in register.readers:
            if read.actor not in plan._actors:
                if whole or home in plan.ranks:
                    fail(where, f"its reader, actor {read.actor}, does not exist")
                continue
            reader = plan.actor(read.actor)
            if reader.rank != home:
                fail(where, f"reader {reader.name} is on rank {reader.rank}, the slots are on rank {home}")
            if read.firings < 1 or reader.rate != read.firings * (producer.rate // register.fill):
                fail(
                    where,
                    f"rates do not balance: {producer.rate // register.fill} tokens, "
                    f"{reader.name} reads {reader.rate}/{read.firings}",
                )
    for actor in plan.actors:
        where = f"actor {actor.name}"
        if actor.kind not in KINDS:
            fail(where, f"unknown kind {actor.kind!r}; known: {', '.join(KINDS)}")
        if actor.rank >= plan.world:
            fail(where, f"rank {actor.rank} was found, the world has {plan.world}")
        if actor.comm is not None and actor.comm.kind not in COMMS:
            fail(where, f"unknown communication {actor.comm.kind!r}; known: {', '.join(COMMS)}")
        if actor.comm is not None and actor.comm.plane == "shared" and actor.comm.kind != "send":
            fail(where, f'plane "shared" was found for {actor.comm.kind}; it carries only what is sent to one rank')
        if not whole and actor.rank not in plan.ranks:
            continue
        reads = {r.id for r in plan.inputs_of[actor.id]}
        writes = {r.id for r in plan.outputs_of[actor.id]}
        for operand in actor.operands:
            if isinstance(operand, FromRegister) and operand.register not in reads:
                fail(where, f"takes from register {operand.register} without being its reader")
        for target in actor.targets:
            if isinstance(target, FromRegister) and target.register not in writes:
                fail(where, f"writes register {target.register} without being its producer")
        if actor.body is not None and actor.body >= len(plan.bodies):
            fail(where, f"body {actor.body} was found, the plan has {len(plan.bodies)}")
        elif actor.body is not None:
            _verify_body(plan.bodies[actor.body], actor, fail)
        elif len(actor.operands) != len(actor.targets):
            fail(where, f"{len(actor.operands)} operands and {len(actor.targets)} targets, and no body between them")
    _verify_orders(plan, fail)
    return plan


def _verify_body(body: Body, actor: Actor, fail: Callable[[str, str], None]) -> None:
    if body.inputs != len(actor.operands) or len(body.outputs) != len(actor.targets):
        fail(
            f"actor {actor.name}",
            f"its body takes {body.inputs} and gives {len(body.outputs)}, "
            f"the actor {len(actor.operands)} and {len(actor.targets)}",
        )
    known = set(range(body.inputs))
    for step in body.steps:
        missing = [v for v in step.reads() if v not in known]
        if missing:
            fail(f"actor {actor.name}", f"{step.op} reads value {missing[0]} before it exists")
        known.update(v for v in step.outs if v >= 0)
    for value in body.outputs:
        if value not in known:
            fail(f"actor {actor.name}", f"its output {value} does not exist")


def _verify_orders(plan: Plan, fail: Callable[[str, str], None]) -> None:
    if not plan.orders:
        return
    expected: dict[tuple[int, str], dict[int, int]] = {}
    for actor in plan.actors:
        if not plan.ranks or actor.rank in plan.ranks:
            expected.setdefault((actor.rank, actor.queue), {})[actor.id] = actor.rate
    found: dict[tuple[int, str], dict[int, int]] = {}
    for order in plan.orders:
        counts = found.setdefault((order.rank, order.queue), {})
        for id in order.actors:
            counts[id] = counts.get(id, 0) + 1
    if expected != found:
        where = next(k for k in {**expected, **found} if expected.get(k) != found.get(k))
        fail(
            f"rank {where[0]}, queue {where[1]}",
            f"the order fires {found.get(where)}, the rates ask for {expected.get(where)}",
        )
