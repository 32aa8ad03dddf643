"""Convert plans to protobuf messages or bytes and back, without loss.

Floats, bools, integers, nested tuples, ``Symbol`` and ``Ref`` come back as what they were:
``from_bytes(to_bytes(plan)) == plan`` for every plan (but for NaN, which equals nothing).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, EncodeError

from actorflow_compiler.core.errors import LayoutError, PlanError
from actorflow_compiler.core.ops import ITEM_BYTES, Arg, Ref, Symbol
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.runs import stretches
from actorflow_compiler.core.sbp import NdSbp, parse_nd, show
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.origins import Flow, ModulePart, Origins, PartPhase, SourceLocation, StepsOf
from actorflow_compiler.plan.plan import (
    COMM_LABELS,
    SEND,
    Actor,
    ActorKind,
    Body,
    Box,
    Collective,
    CollectiveKind,
    Comm,
    ConsideredPlan,
    Constant,
    Exchange,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Operand,
    Order,
    Plan,
    Plane,
    RankBytes,
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
    VariableKind,
    parse_combine,
    shared_box,
)
from actorflow_protos import plan_pb2 as pb

MOST_RANKS = 1 << 20  # of a placement or a group

Stretches = tuple[tuple[int, int, int], ...]  # of ranks: the first, the step to the next, and how many

_Kind = TypeVar("_Kind", bound=StrEnum)


def to_bytes(plan: Plan) -> bytes:
    """The plan as bytes, the same in every process.  Raises PlanError for what protobuf cannot hold."""
    try:
        data: bytes = to_proto(plan).SerializeToString(deterministic=True)
    except EncodeError as error:  # more than 2 GB
        raise PlanError(f"plan {plan.name!r} does not fit a message of protobuf: {error}") from error
    return data


def from_bytes(data: bytes) -> Plan:
    """The plan that ``to_bytes`` was given.  Raises PlanError for bytes that are no plan."""
    message = pb.Plan()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise PlanError(
            f"{len(data)} bytes were found where a plan was expected, and cannot be read: {error}"
        ) from error
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise PlanError(
            f"plan {message.name!r} has fields that this version does not know; "
            f"run the same version of actorflow on every node"
        )
    return from_proto(message)


def to_proto(plan: Plan) -> pb.Plan:
    """The plan as a message.  Raises PlanError for a value that does not fit, such as a 65-bit integer."""
    exchanges = _Exchanges()
    try:
        return pb.Plan(
            name=plan.name,
            world=plan.world,
            pieces=plan.pieces,
            bodies=map(_body, plan.bodies),
            actors=[_actor(actor, exchanges) for actor in plan.actors],
            registers=map(_register, plan.registers),
            variables=map(_variable, plan.variables),
            results=map(_result, plan.results),
            orders=map(_order, plan.orders),
            constants=(pb.Constant(name=c.name, shape=c.shape, dtype=c.dtype, data=c.data) for c in plan.constants),
            notes=plan.notes,
            summary=_summary(plan.summary),
            ranks=plan.ranks,
            calls=map(_order, plan.calls),
            origins=_origins(plan.origins),
            mode=plan.mode,
            considered=(
                pb.ConsideredPlan(
                    text=c.text, seconds=c.seconds, nbytes=c.nbytes, moved=c.moved, why=c.why, estimated=c.estimated
                )
                for c in plan.considered
            ),
            exchanges=map(_exchange, exchanges.numbers),
        )
    except (TypeError, ValueError) as error:
        raise PlanError(f"plan {plan.name!r} holds a value that a message cannot carry: {error}") from error


def from_proto(message: pb.Plan) -> Plan:
    """The plan that a message holds; whether it is legal is for ``verify``.  Raises PlanError for missing parts."""
    if message.world < 1:
        raise PlanError(
            f"a plan for {message.world} ranks was found, one for at least 1 was expected: this message is no plan"
        )
    exchanges = [Exchange(_to_boxes(e.send), _to_boxes(e.receive), e.add) for e in message.exchanges]
    try:
        return Plan(
            name=message.name,
            world=message.world,
            pieces=message.pieces,
            bodies=tuple(map(_to_body, message.bodies)),
            actors=tuple(_to_actor(actor, exchanges) for actor in message.actors),
            registers=tuple(map(_to_register, message.registers)),
            variables=tuple(map(_to_variable, message.variables)),
            results=tuple(map(_to_result, message.results)),
            orders=tuple(map(_to_order, message.orders)),
            constants=tuple(Constant(c.name, tuple(c.shape), _dtype(c.dtype), c.data) for c in message.constants),
            notes=tuple(message.notes),
            summary=_to_summary(message.summary),
            ranks=tuple(message.ranks),
            calls=tuple(map(_to_order, message.calls)),
            origins=_to_origins(message.origins),
            mode=_member(Mode, message.mode or Mode.EAGER, "bodies", "mode"),  # empty before there were modes
            considered=tuple(
                ConsideredPlan(c.text, c.seconds, c.nbytes, c.moved, c.why, c.estimated) for c in message.considered
            ),
        )
    except LayoutError as error:
        raise PlanError(f"plan {message.name!r} cannot be read: {error}") from error


# ---- bodies and their arguments


def _arg(arg: Arg) -> pb.Arg:
    match arg:
        case None:
            return pb.Arg(none=True)
        case bool():
            return pb.Arg(boolean=arg)
        case int():
            return pb.Arg(integer=arg)
        case float():
            return pb.Arg(real=arg)
        case str():
            return pb.Arg(text=arg)
        case Symbol():
            return pb.Arg(symbol=arg.text)
        case Ref():
            return pb.Arg(ref=arg.index)
        case tuple():
            return pb.Arg(list=pb.ArgList(items=map(_arg, arg)))
    raise TypeError(f"argument {arg!r} of type {type(arg).__name__}; only plain data may be in a plan")


_ref = functools.lru_cache(maxsize=1024)(Ref)  # the values of each body are numbered from 0


def _to_arg(message: pb.Arg) -> Arg:
    kind = message.WhichOneof("kind")
    if kind == "ref":  # the most frequent ones first
        return _ref(message.ref)
    if kind == "list":
        return tuple(map(_to_arg, message.list.items))
    if kind == "none":
        return None
    if kind == "symbol":
        return Symbol(message.symbol)
    if kind is None:
        raise _unset("argument")
    return getattr(message, kind)  # a plain value


def _body(body: Body) -> pb.Body:
    return pb.Body(inputs=body.inputs, steps=map(_step, body.steps), outputs=body.outputs)


def _to_body(message: pb.Body) -> Body:
    return Body(message.inputs, tuple(map(_to_step, message.steps)), tuple(message.outputs))


def _step(step: Step) -> pb.Step:
    kwargs = (pb.NamedArg(name=name, value=_arg(value)) for name, value in step.kwargs)
    return pb.Step(op=step.op, args=map(_arg, step.args), kwargs=kwargs, outs=step.outs)


def _to_step(message: pb.Step) -> Step:
    kwargs = tuple([(k.name, _to_arg(k.value)) for k in message.kwargs])
    return Step(message.op, tuple(map(_to_arg, message.args)), kwargs, tuple(message.outs))


# ---- actors


def _operand(operand: Operand) -> pb.Operand:
    match operand:
        case FromRegister(register, index):
            return pb.Operand(tensor=pb.RegisterTensor(register=register, index=index))
        case OfVariable(name):
            return pb.Operand(variable=name)
        case OfScalar(name):
            return pb.Operand(scalar=name)
        case OfInput(name):
            return pb.Operand(input=name)
        case OfPiece():
            return pb.Operand(piece=True)


def _to_operand(message: pb.Operand) -> Operand:
    kind = message.WhichOneof("kind")
    if kind == "tensor":
        tensor = message.tensor
        return FromRegister(tensor.register, tensor.index)
    if kind == "variable":
        return OfVariable(message.variable)
    if kind == "scalar":
        return OfScalar(message.scalar)
    if kind == "input":
        return OfInput(message.input)
    if kind == "piece":
        return OfPiece()
    raise _unset("operand")


def _target(target: Target) -> pb.Target:
    match target:
        case FromRegister(register, index):
            return pb.Target(tensor=pb.RegisterTensor(register=register, index=index))
        case OfVariable(name):
            return pb.Target(variable=name)
        case ToResult(index):
            return pb.Target(result=index)


def _to_target(message: pb.Target) -> Target:
    match message.WhichOneof("kind"):
        case "tensor":
            return FromRegister(message.tensor.register, message.tensor.index)
        case "variable":
            return OfVariable(message.variable)
        case "result":
            return ToResult(message.result)
    raise _unset("target")


class _Exchanges:
    """The exchanges of a plan, each of which many ranks have in common, and their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Exchange, int] = {}
        self._known: dict[int, int] = {}  # id of an exchange, which the plan keeps alive → its number

    def number(self, exchange: Exchange) -> int:
        if id(exchange) not in self._known:  # else its thousands of boxes would be compared again
            self._known[id(exchange)] = self.numbers.setdefault(exchange, len(self.numbers))
        return self._known[id(exchange)]


def _exchange(exchange: Exchange) -> pb.Exchange:
    return pb.Exchange(send=_boxes(exchange.send), receive=_boxes(exchange.receive), add=exchange.add)


def _boxes(members: Iterable[tuple[Box, ...]]) -> Iterable[pb.Boxes]:
    return (pb.Boxes(boxes=(pb.Box(start=b.start, size=b.size) for b in boxes)) for boxes in members)


def _to_boxes(members: Iterable[pb.Boxes]) -> tuple[tuple[Box, ...], ...]:
    return tuple(tuple(shared_box(tuple(b.start), tuple(b.size)) for b in member.boxes) for member in members)


@functools.lru_cache(maxsize=256)  # many variables and collectives have the same ranks
def _stretches(ranks: tuple[int, ...]) -> tuple[pb.Stretch, ...]:
    """Ranks, in their order, as stretches of equal steps."""
    return tuple(pb.Stretch(first=first, step=step, count=count) for first, step, count in stretches(ranks))


def _to_stretches(stretches: Iterable[pb.Stretch]) -> Stretches:
    return tuple((s.first, s.step, s.count) for s in stretches)


def _to_ranks(found: Stretches, where: str) -> tuple[int, ...]:
    if (count := sum(n for _, _, n in found)) > MOST_RANKS:
        raise LayoutError(f"{where}: {count:,} ranks were found; at most {MOST_RANKS:,} were expected")
    if any(first + (n - 1) * step < 0 for first, step, n in found):
        raise LayoutError(f"{where}: ranks below 0 were found; 0 and above were expected")
    return _expanded(found)


@functools.lru_cache(maxsize=256)
def _expanded(stretches: Stretches) -> tuple[int, ...]:
    return tuple(first + k * step for first, step, n in stretches for k in range(n))


def _comm(comm: Comm, exchanges: _Exchanges) -> pb.Comm:
    return pb.Comm(
        kind=comm.label,
        id=comm.id,
        group=_stretches(comm.ranks),
        exchanges=map(exchanges.number, comm.exchanges if isinstance(comm, Collective) else ()),
        plane=comm.plane,
    )


def _to_comm(message: pb.Comm, actor: str, exchanges: Sequence[Exchange]) -> Comm:
    plane = _member(Plane, message.plane, actor, "data plane")
    ranks = _to_ranks(_to_stretches(message.group), actor)
    if message.kind == SEND:
        if len(ranks) != 2:
            raise LayoutError(f"{actor}: a send among ranks {list(ranks)} was found; two were expected")
        return Send(message.id, *ranks, plane)
    if message.kind not in COMM_LABELS:
        raise LayoutError(f"{actor}: unknown communication {message.kind!r}; known: {', '.join(COMM_LABELS)}")
    if message.exchanges and max(message.exchanges) >= len(exchanges):
        raise LayoutError(f"{actor}: exchange {max(message.exchanges)} was found, the plan has {len(exchanges)}")
    own = tuple(exchanges[number] for number in message.exchanges)
    return Collective(CollectiveKind(message.kind), message.id, ranks, own, plane)


def _member(kinds: type[_Kind], text: str, where: str, what: str) -> _Kind:
    try:
        return kinds(text)
    except ValueError:
        raise LayoutError(f"{where}: unknown {what} {text!r}; known: {', '.join(kinds)}") from None


def _actor(actor: Actor, exchanges: _Exchanges) -> pb.Actor:
    return pb.Actor(
        id=actor.id,
        name=actor.name,
        rank=actor.rank,
        queue=actor.queue,
        kind=actor.kind,
        rate=actor.rate,
        body=-1 if actor.body is None else actor.body,
        operands=map(_operand, actor.operands),
        targets=map(_target, actor.targets),
        comm=None if actor.comm is None else _comm(actor.comm, exchanges),
        flops=actor.flops,
        stage=actor.stage,
        momentary=actor.workspace,
        flops_dtype=actor.flops_dtype,
        traffic=actor.traffic,
        fused_traffic=actor.fused_traffic,
    )


def _to_actor(message: pb.Actor, exchanges: Sequence[Exchange]) -> Actor:
    return Actor(
        id=message.id,
        name=message.name,
        rank=message.rank,
        queue=message.queue,
        kind=_member(ActorKind, message.kind, f"actor {message.name}", "kind"),
        rate=message.rate,
        body=None if message.body < 0 else message.body,
        operands=tuple(map(_to_operand, message.operands)),
        targets=tuple(map(_to_target, message.targets)),
        comm=_to_comm(message.comm, f"actor {message.name}", exchanges) if message.HasField("comm") else None,
        flops=message.flops,
        stage=message.stage,
        workspace=message.momentary,
        flops_dtype=message.flops_dtype,
        traffic=message.traffic,
        fused_traffic=message.fused_traffic,
    )


def _order(order: Order) -> pb.Order:
    return pb.Order(rank=order.rank, queue=order.queue, actors=order.actors)


def _to_order(message: pb.Order) -> Order:
    return Order(message.rank, message.queue, tuple(message.actors))


# ---- registers


def _register(register: Register) -> pb.Register:
    return pb.Register(
        id=register.id,
        producer=register.producer,
        readers=(pb.Read(actor=r.actor, firings=r.firings) for r in register.readers),
        tensors=(
            pb.TensorSpec(shape=t.shape, dtype=t.dtype, sbp=t.sbp, combine=str(t.combine), name=t.name)
            for t in register.tensors
        ),
        slots=register.slots,
        initial=register.initial,
        fill=register.fill,
    )


def _to_register(message: pb.Register) -> Register:
    return Register(
        id=message.id,
        producer=message.producer,
        readers=tuple([Read(r.actor, r.firings) for r in message.readers]),
        tensors=tuple(
            [
                TensorSpec(tuple(t.shape), _dtype(t.dtype), t.sbp, parse_combine(t.combine), t.name)
                for t in message.tensors
            ]
        ),
        slots=message.slots,
        initial=message.initial,
        fill=message.fill,
    )


# ---- variables, results, summary


def _variable(variable: Variable) -> pb.Variable:
    return pb.Variable(
        name=variable.name,
        shape=variable.shape,
        dtype=variable.dtype,
        placement_type=variable.placement.type,
        ranks=_stretches(variable.placement.ranks),
        hierarchy=variable.placement.hierarchy,
        weights=_weights(variable.placement),
        sbp=show(variable.sbp),
        kind=variable.kind,
    )


def _to_variable(message: pb.Variable) -> Variable:
    kind = _member(VariableKind, message.kind, f"variable {message.name}", "kind")
    return Variable(message.name, tuple(message.shape), _dtype(message.dtype), *_layout(message), kind)


def _result(result: Result) -> pb.Result:
    return pb.Result(
        index=result.index,
        shape=result.shape,
        dtype=result.dtype,
        placement_type=result.placement.type,
        ranks=_stretches(result.placement.ranks),
        hierarchy=result.placement.hierarchy,
        weights=_weights(result.placement),
        sbp=show(result.sbp),
    )


def _to_result(message: pb.Result) -> Result:
    return Result(message.index, tuple(message.shape), _dtype(message.dtype), *_layout(message))


def _weights(placement: Placement) -> tuple[int, ...]:
    """The weights of all axes, one after the other; () where there are none."""
    axes = zip(placement.weights, placement.hierarchy, strict=False)  # of weights there may be none
    return tuple(itertools.chain.from_iterable(weights or (1,) * n for weights, n in axes))


def _layout(message: pb.Variable | pb.Result) -> tuple[Placement, NdSbp]:
    placement = _placement(
        message.placement_type, _to_stretches(message.ranks), tuple(message.hierarchy), tuple(message.weights)
    )
    return placement, _sbp_on(placement, message.sbp)


@functools.lru_cache(maxsize=256)  # as for ranks
def _placement(type_: str, ranks: Stretches, hierarchy: tuple[int, ...], given: tuple[int, ...]) -> Placement:
    flat = iter(given)
    weights = tuple(tuple(itertools.islice(flat, n)) for n in hierarchy) if given else ()
    placement = Placement(type_, _to_ranks(ranks, "a placement"), hierarchy, weights)
    if _weights(placement) != given:
        raise LayoutError(f"weights {list(given)} were found, those of {placement} in lowest terms were expected")
    return placement


@functools.lru_cache(maxsize=256)
def _sbp_on(placement: Placement, text: str) -> NdSbp:
    sbp = parse_nd(text)
    if show(sbp) != text or len(sbp) != len(placement.hierarchy):
        raise LayoutError(f"SBP {text!r} was found, one entry for each axis of {placement} was expected")
    return sbp


def _dtype(text: str) -> str:
    if text not in ITEM_BYTES:
        raise LayoutError(f"dtype {text!r} was found; known: {', '.join(ITEM_BYTES)}")
    return text


def _summary(summary: Summary) -> pb.Summary:
    return pb.Summary(
        stages=summary.stages,
        actors=summary.actors,
        flops=summary.flops,
        redundant_flops=summary.redundant_flops,
        memory=(
            pb.RankBytes(rank=m.rank, parameters=m.parameters, optimizer=m.optimizer, activations=m.activations)
            for m in summary.memory
        ),
        moved=(pb.KindBytes(kind=kind, bytes=count) for kind, count in summary.moved),
    )


def _to_summary(message: pb.Summary) -> Summary:
    return Summary(
        stages=tuple(message.stages),
        actors=message.actors,
        flops=message.flops,
        redundant_flops=message.redundant_flops,
        memory=tuple(RankBytes(m.rank, m.parameters, m.optimizer, m.activations) for m in message.memory),
        moved=tuple((m.kind, m.bytes) for m in message.moved),
    )


# ---- origins


def _origins(origins: Origins) -> pb.Origins:
    return pb.Origins(
        places=(pb.Place(module=p.module, line=p.line) for p in origins.places),
        steps=(pb.StepsOf(actor=s.actor, places=s.places) for s in origins.steps),
        parts=(
            pb.Part(module=p.module, phase=p.phase, placement=p.placement, count=p.count, ops=p.ops, places=p.places)
            for p in origins.parts
        ),
        flows=(
            pb.Flow(
                source=f.source, target=f.target, name=f.name, shape=f.shape, dtype=f.dtype, sbp=f.sbp, read=f.read,
                boxing=f.boxing, moved=f.moved,
            )
            for f in origins.flows
        ),
    )  # fmt: skip


def _to_origins(message: pb.Origins) -> Origins:
    return Origins(
        places=tuple(SourceLocation(p.module, p.line) for p in message.places),
        steps=tuple(StepsOf(s.actor, tuple(s.places)) for s in message.steps),
        parts=tuple(map(_to_part, message.parts)),
        flows=tuple(
            Flow(f.source, f.target, f.name, tuple(f.shape), f.dtype, f.sbp, f.read, tuple(f.boxing), f.moved)
            for f in message.flows
        ),
    )


def _to_part(message: pb.Part) -> ModulePart:
    phase = _member(PartPhase, message.phase, f"part {message.module!r}", "phase")
    return ModulePart(
        message.module, phase, message.placement, message.count, tuple(message.ops), tuple(message.places)
    )


def _unset(what: str) -> PlanError:
    return PlanError(f"a plan was expected; an empty {what} was found in the message")
