"""An actor and the hardware enter; the seconds that one firing takes leave."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow_compiler.plan import Actor, Box, FromRegister, Plan, Register
from actorflow_compiler.sbp import numel


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one rank can do; the defaults are one CPU core and a network on the same host."""

    flops_per_s: float = 5e10
    bytes_per_s: float = 4e9  # each way between a rank and the network
    latency_s: float = 1e-4  # of one message
    fire_overhead_s: float = 1e-5  # of every firing


CPU_CORE = Hardware()


def seconds(plan: Plan, actor: Actor, hardware: Hardware) -> float:
    """Seconds of one firing: the arithmetic, or the bytes through the rank's network port, and the overhead.

    A collective over n ranks moves 2 (n-1)/n of its bytes in an all-reduce (ring), otherwise what
    its exchanges say; a send moves the bytes of the register that it fills.
    """
    total = hardware.fire_overhead_s + actor.flops / hardware.flops_per_s
    if actor.comm is not None:
        total += hardware.latency_s + moved_bytes(plan, actor) / hardware.bytes_per_s
    return total


def moved_bytes(plan: Plan, actor: Actor) -> float:
    """Bytes that one firing of a communication sends, or receives if that is more; 0 for other actors."""
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


def _elements(boxes: tuple[Box, ...]) -> int:
    return sum(numel(b.size) for b in boxes)


def _firing_bytes(plan: Plan, place: object, writes: bool) -> float:
    """Bytes of an operand or target of one firing: a token made by joining firings is written in parts."""
    if not isinstance(place, FromRegister):
        return 0.0
    register = plan.register(place.register)
    spec = register.tensors[place.index]
    return spec.nbytes / (register.fill if writes and spec.combine.startswith("cat") else 1)


def _item_bytes(plan: Plan, place: object) -> float:
    """Bytes of one element; 0 if the place is not a register."""
    if not isinstance(place, FromRegister):
        return 0.0
    register: Register = plan.register(place.register)
    spec = register.tensors[place.index]
    return spec.nbytes / max(1, numel(spec.shape))
