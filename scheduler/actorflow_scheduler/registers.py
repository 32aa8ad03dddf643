"""A plan enters; the same plan with a slot count for every register leaves.

Counts start from a rule and shrink while the simulated period stays within ``TOLERANCE`` of what
more slots would give.  They never go below ``least``, with which the plan is live.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from actorflow_compiler.plan import Plan, Register, tokens_per_iteration, verify
from actorflow_scheduler.cluster import Cluster, Occupancy
from actorflow_scheduler.cost import Hardware, register_bytes
from actorflow_scheduler.events import Fire, Instruction, Offer, Release
from actorflow_scheduler.order import backward_first, freeze
from actorflow_scheduler.timeline import simulate

TOLERANCE = 0.01  # of the period
SEARCHED = 5_000  # firings of an iteration; a plan with more takes the rule's counts unsearched
# One piece after the other, each as far as it gets, holds the fewest tokens.
DEEPEST_FIRST = {
    "optimizer": 0,
    "sink": 0,
    "boxing": 1,
    "send": 1,
    "weight": 2,
    "backward": 3,
    "forward": 4,
    "source": 5,
}

Slots = dict[int, int]  # register → slots


def size(plan: Plan, hardware: Hardware, memory: Mapping[int, int] | None = None) -> Plan:
    """Choose the slots of every register without initial tokens; the others keep theirs, which carry meaning.

    ``memory`` caps the bytes of all registers of a rank: where the fastest counts do not fit, slots
    are given up, down to ``least``.  Raises DeadlockError if no counts let an iteration finish.
    """
    verify(plan)
    memory = memory or {}
    floor = least(plan)
    rule = Rule(plan, floor)
    choice = _search(plan, rule, hardware)
    sized = with_slots(plan, rule.slots(choice))
    for frugal in choice.frugal() if memory else ():
        if fits(sized, memory):
            break
        sized = with_slots(plan, rule.slots(frugal))
    return _trim(sized, floor, memory)


def with_slots(plan: Plan, slots: Slots) -> Plan:
    """The plan with these slot counts and without orders, which belonged to other counts."""
    return replace(plan, registers=tuple(replace(r, slots=slots[r.id]) for r in plan.registers), orders=())


def least(plan: Plan) -> Slots:
    """Slot counts with which the plan is live: those that a run of one actor at a time takes.

    More slots never make a plan less live (a register has one producer, so a free slot is nobody
    else's), hence any counts that are no less are live too.  Raises DeadlockError.
    """
    unlimited = {r.id: r.slots if r.initial else tokens_per_iteration(plan, r) for r in plan.registers}
    cluster = Cluster(with_slots(plan, unlimited), free=True)
    occupancy = Occupancy(plan)
    actors = {a.id: a for a in plan.actors}
    together = cluster.together
    fired = dict.fromkeys(actors, 0)
    offered = dict.fromkeys(actors, 0)
    ready: list[tuple[int, int, int]] = []
    todo: list[Instruction] = cluster.issue()
    while todo or ready:
        for instruction in todo:
            if isinstance(instruction, Release):
                occupancy.release(instruction.register)
            elif isinstance(instruction, Offer):
                id = instruction.actor
                offered[id] += 1
                if all(offered[m] > fired[id] for m in together.get(id, (id,))):
                    heappush(ready, (DEEPEST_FIRST[actors[id].kind], fired[id], id))
        todo = []
        if ready:
            id = heappop(ready)[2]
            for m in together.get(id, (id,)):
                fired[m] += 1
                for instruction in cluster.choose(m):
                    if isinstance(instruction, Fire):
                        occupancy.fire(instruction)
                        todo += [i for f in cluster.meet(instruction) for i in cluster.finish(f)]
                    else:
                        todo.append(instruction)
    if not cluster.idle():
        raise cluster.deadlock()
    return {r.id: r.slots if r.initial else max(1, occupancy.peak_slots[r.id]) for r in plan.registers}


@dataclass(frozen=True, slots=True)
class Choice:
    """What the search may vary; more of anything is faster or as fast, and takes more memory."""

    extra: int  # pieces that a stage may run ahead of 1F1B without communication
    ahead: int  # pieces between two neighbouring stages' actors, on one rank
    weights: bool  # may weight gradients lag behind, to fill gaps, as in the zero-bubble schedules?

    def frugal(self) -> Iterator[Choice]:
        """Choices that take less and less memory."""
        for extra in reversed(range(self.extra)):
            yield replace(self, extra=extra)
        yield replace(self, extra=0, weights=False)
        yield replace(self, extra=0, weights=False, ahead=1)


class Rule:
    """Slot counts by a register's place in the pipeline of S stages (Actor.stage), at least ``floor``.

    With k the producer's stage, q the readers', tokens in an iteration as a cap:

    - what forward saves for backward: S-k, and up to 2S-k-q-1 as ``Choice.extra`` says (for k = q
      the 2(S-k)-1 of 1F1B with communication, found by simulation); one more where pieces have
      collectives in their midst, so that one piece computes while another communicates;
    - what is saved for weight gradients: as for backward, or S … 2S-1 if they may lag behind;
    - what a send fills: 2 for each stage that it crosses, one to fill while one is read;
    - what a source fills: one more than the above, at least 2: the next batch is fetched early;
    - all else: ``Choice.ahead`` for each stage that it crosses; 1 where there is one token.
    """

    def __init__(self, plan: Plan, floor: Slots) -> None:
        self.plan = plan
        self.floor = floor
        self.stages = 1 + max((a.stage for a in plan.actors), default=0)
        self.hides = int(
            any(a.rate > 1 and a.comm is not None and a.comm.kind != "send" for a in plan.actors)
        )  # pieces that computing can hide collectives behind
        self._after_backward: dict[int, bool] = {}

    def slots(self, choice: Choice) -> Slots:
        """The counts of all registers."""
        return {r.id: max(self.floor[r.id], self._count(r, choice)) for r in self.plan.registers}

    def _count(self, register: Register, choice: Choice) -> int:
        if register.initial:
            return register.slots
        producer = self.plan.actor(register.producer)
        tokens = tokens_per_iteration(self.plan, register)
        readers = [self.plan.actor(read.actor) for read in register.readers]
        crossed = max((abs(r.stage - producer.stage) for r in readers), default=0) or 1
        sent = producer.comm is not None and producer.comm.kind == "send"
        count = (2 if sent else choice.ahead) * crossed
        kinds = {r.kind for r in readers}
        if choice.weights and "weight" in kinds:
            count = max(count, self.stages + min(choice.extra, self.stages - 1))
        elif kinds & {"backward", "weight"} and not self._is_after_backward(producer.id):
            q = min(r.stage for r in readers if r.kind in ("backward", "weight"))
            few = self.stages - min(producer.stage, q)
            many = 2 * self.stages - producer.stage - q - 1 + self.hides
            count = max(count if sent else 1, min(few + choice.extra, max(few, many)))
        if producer.kind == "source":
            return max(2, count + 1 if tokens > 1 and kinds & {"backward", "weight"} else 2)
        return max(1, min(tokens, count))

    def _is_after_backward(self, actor: int) -> bool:
        """Whether the actor computes, or carries, what backward made in this iteration."""
        if actor not in self._after_backward:
            kind = self.plan.actor(actor).kind
            self._after_backward[actor] = kind in ("backward", "weight")
            if kind in ("boxing", "send"):
                self._after_backward[actor] = any(
                    self._is_after_backward(r.producer) for r in self.plan.inputs_of[actor] if not r.initial
                )
        return self._after_backward[actor]


def _search(plan: Plan, rule: Rule, hardware: Hardware) -> Choice:
    """The least choice whose period is within the tolerance of the greatest one's."""
    stages, pieces = rule.stages, max((a.rate for a in plan.actors), default=1)
    lavish = Choice(extra=stages - 1 + rule.hides, ahead=pieces, weights=True)
    frugal = replace(lavish, ahead=min(2, pieces))
    if pieces == 1 or sum(a.rate for a in plan.actors) > SEARCHED:
        return frugal
    periods: dict[tuple[int, ...], float] = {}

    def period(choice: Choice) -> float:
        slots = rule.slots(choice)
        key = tuple(slots.values())
        if key not in periods:
            sized = with_slots(plan, slots)
            ordered = freeze(sized, simulate(sized, 1, hardware, backward_first))
            periods[key] = simulate(ordered, 3, hardware).period
        return periods[key]

    enough = period(lavish) * (1 + TOLERANCE)

    def fewest(choices: list[Choice]) -> Choice:
        """The first of these, sorted by slots, that is fast enough; the last one is taken as given."""
        low, high = 0, len(choices) - 1
        while low < high:
            middle = (low + high) // 2
            if period(choices[middle]) <= enough:
                high = middle
            else:
                low = middle + 1
        return choices[high]

    doubling = [replace(lavish, ahead=n) for n in (1, *(2**i for i in range(1, pieces.bit_length())), pieces)]
    best = fewest(doubling)
    best = fewest([replace(best, weights=False), best])
    return fewest([replace(best, extra=n) for n in range(best.extra)] + [best])


def fits(plan: Plan, memory: Mapping[int, int]) -> bool:
    """Whether the registers of every rank stay within its cap."""
    total = register_bytes(plan)
    return all(total.get(rank, 0) <= cap for rank, cap in memory.items())


def _trim(plan: Plan, floor: Slots, memory: Mapping[int, int]) -> Plan:
    """Take slots from the registers of ranks that exceed their cap, the most bytes first, as far as that goes."""
    slots = {r.id: r.slots for r in plan.registers}
    total = register_bytes(plan)
    for rank, cap in memory.items():
        mine = [r for r in plan.registers if plan.home(r) == rank and r.nbytes]
        while total.get(rank, 0) > cap:
            spare = [r for r in mine if slots[r.id] > floor[r.id]]
            if not spare:
                break  # the proof says so
            largest = max(spare, key=lambda r: (r.nbytes * slots[r.id], -r.id))
            slots[largest.id] -= 1
            total[rank] -= largest.nbytes
    return with_slots(plan, slots)
