"""Record what happens on one rank, and when, on any of its threads.

A worker without a recorder spends nothing on it; with one, each firing costs two readings of the clock and one entry
in a list.  Times are nanoseconds of ``time.perf_counter_ns``, which all processes
of a machine share.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter_ns as clock
from typing import NamedTuple

from actorflow_compiler.plan.plan import Actor, Plan, tokens_per_iteration
from actorflow_scheduler.notation import COMPUTING

__all__ = ["Arrival", "Begun", "Credited", "Fired", "Recorder", "clock"]


class Fired(NamedTuple):
    """A firing; what a thread does to gather its operands is part of it, what it does with its outputs is not."""

    plan: int
    actor: int
    firing: int  # since the start
    start: int  # ns
    end: int  # ns


class Arrival(NamedTuple):
    """A token of another rank is there."""

    plan: int
    register: int
    sequence: int
    at: int  # ns


class Credited(NamedTuple):
    """Another rank has freed a slot of a register that this one fills; they come in order."""

    plan: int
    register: int
    at: int  # ns


class Begun(NamedTuple):
    """An iteration may fire."""

    plan: int
    iteration: int
    issued: int  # ns, when the script made the call
    at: int  # ns


class Recorder:
    """Keeps what happens in the first ``iterations`` of each plan, and counts for how long each queue works."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._fired: list[tuple[int, int, int, int, int]] = []  # plain tuples: they are made while others wait
        self.arrivals: list[Arrival] = []
        self.credits: list[Credited] = []
        self.begun: list[Begun] = []
        self.busy: defaultdict[str, int] = defaultdict(int)  # queue → ns; each is counted by the thread that serves it
        self._most: dict[tuple[int, int], int] = {}  # (plan, register) → tokens that are kept
        self._credited: defaultdict[tuple[int, int], int] = defaultdict(int)

    def install(self, number: int, plan: Plan) -> None:
        """Get to know a plan, whole or a rank's part of it, before anything of it happens."""
        for register in plan.registers:
            tokens = self.iterations * tokens_per_iteration(plan, register)
            self._most[number, register.id] = register.initial + tokens

    def firing(self, plan: int, actor: Actor, firing: int, start: int) -> None:
        """An actor is done, on the thread that fired it."""
        end = clock()
        self.busy[actor.queue] += end - start
        if firing < self.iterations * actor.rate:
            self._fired.append((plan, actor.id, firing, start, end))

    def arrived(self, plan: int, register: int, sequence: int) -> None:
        """A token came from another rank."""
        if sequence < self._most[plan, register]:
            self.arrivals.append(Arrival(plan, register, sequence, clock()))

    def credited(self, plan: int, register: int) -> None:
        """A credit came from another rank."""
        key = plan, register
        if self._credited[key] < self._most[key]:
            self._credited[key] += 1
            self.credits.append(Credited(plan, register, clock()))

    def began(self, plan: int, iteration: int, issued: int) -> None:
        """An iteration may fire; the script made its call at ``issued``."""
        if iteration < self.iterations:
            self.begun.append(Begun(plan, iteration, issued, clock()))

    @property
    def fired(self) -> list[Fired]:
        """The firings that are kept, in the order in which they were done."""
        return [Fired(*fields) for fields in self._fired]

    def order(self, number: int, plan: Plan) -> tuple[int, ...]:
        """The actors of a plan's compute queue in the order in which they fired, as far as it is kept."""
        computing = {a.id for a in plan.actors if a.queue == COMPUTING}
        return tuple(f.actor for f in self.fired if f.plan == number and f.actor in computing)
