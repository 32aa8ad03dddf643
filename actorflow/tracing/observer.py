"""Observe a session for a trace: record its calls, serve them to the master, write them at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from actorflow.runtime.observer import Observer
from actorflow.runtime.recorder import Recorder
from actorflow.runtime.worker import Worker
from actorflow.support.requests import AnyRequest
from actorflow.tracing.tracer import TraceBegin, TraceClock, TraceEvents, TracePeers, Tracer
from actorflow_compiler.plan.plan import Plan

__all__ = ["TracingObserver"]


class TracedRun(TracePeers, Protocol):
    """The part of the cluster's interface that is used here."""

    def serve(self, kind: type[AnyRequest], handler: Callable[[AnyRequest], Iterable[bytes]]) -> None:
        """Answer requests of a kind."""

    def at_failure(self, callback: Callable[[], object]) -> None:
        """Call back, once, if the run fails."""


class CallProgress(Protocol):
    """The interface by which a request waits for this rank's progress."""

    def wait_until(self, there: Callable[[], bool]) -> None:
        """Block until a condition holds; raises what ended the run."""

    def notify(self) -> None:
        """Make waiting requests check their conditions again."""


class TracingObserver(Observer):
    """Traces a run, from the first plan on."""

    keeps_plans = True  # all plans are observed until the end

    def __init__(self, run: TracedRun, progress: CallProgress) -> None:
        self._run, self._progress = run, progress
        self._tracer: Tracer | None = None
        self._worker: Worker | None = None  # set together with the tracer
        run.serve(TraceBegin, lambda _: [self._begun().begin()])
        run.serve(TraceClock, lambda _: [self._begun().clock()])
        run.serve(TraceEvents, self._events)

    def recorder(self) -> Recorder | None:
        """The tracer's recorder."""
        self._tracer = Tracer(self._run)
        self._progress.notify()
        return self._tracer.record

    def started(self, worker: Worker) -> None:
        """Register the writing of an incomplete trace, for a failure of the run."""
        assert self._tracer is not None
        self._worker = worker
        self._run.at_failure(partial(self._tracer.cut_short, worker.observed))

    def installed(self, number: int, plan: Plan) -> None:
        """Pass the plan to the tracer, which writes it on the master."""
        assert self._tracer is not None
        self._tracer.install(number, plan)

    def finish(self) -> None:
        """Write the files.  Raises TraceError where one cannot be written."""
        if self._tracer is not None and self._worker is not None:
            self._tracer.finish(self._worker.observed(), self._progress.notify)

    def _begun(self) -> Tracer:
        """The tracer, which another rank may ask for before this one has begun."""
        self._progress.wait_until(lambda: self._tracer is not None)
        assert self._tracer is not None
        return self._tracer

    def _events(self, _: TraceEvents) -> Iterable[bytes]:
        self._progress.wait_until(lambda: self._tracer is not None and self._tracer.finished)
        return [self._begun().events()]
