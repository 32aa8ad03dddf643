"""Trace a run: each rank writes its own files, and at the end the master one trace of all ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from actorflow.rendezvous.failure import Failure
from actorflow.rendezvous.settings import Settings
from actorflow.runtime.measured_costs import Target
from actorflow.runtime.recorder import Arrival, Begun, Credited, Fired, Recorder, RowsWait, ScriptRead, clock
from actorflow.support.requests import Request
from actorflow.support.terminal import say
from actorflow.support.version import __version__
from actorflow.tracing import folder
from actorflow.tracing.chrome import Event, RankRecording, events, joined
from actorflow.tracing.clock import Estimate, SharedClock, estimate
from actorflow_compiler.core.errors import TraceError
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.summary import device_type
from actorflow_scheduler.shared_cores import on_shared_cores
from actorflow_scheduler.timeline import nanoseconds

__all__ = ["TracePeers", "TraceBegin", "TraceClock", "TraceEvents", "Tracer", "with_forecast"]

ITERATIONS = 100  # recorded of each plan's order; later iterations fire in the same order


@dataclass(frozen=True, slots=True)
class TraceBegin(Request):
    """Asks a rank when its trace began."""


@dataclass(frozen=True, slots=True)
class TraceClock(Request):
    """Asks a rank for the time of its clock."""


@dataclass(frozen=True, slots=True)
class TraceEvents(Request):
    """Asks a rank for its trace, once that is finished."""


class TracePeers(Protocol):
    """The part of the cluster's interface that is used here."""

    rank: int
    world: int
    settings: Settings

    @property
    def failure(self) -> Failure | None:
        """Why the run is over, if it is."""

    @property
    def machines(self) -> Sequence[str]:
        """For each rank, an id that is equal for ranks of one machine; empty where that is not known."""

    def pull(self, rank: int, request: Request) -> bytes:
        """A rank's answer to a request."""


class Tracer:
    """One rank's part in tracing a run.

    The common clock is the master's, from when it made its tracer on.  Ranks of the master's machine
    read that clock themselves; others ask for it over the control channel when they begin and end.
    """

    def __init__(self, peers: TracePeers) -> None:
        self._peers = peers
        self._folder = peers.settings.trace
        self.record = Recorder(ITERATIONS)
        self.finished = False  # this rank's events are complete
        self._plans: dict[int, Plan] = {}
        self._begin = clock()
        self._estimates: list[Estimate] = []
        self._served = b""
        self._compare()

    def install(self, number: int, plan: Plan) -> None:
        """Add a plan of the run: whole on the master, else this rank's part."""
        self._plans[number] = plan
        if self._peers.rank == 0:  # at once, since an incomplete trace needs the plans, too
            folder.write_plan(self._folder, number, plan)

    def begin(self) -> bytes:
        """The answer to ``TraceBegin``: the trace's begin in nanoseconds of this machine's clock."""
        return str(self._begin).encode()

    def clock(self) -> bytes:
        """The answer to ``TraceClock``: this machine's clock in nanoseconds."""
        return str(clock()).encode()

    def events(self) -> bytes:
        """The answer to ``TraceEvents``: this rank's events; only after ``finish``."""
        return self._served

    def finish(self, observed: Sequence[tuple[Plan, tuple[int, ...]]], tell: Callable[[], object]) -> None:
        """Write this rank's files after its calls are done, then call ``tell``; on the master, merge all ranks' events.

        After ``tell`` other ranks may pull this rank's events.

        Raises TraceError where a file cannot be written.
        """
        if self._estimates:
            self._compare()
        own, info = self._write(observed)
        about = asdict(info)
        self._served = json.dumps([about, own], separators=(",", ":")).encode()
        self.finished = True
        tell()
        if self._peers.rank == 0:
            others = [json.loads(self._peers.pull(r, TraceEvents())) for r in range(1, self._peers.world)]
            ranks = (info, *(folder.RankInfo(**about) for about, _ in others))
            merged = joined([own, *(found for _, found in others)])
            target = Target(ranks=self._peers.settings.sharing)
            ran = tuple(with_forecast(number, plan, target) for number, plan in sorted(self._plans.items()))
            folder.write(self._folder, folder.TraceData(self._peers.settings.script, __version__, ranks, ran, merged))

    def cut_short(self, observed: Callable[[], Sequence[tuple[Plan, tuple[int, ...]]]]) -> None:
        """After a failure: write this rank's files as far as recorded; ``actorflow trace`` merges those of all ranks.

        It runs on its own thread.  It must not hide the failure, so errors in here are only printed as a line.
        """
        failure = self._peers.failure
        try:
            self._write(observed(), "" if failure is None else failure.text)
        except TraceError as e:
            say(f"rank {self._peers.rank}: {e}")

    def _write(
        self, observed: Sequence[tuple[Plan, tuple[int, ...]]], cut: str = ""
    ) -> tuple[list[Event], folder.RankInfo]:
        """Write this rank's files; returns its events and its ``RankInfo``."""
        own, info = self._own()
        folder.write_order(self._folder, info.rank, observed)
        script = self._peers.settings.script
        folder.write_rank(self._folder, folder.RankTrace(info, script, __version__, cut, own))
        return own, info

    def _compare(self) -> None:
        """Ask the master for its clock, unless it is this machine's."""
        peers = self._peers
        if peers.rank == 0:
            return
        self._begin = int(peers.pull(0, TraceBegin()))
        machines = peers.machines
        if not machines[0] or machines[0] != machines[peers.rank]:
            self._estimates.append(estimate(lambda: int(peers.pull(0, TraceClock()))))

    def _own(self) -> tuple[list[Event], folder.RankInfo]:
        to = SharedClock(self._begin, tuple(self._estimates))
        kept = self.record
        host, pid = socket.gethostname(), os.getpid()
        found = RankRecording(
            self._peers.rank,
            host,
            pid,
            dict(self._plans),
            [Fired(f.plan, f.actor, f.firing, to(f.start), to(f.end)) for f in kept.fired],
            [Arrival(a.plan, a.register, a.sequence, to(a.at)) for a in kept.arrivals],
            [Credited(c.plan, c.register, to(c.at)) for c in kept.credits],
            [Begun(b.plan, b.iteration, to(b.issued), to(b.at)) for b in kept.begun],
            [RowsWait(w.plan, w.actor, w.firing, to(w.start), to(w.end), w.rows, w.source) for w in tuple(kept.waits)],
            [ScriptRead(to(r.start), to(r.end), r.rows, r.source) for r in tuple(kept.script_reads)],
        )
        return events(found), folder.RankInfo(self._peers.rank, host, pid, to.doubt)


def with_forecast(number: int, plan: Plan, target: Target) -> folder.TracedPlan:
    """A plan that was traced, with its forecast for this machine."""
    on = target.hardware(device_type(plan))
    times = on_shared_cores(plan, nanoseconds(plan, on), on.cores, dict.fromkeys(range(plan.world), 1))
    return folder.TracedPlan(number, plan, on.name, times)
