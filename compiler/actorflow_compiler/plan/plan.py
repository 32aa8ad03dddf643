"""The plan: frozen data that describes the actors of every rank and the registers that connect them.

A plan is a synchronous dataflow graph.  An actor fires when each register it reads holds a token,
each register it writes has a free slot, and it is its turn on its queue.  ``verify.py`` says what makes a plan legal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.ops import ITEM_BYTES, Arg, Ref, refs, substitute_all
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp, numel
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.origins import Origins, StepsOf


class ActorKind(StrEnum):
    """The role of an actor."""

    SOURCE = "source"  # takes the arguments of the call
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the gradients of parameters, where they have actors of their own
    OPTIMIZER = "optimizer"
    BOXING = "boxing"  # a collective
    SEND = "send"
    SINK = "sink"  # gives a result of the call


class VariableKind(StrEnum):
    """What a variable is in the user's script."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"  # state of an optimizer
    GRADIENT = "gradient"
    TENSOR = "tensor"  # any other tensor


class CollectiveKind(StrEnum):
    """What a collective does, by the names of ``torch.distributed``."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class Plane(StrEnum):
    """What carries the tensors of a communication from rank to rank."""

    INLINE = "inline"  # inside the control message that announces a token
    SHARED = "shared"  # memory that two processes of a machine share
    GLOO = "gloo"  # torch's Gloo, through host memory
    NCCL = "nccl"  # torch's NCCL, from GPU to GPU
    MEMORY = "memory"  # ranks that are threads of one process


ORDERED = (Plane.NCCL,)  # the planes whose calls every rank makes in one order


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a body; value numbers are local to the body."""

    op: str  # "aten.mm.default", "actorflow.unpack"
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int, ...]  # -1 where an output is not used

    def reads(self) -> list[int]:
        """The values that the step reads, one entry for each occurrence in its arguments."""
        found = refs(self.args)
        for _, value in self.kwargs:
            found += refs((value,))
        return found

    def reading(self, change: Callable[[int], Arg]) -> Step:
        """The same step, in which each value that it reads is replaced by ``change(value)``."""
        return Step(self.op, *substitute_all(self.args, self.kwargs, change), self.outs)

    def renamed(self, new: Mapping[int, int]) -> Step:
        """The same step over values that have other numbers."""
        outs = tuple(out if out < 0 else new[out] for out in self.outs)
        return replace(self.reading(lambda v: Ref(new[v])), outs=outs)


@dataclass(frozen=True, slots=True)
class Body:
    """What an actor computes: values 0 … inputs-1 are its operands, ``outputs`` go to its targets in order."""

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


class CombineKind(StrEnum):
    """What becomes of the outputs of the firings that make one token."""

    LAST = ""  # the last one is the token
    SUM = "sum"
    CAT = "cat"


@dataclass(frozen=True, slots=True)
class Combine:
    """How one token is made of the outputs of several firings; as text "", "sum" or "cat:DIM"."""

    kind: CombineKind
    dim: int = 0  # along which outputs are concatenated

    def __str__(self) -> str:
        return f"{self.kind}:{self.dim}" if self.kind is CombineKind.CAT else self.kind.value


LAST, SUM = Combine(CombineKind.LAST), Combine(CombineKind.SUM)


@lru_cache(maxsize=64)  # each tensor of each register has one
def parse_combine(text: str) -> Combine:
    """The inverse of ``str``.  Raises LayoutError for any other text."""
    kind, _, dim = text.partition(":")
    if kind == CombineKind.CAT and dim.isdecimal():
        return Combine(CombineKind.CAT, int(dim))
    known = {str(combine): combine for combine in (LAST, SUM)}
    if text not in known:
        raise LayoutError(f'combine {text!r} was found; "", "sum" or "cat:DIM" was expected')
    return known[text]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a register: the local part as a token holds it."""

    shape: tuple[int, ...]  # local
    dtype: str
    sbp: str  # of the logical tensor over its placement, for people
    combine: Combine = LAST
    name: str = ""  # the logical value, for people

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return numel(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Read:
    """A reader of a register; it uses each token for ``firings`` of its firings, then frees the slot."""

    actor: int
    firings: int = 1


@dataclass(frozen=True, slots=True)
class Register:
    """The typed buffer between one producer and its readers.

    A token of ``tensors`` is complete after ``fill`` firings of the producer; ``slots`` tokens may
    exist at a time; ``initial`` of them exist before anything fires.  Token number n lies in slot
    n mod slots.  The readers are all on one rank: the producer's own, or (for a "send" actor) the
    rank that it sends to; the slots are on the readers' rank.  A register without tensors only orders
    its actors (around a variable that is updated in place, say).
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
        return sum([t.nbytes for t in self.tensors])


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


@kept_while_compiling(maxsize=1 << 16)
def shared_box(start: tuple[int, ...], size: tuple[int, ...]) -> Box:
    """A box, as a rule the object that equal ones are: plans of tensors in blocks have thousands for two ranks."""
    return Box(start, size)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends to and receives from each member of a collective, of one tensor.

    Boxes to send are in coordinates of the input; boxes received are in coordinates of the output,
    which starts as zeros; ``add`` adds what is received, else it is placed.
    """

    send: tuple[tuple[Box, ...], ...]  # for each member of the group
    receive: tuple[tuple[Box, ...], ...]  # for each member of the group
    add: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in a collective, done by a boxing actor; it moves operand i to target i.

    all_reduce sums every operand over the group.  The other kinds follow ``exchanges``, one for each operand.
    """

    kind: CollectiveKind
    id: int  # the logical communication, which all members share
    ranks: tuple[int, ...]  # the group, the same for all members
    exchanges: tuple[Exchange, ...] = ()
    plane: Plane = Plane.GLOO

    @property
    def label(self) -> str:
        """Its name in texts: the kind of collective."""
        return self.kind.value


@dataclass(frozen=True, slots=True)
class Send:
    """A transfer to one other rank, done by a send actor: its operands fill the register there that it writes."""

    id: int  # the logical communication
    from_rank: int
    to_rank: int
    plane: Plane = Plane.GLOO

    @property
    def ranks(self) -> tuple[int, int]:
        """The rank that sends and the one that receives."""
        return self.from_rank, self.to_rank

    @property
    def label(self) -> str:
        """Its name in texts, beside the kinds of collectives."""
        return SEND


Comm = Collective | Send
SEND = "send"
COMM_LABELS = (*(kind.value for kind in CollectiveKind), SEND)


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
    kind: ActorKind
    rate: int = 1  # firings in an iteration
    body: int | None = None
    operands: tuple[Operand, ...] = ()
    targets: tuple[Target, ...] = ()
    comm: Comm | None = None
    flops: float = 0.0  # of one firing
    stage: int = 0
    workspace: int = 0  # bytes that one firing needs beside registers and variables
    flops_dtype: str = ""  # of the operands of most of its FLOPs; empty: not known, or there are none
    traffic: int = 0  # bytes that its ops without FLOPs read and write in one firing, if each runs by itself
    fused_traffic: int = 0  # the same if those that hand values to each other are fused


@dataclass(frozen=True, slots=True)
class Variable:
    """State that outlives an iteration, and its layout."""

    name: str
    shape: tuple[int, ...]  # logical
    dtype: str
    placement: Placement
    sbp: NdSbp
    kind: VariableKind


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a call returns, and its layout when the sinks have fired."""

    index: int
    shape: tuple[int, ...]  # logical
    dtype: str
    placement: Placement
    sbp: NdSbp


@dataclass(frozen=True, slots=True)
class Order:
    """The frozen firing order of one queue of one rank for one iteration; it is repeated for every iteration."""

    rank: int
    queue: str
    actors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor that the step captures or makes of numbers; every rank has all of it."""

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
    """The key figures of a plan, for people."""

    stages: tuple[str, ...] = ()  # text of each stage's placement
    actors: int = 0
    flops: float = 0.0  # useful floating-point operations in an iteration
    redundant_flops: float = 0.0  # fraction of all that is done more than once
    memory: tuple[RankBytes, ...] = ()
    moved: tuple[tuple[str, int], ...] = ()  # (kind of communication, bytes in an iteration)


@dataclass(frozen=True, slots=True)
class ConsideredPlan:
    """A plan that was compared with others when this one was chosen."""

    text: str  # how it shares the step: "data 2, tensor 2, 8 micro-batches"
    seconds: float = 0.0  # of a step, as forecast; 0: there is no such plan
    nbytes: int = 0  # the most that a device holds
    moved: int = 0  # bytes of communication in a step
    why: str = ""  # why it is worse; empty for the plan that was chosen
    estimated: bool = False  # it was not compiled: its time and memory are estimates, and ``moved`` is not known


@dataclass(frozen=True, slots=True)
class RankItems:
    """What a plan lists for one rank, each in the order of the plan."""

    actors: list[Actor] = field(default_factory=list)  # its own, and those of other ranks that send to it
    registers: list[Register] = field(default_factory=list)  # that these actors fill
    orders: list[Order] = field(default_factory=list)
    calls: list[Order] = field(default_factory=list)
    steps: list[StepsOf] = field(default_factory=list)  # of its own actors


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
    # For planes whose calls all ranks must make in one order: for each rank its calls in one iteration, as the actors
    # of the communications (for a receive the sender).  The queue is the plane's name.
    calls: tuple[Order, ...] = ()
    origins: Origins = field(default_factory=Origins)  # for people only
    mode: Mode = Mode.EAGER  # how ranks run bodies
    considered: tuple[ConsideredPlan, ...] = ()  # this one and the next best, if it was chosen; for people only

    @cached_property
    def _actors(self) -> dict[int, Actor]:
        return {a.id: a for a in self.actors}

    @cached_property
    def _registers(self) -> dict[int, Register]:
        return {r.id: r for r in self.registers}

    @cached_property
    def _variables(self) -> dict[str, Variable]:
        return {v.name: v for v in self.variables}

    @cached_property
    def _by_rank(self) -> dict[int, RankItems]:
        found: defaultdict[int, RankItems] = defaultdict(RankItems)
        for actor in self.actors:
            for rank in _concerned(actor):
                found[rank].actors.append(actor)
        for register in self.registers:
            if register.producer in self._actors:
                for rank in _concerned(self._actors[register.producer]):
                    found[rank].registers.append(register)
        for order in self.orders:
            found[order.rank].orders.append(order)
        for order in self.calls:
            found[order.rank].calls.append(order)
        for steps in self.origins.steps:
            if steps.actor in self._actors:
                found[self._actors[steps.actor].rank].steps.append(steps)
        return dict(found)

    def of_rank(self, rank: int) -> RankItems:
        """What the plan lists for a rank; all ranks are looked for at once, at the first call."""
        return self._by_rank.get(rank) or RankItems()

    @cached_property
    def _moved(self) -> dict[int, tuple[int, int]]:
        return {}

    def moved_by(self, exchange: Exchange) -> tuple[int, int]:
        """The elements that one of the plan's exchanges sends and receives in all, also to and from its own rank."""
        if id(exchange) not in self._moved:  # the plan keeps it alive, so its id stays its own
            self._moved[id(exchange)] = sum(map(elements, exchange.send)), sum(map(elements, exchange.receive))
        return self._moved[id(exchange)]

    def variable(self, name: str) -> Variable | None:
        """The variable of this name; None if it is the name of a constant."""
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

    def changed_by(self, actor: Actor) -> frozenset[str]:
        """The variables that an actor changes: those among its targets, and those that its body updates in place."""
        return frozenset(t.name for t in actor.targets if isinstance(t, OfVariable)) | self.worked_on_by(actor)

    def worked_on_by(self, actor: Actor, steps: int | None = None) -> frozenset[str]:
        """The variables that steps without outputs update in place; with ``steps``, of the first so many steps."""
        found: set[str] = set()
        for step in self.bodies[actor.body].steps[:steps] if actor.body is not None else ():
            if not step.outs:
                operands = [actor.operands[i] for i in step.reads() if i < len(actor.operands)]
                found.update(o.name for o in operands if isinstance(o, OfVariable))
        return frozenset(found)

    def home(self, register: Register) -> int:
        """The rank whose memory holds the register's slots: the readers'."""
        comm = self.actor(register.producer).comm
        if isinstance(comm, Send):
            return comm.to_rank
        return self.actor(register.producer).rank

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that exchange messages with ``rank``, about registers or shared memory, ascending."""
        found: set[int] = set()
        for actor in self.actors:
            comm = actor.comm
            if comm is not None and rank in comm.ranks and (isinstance(comm, Send) or comm.plane == Plane.SHARED):
                found.update(comm.ranks)
        return tuple(sorted(found - {rank}))

    def for_rank(self, rank: int) -> Plan:
        """What one rank needs: its actors, the senders that fill its registers, their registers, its orders.

        How much memory each rank of the plan needs is left out: it grows with the ranks, and no rank asks for it.
        """
        own = self.of_rank(rank)
        used = dict.fromkeys(a.body for a in own.actors if a.rank == rank and a.body is not None)
        number = {old: new for new, old in enumerate(used)}
        return replace(
            self,
            bodies=tuple(self.bodies[b] for b in used),
            actors=tuple(
                replace(a, body=number[a.body]) if a.rank == rank and a.body is not None else replace(a, body=None)
                for a in own.actors
            ),
            registers=tuple(own.registers),
            orders=tuple(own.orders),
            summary=replace(self.summary, memory=()),
            ranks=(rank,),
            considered=(),
            calls=tuple(own.calls),
            origins=Origins(self.origins.places, tuple(own.steps)),
        )


def _concerned(actor: Actor) -> tuple[int, ...]:
    """The ranks that know of an actor: its own, and the one that it sends to."""
    comm = actor.comm
    return (actor.rank, comm.to_rank) if isinstance(comm, Send) and comm.to_rank != actor.rank else (actor.rank,)


def elements(boxes: tuple[Box, ...]) -> int:
    """The number of elements in some boxes."""
    return sum(numel(box.size) for box in boxes)


def tokens_per_iteration(plan: Plan, register: Register) -> int:
    """How many tokens of a register one iteration makes."""
    return plan.actor(register.producer).rate // register.fill


def moves_by(actor: Actor, plane: Plane) -> bool:
    """Whether an actor's communication uses a data plane; a send without tensors is only a control message."""
    comm = actor.comm
    return comm is not None and comm.plane == plane and (isinstance(comm, Collective) or bool(actor.operands))
