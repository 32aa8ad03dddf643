"""A plan and the hardware enter; what every queue does when leaves: the actor machines on a virtual clock.

The clock counts whole nanoseconds, so equal times are equal and every run of it is the same.  A
collective starts when all its members were fired and lasts as long as its slowest; a send's tokens
arrive when it is done; messages and credits take no time of their own.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from actorflow_compiler.plan import Actor, Plan
from actorflow_scheduler.cluster import Cluster, Occupancy
from actorflow_scheduler.cost import Hardware, seconds
from actorflow_scheduler.events import Fire, Instruction, Offer, Release

LETTERS = {
    "source": "L",
    "forward": "F",
    "backward": "B",
    "weight": "W",
    "optimizer": "O",
    "boxing": "C",
    "send": "S",
    "sink": "R",
}

Policy = Callable[[Actor, int], Any]  # actor, firing → sort key: of the ready actors of a queue the least fires


class Span(NamedTuple):
    """One firing."""

    actor: int
    rank: int
    queue: str
    firing: int  # since the start
    start: float  # seconds
    end: float  # seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a plan does on given hardware."""

    plan: Plan
    spans: tuple[Span, ...]  # by start; a collective's members by queue, then as they were started
    period: float  # seconds from one iteration's end to the next one's, in the steady state
    busy: dict[tuple[int, str], float]  # (rank, queue) → fraction of the run in which it ran an actor
    peak_bytes: dict[int, int]  # rank → most bytes of registers that were live at a time
    peak_slots: dict[int, int]  # register → most slots that were taken at a time

    @property
    def seconds(self) -> float:
        """From the first call to the end of the last iteration."""
        return max((s.end for s in self.spans), default=0.0)

    def __str__(self) -> str:
        """The compute queues in the order they ran: a line ``rank 0: 0F0 0F1 0B0`` for each rank."""
        lines: dict[int, list[str]] = {}
        for span in self.spans:
            if span.queue == "compute":
                lines.setdefault(span.rank, []).append(short(self.plan.actor(span.actor), span.firing))
        return "\n".join(f"rank {rank}: {' '.join(lines[rank])}" for rank in sorted(lines))


def short(actor: Actor, firing: int) -> str:
    """One firing in the field's notation, stage, letter of the kind, piece: 2F0."""
    return f"{actor.stage}{LETTERS[actor.kind]}{firing % actor.rate}"


def simulate(plan: Plan, iterations: int, hardware: Hardware, policy: Policy | None = None) -> Timeline:
    """Run all ranks of a whole plan for some iterations that are all called at time 0.

    With a policy the frozen orders are ignored: of the ready actors of a queue the least by the
    policy fires, the one that was ready first where it does not tell them apart; the members of a
    collective start together when all are ready and their queues idle.  Raises DeadlockError, with
    the cycle, if the plan gets stuck.
    """
    return _Run(plan, hardware, policy).run(iterations)


class _Run:
    def __init__(self, plan: Plan, hardware: Hardware, policy: Policy | None) -> None:
        self.plan = plan
        self.cluster = Cluster(plan, free=policy is not None)
        self.policy = policy
        self.now = 0  # nanoseconds
        self.events: list[tuple[int, int, Fire]] = []  # end of a firing
        self.count = 0
        self.started: list[tuple[int, int, Fire]] = []  # start, end
        self.time = {a.id: max(1, round(seconds(plan, a, hardware) * 1e9)) for a in plan.actors}
        self.occupancy = Occupancy(plan)
        self.actors = {a.id: a for a in plan.actors}
        self.queue = {a.id: (a.rank, a.queue) for a in plan.actors}
        self.together = self.cluster.together
        # the rest only under a policy
        self.fired = dict.fromkeys(self.queue, 0)
        self.idle = set(self.queue.values())
        self.offers: dict[tuple[int, str], list[tuple[Any, int, int]]] = {q: [] for q in self.idle}
        self.waiting: dict[int, int] = {}  # first member → members of a collective that are ready
        self.touched: dict[tuple[int, str], None] = {}

    def run(self, iterations: int) -> Timeline:
        for _ in range(iterations):
            self.carry_out(self.cluster.issue())
        events, cluster = self.events, self.cluster
        free = self.policy is not None
        if free:
            self.choose()
        while events:
            self.now, _, fire = heappop(events)
            if free:
                queue = self.queue[fire.actor]
                self.idle.add(queue)
                self.touched[queue] = None
            self.carry_out(cluster.finish(fire))
            if free and (not events or events[0][0] != self.now):
                self.choose()
        if not cluster.idle():
            raise cluster.deadlock()
        return self.result(iterations)

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Fire):
                self.start(instruction)
            elif isinstance(instruction, Release):
                self.occupancy.release(instruction.register)
            elif isinstance(instruction, Offer):
                self.offer(instruction.actor)

    def start(self, fire: Fire) -> None:
        self.occupancy.fire(fire)
        if fire.actor in self.together:
            ready = self.cluster.meet(fire)
            time = max((self.time[f.actor] for f in ready), default=0)
        else:
            ready, time = [fire], self.time[fire.actor]
        for f in ready:
            self.count += 1
            self.started.append((self.now, self.now + time, f))
            heappush(self.events, (self.now + time, self.count, f))

    def offer(self, actor: int) -> None:
        """Put a ready actor into its queue's list; a collective when all its members are ready."""
        members = self.together.get(actor, (actor,))
        ready = self.waiting.get(members[0], 0) + 1
        self.waiting[members[0]] = ready % len(members)
        if ready < len(members):
            return
        for m in members:
            assert self.policy is not None
            self.count += 1
            queue = self.queue[m]
            insort(self.offers[queue], (self.policy(self.actors[m], self.fired[m]), self.count, m))
            self.touched[queue] = None

    def choose(self) -> None:
        """Start what the policy likes best on every idle queue that something happened to."""
        while self.touched:
            queue = next(iter(self.touched))
            del self.touched[queue]
            if queue not in self.idle:
                continue
            for _, _, actor in self.offers[queue]:
                members = self.together.get(actor, (actor,))
                if all(self.queue[m] in self.idle for m in members):
                    for m in members:
                        self.take(m)
                    for m in members:
                        self.carry_out(self.cluster.choose(m))
                    break

    def take(self, actor: int) -> None:
        queue = self.queue[actor]
        offers = self.offers[queue]
        del offers[next(i for i, offer in enumerate(offers) if offer[2] == actor)]
        self.idle.remove(queue)
        self.fired[actor] += 1

    def result(self, iterations: int) -> Timeline:
        ends = [0] * iterations
        busy = dict.fromkeys(sorted(set(self.queue.values())), 0)
        spans = []
        for start, end, fire in self.started:
            queue = self.queue[fire.actor]
            busy[queue] += end - start
            spans.append(Span(fire.actor, *queue, fire.firing, start / 1e9, end / 1e9))
            iteration = fire.firing // self.actors[fire.actor].rate
            ends[iteration] = max(ends[iteration], end)
        half = iterations // 2
        first = ends[half - 1] if half else 0
        total = max(ends, default=0) or 1
        return Timeline(
            plan=self.plan,
            spans=tuple(spans),
            period=(ends[-1] - first) / (iterations - half) / 1e9 if iterations else 0.0,
            busy={queue: time / total for queue, time in busy.items()},
            peak_bytes=self.occupancy.peak_bytes,
            peak_slots=self.occupancy.peak_slots,
        )
