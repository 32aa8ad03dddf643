"""Simulate a scheduled plan on given hardware: when every firing starts and ends, and how much memory is live.

Times are whole nanoseconds, so that equal times compare equal and every simulation of a plan gives the same result.
A collective starts when all its members have fired, and takes as long as its slowest member.  A send's tokens arrive
one latency after its end, and the credits for them take as long to come back.  ``firing_times.py`` computes the times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan, Register, Send
from actorflow_scheduler.cost import Durations, latency, seconds, seconds_beside
from actorflow_scheduler.firing_times import FiringTimes, Nanoseconds
from actorflow_scheduler.notation import COMPUTING, Notation
from actorflow_scheduler.simulated_cluster import SimulatedCluster

DIGITS = 4  # of a duration that are known at best


class Span(NamedTuple):
    """One firing."""

    actor: int
    rank: int
    queue: str
    firing: int  # number of the firing since the start
    start: float  # seconds
    end: float  # seconds


@dataclass(frozen=True)
class Timeline:
    """A simulated run of a plan on given hardware: the times of all firings, in nanoseconds."""

    plan: Plan
    iterations: int
    fired: Mapping[int, Sequence[int]]  # actor → when each firing takes its slots
    ends: Mapping[int, Sequence[int]]  # actor → when each firing ends
    durations: Mapping[int, int]  # actor → how long a firing runs, after all members of its collective have fired

    @property
    def seconds(self) -> float:
        """Seconds from the first call to the end of the last iteration."""
        return max(self.iteration_ends, default=0) / 1e9

    @cached_property
    def iteration_ends(self) -> tuple[int, ...]:
        """When the last firing of each iteration ends, in nanoseconds."""
        done = [(a.rate, self.ends[a.id]) for a in self.plan.actors]
        return tuple(max((ends[(i + 1) * rate - 1] for rate, ends in done), default=0) for i in range(self.iterations))

    @property
    def period(self) -> float:
        """Mean seconds from the end of one iteration to the end of the next, over the later half of the iterations."""
        if not self.iterations:
            return 0.0
        ends, half = self.iteration_ends, self.iterations // 2
        first = ends[half - 1] if half else 0
        return (ends[-1] - first) / (self.iterations - half) / 1e9

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All firings, sorted by start, then by rank and queue."""
        found = []
        for a in self.plan.actors:
            duration, queue = self.durations[a.id], (a.rank, a.queue)
            found += [
                ((end - duration, queue), Span(a.id, *queue, n, (end - duration) / 1e9, end / 1e9))
                for n, end in enumerate(self.ends[a.id])
            ]
        return tuple(span for _, span in sorted(found))

    @cached_property
    def busy(self) -> dict[tuple[int, str], float]:
        """(Rank, queue) → fraction of the run in which it ran an actor."""
        worked: dict[tuple[int, str], int] = {}
        for a in self.plan.actors:
            queue = (a.rank, a.queue)
            worked[queue] = worked.get(queue, 0) + self.durations[a.id] * len(self.ends[a.id])
        total = max(self.iteration_ends, default=0) or 1
        return {queue: time / total for queue, time in sorted(worked.items())}

    @cached_property
    def live_bytes(self) -> dict[int, tuple[Nanoseconds, Nanoseconds]]:
        """Rank → (instants in nanoseconds, from 0 on; bytes of live register slots from each instant on).

        Several changes at one instant are listed one by one, freed slots first.
        """
        plan = self.plan
        changes: dict[int, tuple[list[Nanoseconds], list[Nanoseconds]]] = {a.rank: ([], []) for a in plan.actors}
        begin = dict.fromkeys(changes, 0)
        for r in plan.registers:
            if r.nbytes:
                home = plan.home(r)
                begin[home] += r.nbytes * r.initial
                for times, change in zip(self._tokens(r), (r.nbytes, -r.nbytes), strict=True):
                    changes[home][0].append(times)
                    changes[home][1].append(np.full(len(times), change))
        found = {}
        for rank, (whens, whats) in sorted(changes.items()):
            when, what = np.concatenate([np.zeros(0, np.int64), *whens]), np.concatenate([np.zeros(0, int), *whats])
            order = np.lexsort((what, when))
            found[rank] = np.append(0, when[order]), begin[rank] + np.append(0, np.cumsum(what[order]))
        return found

    @cached_property
    def peak_bytes(self) -> dict[int, int]:
        """Rank → peak bytes of live register slots; at each instant, slots are freed before others are taken."""
        return {rank: int(live.max()) for rank, (_, live) in self.live_bytes.items()}

    @cached_property
    def peak_slots(self) -> dict[int, int]:
        """Register → the most slots that are taken at the same time."""
        found = {}
        for r in self.plan.registers:
            begun, freed = self._tokens(r)
            taken = np.arange(1, len(begun) + 1) - np.searchsorted(freed, begun, side="right")
            found[r.id] = r.initial + max(0, int(taken.max(initial=0)))
        return found

    def _tokens(self, register: Register) -> tuple[Nanoseconds, Nanoseconds]:
        """When each token of a register, except the initial ones, takes its slot, and when each slot is freed."""
        producer = register.producer
        begun = np.array(self.fired[producer][:: register.fill], np.int64)
        if not register.readers:
            return begun, np.array(self.ends[producer][register.fill - 1 :: register.fill], np.int64)
        freed = [self.ends[read.actor][read.firings - 1 :: read.firings] for read in register.readers]
        return begun, np.array(freed, np.int64).max(axis=0)

    def __str__(self) -> str:
        """The firings of each rank's compute queue in order, one line ``rank 0: 0F0 0F1 0B0`` for each rank."""
        notation = Notation(self.plan)
        lines: dict[int, list[tuple[int, str]]] = {}
        for a in self.plan.actors:
            if a.queue == COMPUTING:
                ends = enumerate(self.ends[a.id])
                lines.setdefault(a.rank, []).extend((end, notation.word(a, n)) for n, end in ends)
        return "\n".join(f"rank {rank}: {' '.join(word for _, word in sorted(lines[rank]))}" for rank in sorted(lines))


def simulate(plan: Plan, iterations: int, hardware: Hardware) -> Timeline:
    """Simulate all ranks of a plan for some iterations, all of which are called at time 0.

    Raises DeadlockError, with the cycle, if the plan gets stuck, and PlanError if a queue has no order.
    """
    times = nanoseconds(plan, hardware)
    firings = FiringTimes(plan, times)
    if not firings.run(iterations):
        raise stuck(plan, iterations)
    return Timeline(plan, iterations, firings.fired, firings.ends, firings.durations)


def nanoseconds(plan: Plan, hardware: Hardware) -> Durations:
    """The duration of each actor's firing, at least a nanosecond, and the latency of each send.

    Durations are rounded to ``DIGITS`` digits.  They are not known more exactly, and ranks that differ in as little as
    which of them adds a bias stay of one class.
    """
    beside = seconds_beside(plan, hardware)
    return Durations(
        {a.id: _rounded((seconds(plan, a, hardware) + beside.get(a.id, 0.0)) * 1e9) for a in plan.actors},
        {a.id: round(latency(a, hardware) * 1e9) for a in plan.actors if isinstance(a.comm, Send)},
    )


def _rounded(duration: float) -> int:
    whole = max(1, round(duration))
    return round(whole, min(0, DIGITS - len(str(whole))))


def stuck(plan: Plan, iterations: int) -> DeadlockError:
    """The error for a plan that gets stuck; runs its actor machines to find the actors that wait for each other."""
    cluster = SimulatedCluster(plan)
    cluster.run(iterations)
    return cluster.deadlock()
