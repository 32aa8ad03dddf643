"""Find in a trace when every actor fired, when tokens and slots were there, and why compute queues were idle.

An idle compute queue waited for the last thing that its next firing needed: **data** (a token), **queue** (a
token whose transfer could have begun earlier, but its queue was busy with another), **credit** (a free
slot), **source** (rows of a data source, which its source had not got yet, or for which the script had not
made the call), or **host** (the script had not made the call, or the thread was busy with something else).
"""

from __future__ import annotations

import enum
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from actorflow.show.styles import short
from actorflow.tracing.chrome import ARRIVAL, CALL, CREDIT, ROWS
from actorflow.tracing.folder import TraceData, TracedPlan
from actorflow_compiler.core.errors import TraceError
from actorflow_compiler.plan.plan import Actor, ActorKind, Collective, Plan, Register
from actorflow_scheduler.notation import COMPUTING

__all__ = ["WARM_UP", "Gap", "IdleReason", "Measurement", "ReadSpan", "measure"]


class IdleReason(enum.StrEnum):
    """The reason why a compute queue was idle; see the top of this file."""

    DATA = "data"
    QUEUE = "queue"
    CREDIT = "credit"
    SOURCE = "source"
    HOST = "host"


T = TypeVar("T")

WARM_UP = 2  # iterations left out if there are more, in which memory is allocated and threads start


@dataclass(frozen=True, slots=True)
class Gap:
    """An interval in which a compute queue was idle for one reason."""

    rank: int
    reason: IdleReason
    actor: int  # that fired next
    on: str  # what it waited for, for people
    start: int  # ns
    end: int  # ns


@dataclass(frozen=True, slots=True, order=True)
class ReadSpan:
    """An interval in which a source or a script waited for rows of a data source."""

    start: int  # ns
    end: int  # ns
    source: str  # "the loader of train.py:31"


@dataclass(frozen=True)
class Measurement:
    """The measured times of one plan, in nanoseconds on the common clock."""

    plan: Plan
    starts: Mapping[int, Sequence[int]]  # actor → of each firing
    ends: Mapping[int, Sequence[int]]
    arrivals: Mapping[int, Sequence[int]]  # register → of each token that came from another rank, without initial ones
    credits: Mapping[int, Sequence[int]]  # register → of each credit that came from another rank
    issued: Mapping[int, Sequence[int]]  # rank → the time of each call in its script …
    begun: Mapping[int, Sequence[int]]  # … and when the call could fire: all ranks had made it, and it was next
    late: Mapping[int, Sequence[ReadSpan]] = field(default_factory=dict)  # rank → waits of its sources for rows
    reads: Mapping[int, Sequence[ReadSpan]] = field(default_factory=dict)  # rank → waits of its script for rows

    @cached_property
    def iterations(self) -> int:
        """The number of iterations of which every firing is known."""
        return min((len(self.starts[a.id]) // a.rate for a in self.plan.actors), default=0)

    @property
    def first(self) -> int:
        """The first iteration that counts."""
        return WARM_UP if self.iterations > WARM_UP + 1 else max(0, self.iterations - 1)

    def end_of(self, iteration: int) -> int:
        """When the last firing of an iteration was done; for -1, when the first of all began."""
        if iteration < 0:
            return min((self.starts[a.id][0] for a in self.plan.actors), default=0)
        return max((self.ends[a.id][(iteration + 1) * a.rate - 1] for a in self.plan.actors), default=0)

    @property
    def begin(self) -> int:
        """When the measurement begins: the end of the iteration before the first that counts."""
        return self.end_of(self.first - 1)

    @property
    def period(self) -> float:
        """Nanoseconds from one iteration's end to the next one's: the median of those that count."""
        ends = [self.end_of(i) for i in range(self.first - 1, self.iterations)]
        return statistics.median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else 0.0

    def taken(self, actor: Actor) -> float:
        """Nanoseconds of a firing: the median of those that count; a collective counts from when all members began."""
        firings = range(self.first * actor.rate, self.iterations * actor.rate)
        members = self._members[actor.id]
        return statistics.median(self.ends[actor.id][n] - max(self.starts[m][n] for m in members) for n in firings)

    def gaps(self) -> Iterator[Gap]:
        """Why the compute queues ran nothing between their firings, from ``begin`` on."""
        for order in self.plan.orders:
            if order.queue == COMPUTING and order.actors:
                yield from self._gaps_of(order.rank, order.actors)

    def _gaps_of(self, rank: int, actors: Sequence[int]) -> Iterator[Gap]:
        fired = sorted(
            (self.starts[id][n], self.ends[id][n], id, n)
            for id in set(actors)
            for n in range(self.iterations * self.plan.actor(id).rate)
        )
        free = self.begin
        for start, end, id, n in fired:
            if start > free:
                yield from self._reasons(rank, self.plan.actor(id), n, free, start)
            free = max(free, end)

    def _reasons(self, rank: int, actor: Actor, firing: int, free: int, start: int) -> Iterator[Gap]:
        ready, reason, on, made = max(self._needs(actor, firing), key=lambda need: need[0])
        ready = min(max(ready, free), start)
        issued = called = free
        script = "the script to make the next call"
        late: Sequence[ReadSpan] = ()
        call = (actor, firing) if made is None and reason is IdleReason.HOST else made
        if call is not None and (made is None or call[0].kind == ActorKind.SOURCE):  # it waited for the call …
            called = min(max(self._of(self.begun, *call), free), ready)
            issued = min(max(self._of(self.issued, *call), free), called)
            if self._of(self.issued, *call) < free:
                script = "all ranks to make the call"
            late = self.late.get(rank, ())  # … and then the source for rows
        left = called if made is None else min(max(self._left(*made), called), ready)
        for why, what, a, b, spans in (
            (IdleReason.HOST, script, free, issued, self.reads.get(rank, ())),
            (IdleReason.HOST, script, issued, called, ()),
            (IdleReason.QUEUE, on, called, left, late),
            (reason, on, left, ready, late),
            (IdleReason.HOST, "the thread that fires", ready, start, ()),
        ):
            yield from _split(Gap(rank, why, actor.id, what, a, b), spans)

    def _needs(self, actor: Actor, firing: int) -> Iterator[tuple[int, IdleReason, str, tuple[Actor, int] | None]]:
        """The needs of a firing: (time available, the reason to wait for it, its text, the firing that made it)."""
        plan = self.plan
        yield self._of(self.begun, actor, firing), IdleReason.HOST, "the script to make the next call", None
        for register in plan.inputs_of[actor.id]:
            read = next(r for r in register.readers if r.actor == actor.id)
            token = firing // read.firings - register.initial
            if token >= 0:
                producer, made = plan.actor(register.producer), (token + 1) * register.fill - 1
                on = f"{short(producer.name)} of rank {producer.rank}"
                yield self._there(register, token, made), IdleReason.DATA, on, (producer, made)
        for register in plan.outputs_of[actor.id]:
            token = firing // register.fill + register.initial - register.slots  # whose slot it takes
            if firing % register.fill == 0 and token >= 0:
                readers = " and ".join(sorted({short(plan.actor(r.actor).name) for r in register.readers}))
                yield (
                    self._freed(register, token),
                    IdleReason.CREDIT,
                    f"a slot of what goes to {readers or 'nobody'}",
                    None,
                )

    def _left(self, actor: Actor, firing: int) -> int:
        """The time until which a communication waited for others on its queue, if it could have begun earlier; or 0."""
        if actor.queue == COMPUTING:
            return 0
        before = self._before.get((actor.rank, actor.queue, self.starts[actor.id][firing]), 0)
        return before if max(at for at, *_ in self._needs(actor, firing)) < before else 0

    @cached_property
    def _before(self) -> dict[tuple[int, str, int], int]:
        """(rank, queue, start of a firing) → end of the firing before it on the queue."""
        queues: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for a in self.plan.actors:
            queues[a.rank, a.queue] += zip(self.starts[a.id], self.ends[a.id], strict=True)
        found: dict[tuple[int, str, int], int] = {}
        for (rank, queue), spans in queues.items():
            spans.sort()
            found |= {(rank, queue, b[0]): a[1] for a, b in pairwise(spans)}
        return found

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        """Actor → the actors that fire with it: a collective's members."""
        groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for a in self.plan.actors:
            groups[_group(a)].append(a.id)
        return {a.id: groups[_group(a)] for a in self.plan.actors}

    def _of(self, calls: Mapping[int, Sequence[int]], actor: Actor, firing: int) -> int:
        """The time of the call that a firing belongs to; 0 where it is not known."""
        times, iteration = calls.get(actor.rank, ()), firing // actor.rate
        return times[iteration] if iteration < len(times) else 0

    def _there(self, register: Register, token: int, made: int) -> int:
        """When a token (counted without initial ones) could be read."""
        if self.plan.actor(register.producer).rank == self.plan.home(register):
            return self.ends[register.producer][made]
        arrivals = self.arrivals.get(register.id, ())
        return arrivals[token] if token < len(arrivals) else self.ends[register.producer][made]

    def _freed(self, register: Register, token: int) -> int:
        """When the slot of a token (counted with initial ones) was free again."""
        credits = self.credits.get(register.id, ())
        if self.plan.actor(register.producer).rank != self.plan.home(register) and token < len(credits):
            return credits[token]
        if not register.readers:
            return 0
        return max(self.ends[r.actor][(token + 1) * r.firings - 1] for r in register.readers)


def measure(traced: TraceData, ran: TracedPlan) -> Measurement:
    """The measurement of a trace's plan.  Raises TraceError if firings of it are missing."""
    plan, number = ran.plan, ran.number
    slices: dict[int, dict[int, tuple[int, int]]] = {a.id: {} for a in plan.actors}
    arrivals: defaultdict[int, dict[int, int]] = defaultdict(dict)
    credits: defaultdict[int, list[int]] = defaultdict(list)
    issued: defaultdict[int, dict[int, int]] = defaultdict(dict)
    begun: defaultdict[int, dict[int, int]] = defaultdict(dict)
    late: defaultdict[int, list[ReadSpan]] = defaultdict(list)
    reads: defaultdict[int, list[ReadSpan]] = defaultdict(list)
    for event in traced.events:
        known: Mapping[str, Any] = event.get("args", {})
        if event.get("cat") == ROWS and known.get("plan", number) == number:
            at = _ns(event["ts"])
            span = ReadSpan(at, at + _ns(event["dur"]), known["source"])
            (late if "plan" in known else reads)[event["pid"]].append(span)
            continue
        if known.get("plan") != number:
            continue
        at, kind = _ns(event["ts"]), event["cat"]
        if event["ph"] == "X":
            slices[known["actor"]][known["firing"]] = at, at + _ns(event["dur"])
        elif kind == ARRIVAL:
            arrivals[known["register"]][known["sequence"]] = at
        elif kind == CREDIT:
            credits[known["register"]].append(at)
        elif kind == CALL:
            issued[event["pid"]][known["iteration"]] = _ns(known["issued"])
            begun[event["pid"]][known["iteration"]] = at
    for a in plan.actors:
        if sorted(slices[a.id]) != list(range(len(slices[a.id]))):
            raise TraceError(f"the trace lacks firings of actor {a.name} of rank {a.rank}; run the script again")
    return Measurement(
        plan,
        {a: [start for start, _ in _in_order(firings)] for a, firings in slices.items()},
        {a: [end for _, end in _in_order(firings)] for a, firings in slices.items()},
        {r: _in_order(tokens) for r, tokens in arrivals.items()},
        {r: sorted(times) for r, times in credits.items()},
        {rank: _in_order(calls) for rank, calls in issued.items()},
        {rank: _in_order(calls) for rank, calls in begun.items()},
        {rank: sorted(spans) for rank, spans in late.items()},
        {rank: sorted(spans) for rank, spans in reads.items()},
    )


def _split(gap: Gap, spans: Sequence[ReadSpan]) -> Iterator[Gap]:
    """A gap, with what of it lies in one of these spans, which are in order, as a wait for the source."""
    for span in spans:
        start, end = max(gap.start, span.start), min(gap.end, span.end)
        if start < end:
            if gap.start < start:
                yield replace(gap, end=start)
            yield replace(gap, reason=IdleReason.SOURCE, on=f"rows of {span.source}", start=start, end=end)
            gap = replace(gap, start=end)
    if gap.start < gap.end:
        yield gap


def _in_order(by_number: Mapping[int, T]) -> list[T]:
    """The values, in the order of their numbers."""
    return [by_number[n] for n in sorted(by_number)]


def _group(actor: Actor) -> tuple[object, ...]:
    comm = actor.comm
    return ("together", comm.id, comm.ranks) if isinstance(comm, Collective) else ("alone", actor.id)


def _ns(us: float) -> int:
    return round(us * 1000)
