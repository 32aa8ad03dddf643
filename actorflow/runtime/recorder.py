"""Record the firings, tokens, credits and waits for data of one rank with their times, from all of its threads.

A worker without a recorder spends nothing on it; with one, each firing costs two readings of the clock and one entry
in a list.  Times are nanoseconds of ``time.perf_counter_ns``, whose zero is the same for all processes of a machine.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter_ns as clock
from typing import NamedTuple

from actorflow.standins.logical_batch import RowsRead
from actorflow_compiler.plan.plan import Actor, Plan, tokens_per_iteration
from actorflow_scheduler.notation import COMPUTING

__all__ = ["Arrival", "Begun", "Credited", "Fired", "Recorder", "RowsWait", "ScriptRead", "clock"]


class Fired(NamedTuple):
    """A firing.  Its time includes what the firing thread does to gather operands, but not storing the outputs."""

    plan: int
    actor: int
    firing: int  # number of the firing since the plan was installed
    start: int  # ns
    end: int  # ns


class Arrival(NamedTuple):
    """A token came from another rank."""

    plan: int
    register: int
    sequence: int
    at: int  # ns


class Credited(NamedTuple):
    """A credit: another rank has freed a slot of a register that this rank fills.  Credits come in order."""

    plan: int
    register: int
    at: int  # ns


class Begun(NamedTuple):
    """An iteration began: its actors may fire."""

    plan: int
    iteration: int
    issued: int  # ns, when the script made the call
    at: int  # ns


class RowsWait(NamedTuple):
    """A source could have fired, but the rows that it takes were still being read."""

    plan: int
    actor: int
    firing: int
    start: int  # ns, when it could have fired
    end: int  # ns, when the rows were here
    rows: str  # "rows 32-63 of epoch 0"
    source: str  # "the loader of train.py:31"


class ScriptRead(NamedTuple):
    """The script's thread read rows of a data source, or waited for them."""

    start: int  # ns
    end: int  # ns
    rows: str  # "rows 32-63 of epoch 0"
    source: str  # "the loader of train.py:31"


class Recorder:
    """Keeps the events of the first ``iterations`` iterations of each plan, and counts how long each queue works."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._fired: list[tuple[int, int, int, int, int]] = []  # plain tuples: faster to make on the hot path
        self.arrivals: list[Arrival] = []
        self.credits: list[Credited] = []
        self.begun: list[Begun] = []
        self.waits: list[RowsWait] = []
        self.script_reads: list[ScriptRead] = []
        self.busy: defaultdict[str, int] = defaultdict(int)  # queue → ns; each is counted by the thread that serves it
        self._most: dict[tuple[int, int], int] = {}  # (plan, register) → number of tokens to record
        self._credited: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._open: set[int] = set()  # plans of which iterations are still to be recorded

    def install(self, number: int, plan: Plan) -> None:
        """Add a plan, whole or a rank's part of it, before any of its events."""
        if self.iterations:
            self._open.add(number)
        for register in plan.registers:
            tokens = self.iterations * tokens_per_iteration(plan, register)
            self._most[number, register.id] = register.initial + tokens

    def firing(self, plan: int, actor: Actor, firing: int, start: int) -> None:
        """Record a firing that ends now and began at ``start`` ns.  For the thread that fired."""
        end = clock()
        self.busy[actor.queue] += end - start
        if firing < self.iterations * actor.rate:
            self._fired.append((plan, actor.id, firing, start, end))

    def arrived(self, plan: int, register: int, sequence: int) -> None:
        """Record a token from another rank."""
        if sequence < self._most[plan, register]:
            self.arrivals.append(Arrival(plan, register, sequence, clock()))

    def credited(self, plan: int, register: int) -> None:
        """Record a credit from another rank."""
        key = plan, register
        if self._credited[key] < self._most[key]:
            self._credited[key] += 1
            self.credits.append(Credited(plan, register, clock()))

    def began(self, plan: int, iteration: int, issued: int) -> None:
        """Record that an iteration began; the script issued its call at ``issued`` ns."""
        if iteration < self.iterations:
            self.begun.append(Begun(plan, iteration, issued, clock()))
        else:
            self._open.discard(plan)

    def waited(self, plan: int, actor: Actor, firing: int, start: int, read: RowsRead) -> None:
        """Record that rows are here now for which a firing of a source has waited since ``start`` ns.

        For any thread.
        """
        if firing < self.iterations * actor.rate:
            self.waits.append(RowsWait(plan, actor.id, firing, start, clock(), read.text, read.source))

    def script_read(self, start: int, read: RowsRead) -> None:
        """Record that the script's thread has read rows since ``start`` ns; no more once all plans are recorded."""
        if self._open:
            self.script_reads.append(ScriptRead(start, clock(), read.text, read.source))

    @property
    def fired(self) -> list[Fired]:
        """The recorded firings, in the order in which they ended."""
        return [Fired(*fields) for fields in self._fired]

    def order(self, number: int, plan: Plan) -> tuple[int, ...]:
        """The actors of a plan's compute queue in the order in which they fired, as far as it was recorded."""
        computing = {a.id for a in plan.actors if a.queue == COMPUTING}
        return tuple(f.actor for f in self.fired if f.plan == number and f.actor in computing)
