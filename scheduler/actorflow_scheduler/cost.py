"""The cost model: how long a firing of an actor takes on given hardware, and how many bytes a plan needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.core.ops import FLOATS, ITEM_BYTES
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.communication_time import communication_time
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import (
    Actor,
    ActorKind,
    Collective,
    CollectiveKind,
    CombineKind,
    FromRegister,
    OfVariable,
    Operand,
    Plan,
    Plane,
    Send,
    Target,
    TensorSpec,
    Variable,
    elements,
)
from actorflow_compiler.plan.shared_slots import slots_of
from actorflow_compiler.plan.summary import sent_bytes, variable_shape
from actorflow_scheduler.work_digest import work_digest


@dataclass(frozen=True, slots=True)
class Durations:
    """How long the firings of a plan take on some hardware, in nanoseconds."""

    firing: Mapping[int, int]  # actor → duration of one firing, during which its queue does nothing else
    latency: Mapping[int, int]  # send → time from its end until the token arrives; a credit takes as long to return


def seconds(plan: Plan, actor: Actor, hardware: Hardware) -> float:
    """Seconds for which one firing occupies its queue: overhead plus the measured time of its body, or an estimate.

    The estimate for computing is the time of its arithmetic and of what its other ops read and write, one by one or
    fused; or that of reading and writing its operands and targets, if it is longer; at the speed of its rank.  That for
    communication is ``communication_time``.
    """
    total = hardware.fire_overhead_s
    if actor.comm is not None:
        comm = actor.comm
        kind = comm.kind if isinstance(comm, Collective) else None
        read = sum(_firing_bytes(plan, o, writes=False) for o in actor.operands)
        link = hardware.link(comm.ranks, kind is not None)
        if actor.operands or kind is not None:  # else it is a control message
            total += communication_time(kind, len(comm.ranks), read, moved_bytes(plan, actor), comm.plane, link)
    elif hardware.measured and actor.body is not None:
        known = hardware.measured.get(work_digest(plan, actor))
        if known is not None:
            return total + known / hardware.speed(actor.rank)
    traffic = actor.fused_traffic if plan.mode.inductor else actor.traffic
    work = max(
        actor.flops / flops_per_s(plan, actor, hardware) + traffic / hardware.memory_bytes_per_s,
        touched_bytes(plan, actor) / hardware.memory_bytes_per_s,
    )
    return total + work / hardware.speed(actor.rank)


def seconds_beside(plan: Plan, hardware: Hardware) -> dict[int, float]:
    """Send → seconds by which it takes longer as its rank sends other parts of what one firing has made meanwhile.

    They share what a rank can send over links of one kind.  Only sends that wait for others are given.
    """
    together: dict[tuple[int, int, Link], list[tuple[int, float]]] = {}
    for actor in plan.actors:
        made = next((plan.register(o.register).producer for o in actor.operands if isinstance(o, FromRegister)), None)
        if isinstance(actor.comm, Send) and made is not None:
            key = actor.rank, made, hardware.link(actor.comm.ranks)
            together.setdefault(key, []).append((actor.id, moved_bytes(plan, actor)))
    found: dict[int, float] = {}
    for (_, _, link), sends in together.items():
        total = sum(nbytes for _, nbytes in sends)
        found.update({send: (total - nbytes) / link.bytes_per_s for send, nbytes in sends if total > nbytes})
    return found


def latency(actor: Actor, hardware: Hardware) -> float:
    """Seconds from the end of a send until its token arrives; its queue can send the next one meanwhile."""
    if not isinstance(actor.comm, Send):
        return 0.0
    return hardware.link(actor.comm.ranks).latency_s


def flops_per_s(plan: Plan, actor: Actor, hardware: Hardware) -> float:
    """FLOP/s for an actor (``Hardware.flops_on``), by the dtype of its arithmetic.

    Where that is not known, by the floating-point dtypes of its registers' bytes.
    """
    if not hardware.flops_by_dtype or not actor.flops:
        return hardware.flops_per_s
    if actor.flops_dtype:
        return hardware.flops_on({actor.flops_dtype: 1})
    nbytes: Counter[str] = Counter()
    for place in (*actor.operands, *actor.targets):
        if isinstance(place, FromRegister):
            spec = _spec(plan, place)
            if spec.dtype in FLOATS:
                nbytes[spec.dtype] += spec.nbytes
    return hardware.flops_on(nbytes)


def touched_bytes(plan: Plan, actor: Actor) -> float:
    """The fewest bytes that one firing of a computing actor reads and writes; optimizers write variables, too."""
    if actor.body is None:
        return 0.0
    total = 0.0
    for place in actor.operands:
        total += _variable_bytes(plan, actor, place) * (2 if actor.kind == ActorKind.OPTIMIZER else 1)
        total += _firing_bytes(plan, place, writes=False)
    for target in actor.targets:
        total += _variable_bytes(plan, actor, target) + _firing_bytes(plan, target, writes=True)
    return total


def moved_bytes(plan: Plan, actor: Actor) -> float:
    """Bytes that one firing of a communication sends, or receives if that is more; 0 for other actors.

    An all-reduce over n ranks moves 2 (n-1)/n times its bytes (as a ring).  Other collectives move the boxes of their
    exchanges.  A send moves the bytes of the register that it fills.
    """
    comm = actor.comm
    if comm is None:
        return 0.0
    written = [_firing_bytes(plan, t, writes=True) for t in actor.targets]
    if isinstance(comm, Send):
        return sum(written)
    n = len(comm.ranks)
    if not comm.exchanges:
        read = sum(_firing_bytes(plan, o, writes=False) for o in actor.operands)
        return max(read, sum(written)) * (n - 1) / n * (2 if comm.kind == CollectiveKind.ALL_REDUCE else 1)
    return max(_exchanged_bytes(plan, actor, comm))


def moved_by_all(folded: FoldedPlan) -> int:
    """The bytes that all ranks together send in an iteration, from those of one rank of each class.

    What an all-reduce sends counts once for each group, as in ``Plan.summary``.
    """
    return round(sum(sent_by_all(folded).values()))


def sent_by_all(folded: FoldedPlan) -> dict[int, float]:
    """Actor that communicates → the bytes that it and those like it on the ranks of its class send in an iteration."""
    plan, found = folded.plan, {}
    for number, nbytes in sent_bytes(plan).items():
        actor = plan.actor(number)
        alike = folded.rank_classes[actor.rank]
        times = float(len(alike))
        if isinstance(actor.comm, Collective) and actor.comm.kind == CollectiveKind.ALL_REDUCE:
            times /= len(set(actor.comm.ranks).intersection(alike))
        found[number] = nbytes * times
    return found


def register_bytes(plan: Plan) -> dict[int, int]:
    """Rank → bytes of all slots of all registers that it holds, an upper bound for any run of the plan."""
    total = dict.fromkeys(sorted({a.rank for a in plan.actors}), 0)
    for register in plan.registers:
        total[plan.home(register)] += register.nbytes * register.slots
    return total


def variable_bytes(plan: Plan, ranks: Iterable[int] | None = None) -> dict[int, int]:
    """Rank → bytes of its parts of all variables, for these ranks, or those whose actors the plan lists."""
    total = dict.fromkeys(sorted({a.rank for a in plan.actors}) if ranks is None else ranks, 0)
    alike: dict[object, list[Variable]] = {}
    for variable in plan.variables:
        alike.setdefault((variable.shape, variable.sbp, variable.placement), []).append(variable)
    for variables in alike.values():
        items = sum(ITEM_BYTES[variable.dtype] for variable in variables)
        for rank in variables[0].placement.ranks:
            if rank in total:
                total[rank] += numel(variable_shape(variables[0], rank)) * items
    return total


def max_workspace_bytes(plan: Plan) -> dict[int, int]:
    """Rank → the largest workspace of its actors: the bytes, beside registers and variables, to fire one."""
    most = dict.fromkeys(sorted({a.rank for a in plan.actors}), 0)
    for actor in plan.actors:
        most[actor.rank] = max(most[actor.rank], actor.workspace)
    return most


def shared_bytes(plan: Plan) -> dict[int, int]:
    """Rank → bytes of the memory in which it leaves what others of its machine read in collectives."""
    longest: dict[tuple[int, tuple[int, ...]], int] = {}
    for actor in plan.actors:
        comm = actor.comm
        if isinstance(comm, Collective) and comm.plane == Plane.SHARED:
            key = actor.rank, comm.ranks
            longest[key] = max(longest.get(key, 0), round(_put_bytes(plan, actor, comm)))
    found = dict.fromkeys(sorted({a.rank for a in plan.actors}), 0)
    for (rank, _), nbytes in longest.items():
        count, slot = slots_of(nbytes)
        found[rank] += count * slot
    return found


def _put_bytes(plan: Plan, actor: Actor, comm: Collective) -> float:
    """Bytes that a rank leaves for others in a collective in shared memory."""
    if comm.exchanges:
        return _exchanged_bytes(plan, actor, comm)[0]
    read = sum(_firing_bytes(plan, o, writes=False) for o in actor.operands)
    n = len(comm.ranks)
    return read * (n - 1) / n if comm.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL) else read


def _exchanged_bytes(plan: Plan, actor: Actor, comm: Collective) -> tuple[float, float]:
    """Bytes that a rank sends to others, and receives from them, in the exchanges of a collective."""
    me = comm.ranks.index(actor.rank)
    sent = received = 0.0
    for exchange, operand, target in zip(comm.exchanges, actor.operands, actor.targets, strict=True):
        item = _item_bytes(plan, target) or _item_bytes(plan, operand)
        out, into = plan.moved_by(exchange)
        sent += item * (out - elements(exchange.send[me]))
        received += item * (into - elements(exchange.receive[me]))
    return sent, received


def _variable_bytes(plan: Plan, actor: Actor, place: Operand | Target) -> float:
    if not isinstance(place, OfVariable):
        return 0.0
    variable = plan.variable(place.name)
    if variable is None:  # a constant
        return 0.0
    return numel(variable_shape(variable, actor.rank)) * ITEM_BYTES[variable.dtype]


def _spec(plan: Plan, place: FromRegister) -> TensorSpec:
    return plan.register(place.register).tensors[place.index]


def _firing_bytes(plan: Plan, place: Operand | Target, writes: bool) -> float:
    """Bytes of a register that one firing reads or writes.

    If a token is concatenated from the outputs of several firings, each firing writes an equal part.
    """
    if not isinstance(place, FromRegister):
        return 0.0
    spec = _spec(plan, place)
    return spec.nbytes / (plan.register(place.register).fill if writes and spec.combine.kind is CombineKind.CAT else 1)


def _item_bytes(plan: Plan, place: Operand | Target) -> float:
    """Bytes of one element; 0 if the place is not a register."""
    if not isinstance(place, FromRegister):
        return 0.0
    spec = _spec(plan, place)
    return spec.nbytes / max(1, numel(spec.shape))
