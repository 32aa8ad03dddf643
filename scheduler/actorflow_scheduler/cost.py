"""An actor and the hardware enter; the seconds that one firing takes leave, and those that its token is under way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.ops import FLOATS, ITEM_BYTES
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.plan import Actor, Box, FromRegister, OfVariable, Operand, Plan, Target, TensorSpec
from actorflow_compiler.plan.summary import variable_shape
from actorflow_scheduler.work_digest import work_digest

AT_ONCE = 65536  # bytes: up to here the members of an all-reduce by Gloo send all to all; above, they form a ring


@dataclass(frozen=True, slots=True)
class Durations:
    """What the firings of a plan take on some hardware, in nanoseconds."""

    firing: Mapping[int, int]  # actor → of one firing, in which its queue does nothing else
    way: Mapping[int, int]  # send → from its end until the token is there; a credit takes as long to come back


def seconds(plan: Plan, actor: Actor, hardware: Hardware) -> float:
    """Seconds in which one firing holds its queue: what was measured for its work, else an estimate, and the overhead.

    Computing takes its arithmetic or the reading and writing of its operands and targets, whichever
    is longer.  Communication takes its bytes through the port of one rank, and the messages that it
    waits for.
    """
    total = hardware.fire_overhead_s
    if actor.comm is not None:
        link = hardware.link(actor.comm.group)
        total += waits(plan, actor) * link.latency_s + moved_bytes(plan, actor) / link.bytes_per_s
    elif hardware.measured and actor.body is not None:
        known = hardware.measured.get(work_digest(plan, actor))
        if known is not None:
            return total + known
    return total + max(
        actor.flops / flops_per_s(plan, actor, hardware), touched_bytes(plan, actor) / hardware.memory_bytes_per_s
    )


def way(actor: Actor, hardware: Hardware) -> float:
    """Seconds from the end of a send until its token is there; in them the next one can leave."""
    if actor.comm is None or actor.comm.kind != "send":
        return 0.0
    return hardware.link(actor.comm.group).latency_s


def waits(plan: Plan, actor: Actor) -> int:
    """How many messages must come, one after the other, before a communication lets go of its queue.

    By Gloo nothing leaves before the other rank has asked for it: a send is announced and answered, all
    exchanges of a collective are asked for and come, and a ring does that 2 (n-1) times.  Otherwise
    a send's token leaves at once, and a collective is a tree.
    """
    comm = actor.comm
    assert comm is not None
    n = len(comm.group)
    if comm.plane != "gloo":
        return 0 if comm.kind == "send" else max(1, math.ceil(math.log2(n)))
    if comm.kind == "send":
        return 2 if actor.operands else 0
    if comm.kind != "all_reduce" or comm.exchanges:
        return 2
    read = sum(_firing_bytes(plan, o, writes=False) for o in actor.operands)
    return 2 if (n - 1) * read <= AT_ONCE else 2 * 2 * (n - 1)


def flops_per_s(plan: Plan, actor: Actor, hardware: Hardware) -> float:
    """FLOP/s of the dtype that most bytes of an actor's registers have."""
    if not hardware.flops_by_dtype or not actor.flops:
        return hardware.flops_per_s
    nbytes: Counter[str] = Counter()
    for place in (*actor.operands, *actor.targets):
        if isinstance(place, FromRegister):
            spec = _spec(plan, place)
            if spec.dtype in FLOATS:
                nbytes[spec.dtype] += spec.nbytes
    return hardware.flops_on(nbytes)


def touched_bytes(plan: Plan, actor: Actor) -> float:
    """Bytes that one firing of a computing actor reads and writes at least; an optimizer writes its variables, too."""
    if actor.body is None:
        return 0.0
    total = 0.0
    for place in actor.operands:
        total += _variable_bytes(plan, actor, place) * (2 if actor.kind == "optimizer" else 1)
        total += _firing_bytes(plan, place, writes=False)
    for target in actor.targets:
        total += _variable_bytes(plan, actor, target) + _firing_bytes(plan, target, writes=True)
    return total


def moved_bytes(plan: Plan, actor: Actor) -> float:
    """Bytes that one firing of a communication sends, or receives if that is more; 0 for other actors.

    A collective over n ranks moves 2 (n-1)/n of its bytes in an all-reduce (ring), otherwise what
    its exchanges say; a send moves the bytes of the register that it fills.
    """
    comm = actor.comm
    if comm is None:
        return 0.0
    written = [_firing_bytes(plan, t, writes=True) for t in actor.targets]
    if comm.kind == "send":
        return sum(written)
    n = len(comm.group)
    if not comm.exchanges:
        read = sum(_firing_bytes(plan, o, writes=False) for o in actor.operands)
        return max(read, sum(written)) * (n - 1) / n * (2 if comm.kind == "all_reduce" else 1)
    me = comm.group.index(actor.rank)
    sent = received = 0.0
    for exchange, operand, target in zip(comm.exchanges, actor.operands, actor.targets, strict=True):
        item = _item_bytes(plan, target) or _item_bytes(plan, operand)
        sent += item * sum(_elements(b) for m, b in enumerate(exchange.send) if m != me)
        received += item * sum(_elements(b) for m, b in enumerate(exchange.receive) if m != me)
    return max(sent, received)


def register_bytes(plan: Plan) -> dict[int, int]:
    """Rank → bytes of all slots of all registers that it holds: no run of the plan needs more."""
    total = dict.fromkeys(sorted({a.rank for a in plan.actors}), 0)
    for register in plan.registers:
        total[plan.home(register)] += register.nbytes * register.slots
    return total


def variable_bytes(plan: Plan) -> dict[int, int]:
    """Rank → bytes of its parts of all variables, for the ranks that the plan lists actors of."""
    ranks = sorted({a.rank for a in plan.actors})
    total = dict.fromkeys(ranks, 0)
    for variable in plan.variables:
        for rank in ranks:
            if rank in variable.placement:
                total[rank] += numel(variable_shape(variable, rank)) * ITEM_BYTES[variable.dtype]
    return total


def momentary_bytes(plan: Plan) -> dict[int, int]:
    """Rank → the most bytes that an actor of it needs while it fires, beside registers and variables."""
    most = dict.fromkeys(sorted({a.rank for a in plan.actors}), 0)
    for actor in plan.actors:
        most[actor.rank] = max(most[actor.rank], actor.momentary)
    return most


def _elements(boxes: tuple[Box, ...]) -> int:
    return sum(numel(b.size) for b in boxes)


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
    """Bytes of an operand or target of one firing: a token made by joining firings is written in parts."""
    if not isinstance(place, FromRegister):
        return 0.0
    spec = _spec(plan, place)
    return spec.nbytes / (plan.register(place.register).fill if writes and spec.combine.startswith("cat") else 1)


def _item_bytes(plan: Plan, place: Operand | Target) -> float:
    """Bytes of one element; 0 if the place is not a register."""
    if not isinstance(place, FromRegister):
        return 0.0
    spec = _spec(plan, place)
    return spec.nbytes / max(1, numel(spec.shape))
