"""Write one rank's recording as events of the Chrome trace format, which Perfetto draws.

A rank is a process of the trace, a queue a thread of it, a firing a slice ("X") that names its plan, actor
and firing.  A flow arrow goes from the firing that completes a token to the first that reads it where these
are on two queues, and from the firing that frees a slot on another rank to the send that takes it.  Each
rank writes its own ends of arrows: the same number on both ranks joins them when their events are merged.
The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actorflow.runtime.recorder import Arrival, Begun, Credited, Fired, RowsWait, ScriptRead
from actorflow_compiler.plan.plan import Actor, Plan, Register

__all__ = ["ARRIVAL", "CALL", "CREDIT", "ROWS", "TOKEN", "RankRecording", "events", "joined"]

Event = dict[str, Any]

ARRIVAL, CALL, CREDIT, TOKEN = "arrival", "call", "credit", "token"  # categories; a firing has its actor's kind
ROWS = "rows"  # the category of waits for rows of a data source; those of the script's thread belong to no plan
SCRIPT = "script"  # the thread of the latter
_QUEUES = ("source", "compute", "comm", "send", "sink")  # from top to bottom
_TICK = 0.001  # µs; the format's times are microseconds, ours have nanoseconds


@dataclass(frozen=True, slots=True)
class RankRecording:
    """One rank's recording, on the common clock in nanoseconds."""

    rank: int
    host: str
    pid: int
    plans: Mapping[int, Plan]  # by number: whole ones, or this rank's part of them
    fired: Sequence[Fired]
    arrivals: Sequence[Arrival] = ()
    credits: Sequence[Credited] = ()
    begun: Sequence[Begun] = ()
    waits: Sequence[RowsWait] = ()
    script_reads: Sequence[ScriptRead] = ()


def events(recorded: RankRecording) -> list[Event]:
    """The events of a rank, each firing once."""
    return list(_Writer(recorded).all())


def joined(parts: Iterable[Sequence[Event]]) -> list[Event]:
    """Merge the events of all ranks into one trace; arrows with only one recorded end are left out."""
    merged = [event for part in parts for event in part]
    ends = Counter((e["cat"], e["id"]) for e in merged if e["ph"] in "sf")
    return [e for e in merged if e["ph"] not in "sf" or ends[e["cat"], e["id"]] == 2]


class _Writer:
    def __init__(self, recorded: RankRecording) -> None:
        self.recorded = recorded
        self.rank = recorded.rank
        queues = {a.queue for plan in recorded.plans.values() for a in plan.actors if a.rank == self.rank}
        self.threads = {queue: i for i, queue in enumerate(sorted(queues, key=_place), 1)}
        if recorded.script_reads:
            self.threads[SCRIPT] = len(self.threads) + 1
        self.slices = {(f.plan, f.actor, f.firing): f for f in recorded.fired}
        self.calls: dict[tuple[int, int], int] = {}  # (plan, iteration) → when its last firing on this rank ended
        for f in recorded.fired:
            key = f.plan, f.firing // recorded.plans[f.plan].actor(f.actor).rate
            self.calls[key] = max(f.end, self.calls.get(key, 0))

    def all(self) -> Iterator[Event]:
        yield from self.names()
        yield from map(self.slice, self.recorded.fired)
        yield from self.rows()
        yield from self.iterations()
        yield from self.messages()
        for number, plan in self.recorded.plans.items():
            for register in plan.registers:
                yield from self.tokens(number, plan, register)
                yield from self.freed(number, plan, register)

    def names(self) -> Iterator[Event]:
        host = f" ({self.recorded.host})" if self.recorded.host else ""
        yield self.name("process_name", 0, {"name": f"rank {self.rank}{host}"})
        yield self.name("process_sort_index", 0, {"sort_index": self.rank})
        for queue, thread in self.threads.items():
            yield self.name("thread_name", thread, {"name": queue})
            yield self.name("thread_sort_index", thread, {"sort_index": thread})

    def name(self, what: str, thread: int, arguments: Mapping[str, object]) -> Event:
        return {"ph": "M", "name": what, "pid": self.rank, "tid": thread, "args": dict(arguments)}

    def slice(self, fired: Fired) -> Event:
        actor = self.recorded.plans[fired.plan].actor(fired.actor)
        iteration, piece = divmod(fired.firing, actor.rate)
        known = {"plan": fired.plan, "actor": actor.id, "firing": fired.firing, "iteration": iteration, "piece": piece}
        return {
            "ph": "X",
            "name": f"{actor.name} {piece}" if actor.rate > 1 else actor.name,
            "cat": actor.kind,
            "pid": self.rank,
            "tid": self.threads[actor.queue],
            "ts": _us(fired.start),
            "dur": _us(fired.end - fired.start),
            "args": known,
        }

    def rows(self) -> Iterator[Event]:
        """A slice for each time that a source, or the script's thread, waited for rows of a data source."""
        for w in self.recorded.waits:
            thread = self.threads[self.recorded.plans[w.plan].actor(w.actor).queue]
            known = {"plan": w.plan, "actor": w.actor, "firing": w.firing}
            yield self.reading(thread, w, known)
        for read in self.recorded.script_reads:
            yield self.reading(self.threads[SCRIPT], read, {})

    def reading(self, thread: int, span: RowsWait | ScriptRead, known: Mapping[str, int]) -> Event:
        return {
            "ph": "X",
            "name": "reading rows",
            "cat": ROWS,
            "pid": self.rank,
            "tid": thread,
            "ts": _us(span.start),
            "dur": _us(span.end - span.start),
            "args": {**known, "rows": span.rows, "source": span.source},
        }

    def iterations(self) -> Iterator[Event]:
        """An asynchronous slice for each call, from when it may fire until all has fired on this rank."""
        for b in self.recorded.begun:
            end = self.calls.get((b.plan, b.iteration))
            if end is None:
                continue
            name = f"call {b.iteration} of {self.recorded.plans[b.plan].name}"
            common = {"cat": CALL, "name": name, "pid": self.rank, "tid": 0, "id": b.plan << 32 | b.iteration}
            known = {"plan": b.plan, "iteration": b.iteration, "issued": _us(b.issued)}
            yield {"ph": "b", "ts": _us(b.at), "args": known, **common}
            yield {"ph": "e", "ts": _us(max(end, b.at)), **common}

    def messages(self) -> Iterator[Event]:
        for a in self.recorded.arrivals:
            plan = self.recorded.plans[a.plan]
            readers = plan.register(a.register).readers
            thread = self.threads[plan.actor(readers[0].actor).queue] if readers else 0
            known = {"plan": a.plan, "register": a.register, "sequence": a.sequence}
            yield self.instant(ARRIVAL, f"token {a.sequence} of register {a.register} arrives", a.at, thread, known)
        for c in self.recorded.credits:
            plan = self.recorded.plans[c.plan]
            thread = self.threads[plan.actor(plan.register(c.register).producer).queue]
            name = f"credit for register {c.register} arrives"
            yield self.instant(CREDIT, name, c.at, thread, {"plan": c.plan, "register": c.register})

    def instant(self, kind: str, name: str, at: int, thread: int, known: Mapping[str, int]) -> Event:
        where = {"pid": self.rank, "tid": thread, "s": "t"}
        return {"ph": "i", "cat": kind, "name": name, "ts": _us(at), **where, "args": dict(known)}

    def tokens(self, number: int, plan: Plan, register: Register) -> Iterator[Event]:
        """Arrows from the firing that completes a token to the first one that reads it, on another queue."""
        producer = plan.actor(register.producer)
        for read in register.readers[:1]:
            reader = _found(plan, read.actor)
            if reader is not None and (reader.rank, reader.queue) == (producer.rank, producer.queue):
                continue
            for f in self.of(number, producer, register.fill, last=True):
                token = register.initial + (f.firing + 1) // register.fill - 1
                yield self.arrow("s", TOKEN, number, register, token, producer, f)
            if reader is not None:
                for f in self.of(number, reader, read.firings):
                    if f.firing // read.firings >= register.initial:
                        yield self.arrow("f", TOKEN, number, register, f.firing // read.firings, reader, f)

    def freed(self, number: int, plan: Plan, register: Register) -> Iterator[Event]:
        """Arrows from the firing that gives a slot back to another rank to the send that takes it."""
        producer = plan.actor(register.producer)
        home = plan.home(register)
        if home == producer.rank or not register.readers:
            return
        if self.rank == producer.rank:
            for f in self.of(number, producer, register.fill):
                token = register.initial + f.firing // register.fill - register.slots  # the token whose slot it reuses
                if token >= 0:
                    yield self.arrow("f", CREDIT, number, register, token, producer, f)
            return
        last: dict[int, tuple[Fired, Actor]] = {}  # token → the last firing that held it
        held: Counter[int] = Counter()
        for read in register.readers:
            reader = plan.actor(read.actor)
            for f in self.of(number, reader, read.firings, last=True):
                token = f.firing // read.firings
                held[token] += 1
                if token not in last or last[token][0].end < f.end:
                    last[token] = f, reader
        for token, (f, reader) in last.items():
            if held[token] == len(register.readers):
                yield self.arrow("s", CREDIT, number, register, token, reader, f)

    def of(self, number: int, actor: Actor, every: int, last: bool = False) -> Iterator[Fired]:
        """The first, or the last, of every so many recorded firings of an actor, if it is this rank's; in order."""
        if actor.rank != self.rank:
            return
        n = every - 1 if last else 0
        while (found := self.slices.get((number, actor.id, n))) is not None:
            yield found
            n += every

    def arrow(
        self, end: str, kind: str, number: int, register: Register, token: int, actor: Actor, fired: Fired
    ) -> Event:
        at = _us(fired.start)
        if end == "s" and actor.kind != "send":  # of which the reader may have the token before the firing has ended
            # an arrow has to begin inside its slice, which excludes its end
            at = max(at, round(_us(fired.end) - _TICK, 3))
        event = {
            "ph": end,
            "cat": kind,
            "name": kind,
            "id": (number << 22 | register.id) << 24 | token,  # below 2⁵³, so that every JSON reader keeps it exact
            "pid": self.rank,
            "tid": self.threads[actor.queue],
            "ts": at,
        }
        return event if end == "s" else {**event, "bp": "e"}


def _place(queue: str) -> tuple[int, str]:
    kind = queue.partition(":")[0]
    return (_QUEUES.index(kind) if kind in _QUEUES else len(_QUEUES), queue)


def _found(plan: Plan, actor: int) -> Actor | None:
    """An actor; None where a rank's part of a plan does not list it."""
    try:
        return plan.actor(actor)
    except KeyError:
        return None


def _us(ns: int) -> float:
    """The format's microseconds."""
    return round(ns / 1000, 3)
