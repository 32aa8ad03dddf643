"""The one session of this process: made with the first call of a job, finished when the script has ended."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from actorflow.control import cluster as clusters
from actorflow.control.cluster import Alone, Cluster
from actorflow.rendezvous.failure import FailureKind
from actorflow.runtime.observer import Observer
from actorflow.runtime.recorder import clock
from actorflow.session.call_barrier import CallBarrier
from actorflow.session.context import Observers
from actorflow.session.session import Session
from actorflow.standins.logical_batch import RowsRead
from actorflow.status.rank_status import observe_session, own_wait
from actorflow.support.exit_hooks import at_exit, when_finished

__all__ = ["current", "explain", "explain_recompiles", "finish", "observed_by", "script_reads", "started"]

_session: Session | None = None
_makers: list[Observers] = []


def observed_by(observers: Observers) -> None:
    """Add observers of the session, after those added before."""
    _makers.append(observers)


def current() -> Session:
    """This process's session; made with the first call of a job."""
    global _session
    if _session is None:
        cluster = clusters.current()
        _session = Session(cluster, _observers)
        if isinstance(cluster, Cluster):
            cluster.tell_waits(partial(own_wait, cluster.rank))
        if (isinstance(cluster, Alone) or clusters.joined_late()) and not cluster.settings.launcher:
            at_exit(_finish_at_exit)
    return _session


def _observers(cluster: Alone | Cluster, barrier: CallBarrier) -> Iterable[Observer]:
    return (observer for make in _makers for observer in make(cluster, barrier))


def finish() -> None:
    """Wait for every call of this process; raises the first failure.  The launcher's entry calls it at the end."""
    if _session is not None:
        _session.finish()


def _finish_at_exit() -> None:
    """Without actorflow's launcher: report a call that fails after the last line of the script."""
    if getattr(sys, "last_value", None) is not None:  # the script has failed already
        return
    try:
        finish()
    except BaseException as error:
        traceback.print_exc()
        run = clusters.joined()
        if isinstance(run, Cluster) and run.explain(error) is error:
            run.abort(FailureKind.RAISED, f"raised {type(error).__name__}: {error}")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)


def started() -> Session | None:
    """This process's session, or None; never makes one."""
    return _session


@contextmanager
def script_reads(read: RowsRead) -> Iterator[None]:
    """Let traces and the status say that the script's thread, which this is, reads rows inside the context."""
    session = _session
    if session is None:
        yield
        return
    before, session.reads = session.reads, read
    start = clock()
    try:
        yield
    finally:
        session.reads = before
        record = None if session.worker is None else session.worker.record
        if record is not None and before is None:
            record.script_read(start, read)


when_finished(finish)
observe_session(started)


def explain_recompiles() -> str:
    """A line for each plan of each job that has been called: what made it necessary."""
    return "" if _session is None else "\n".join(job.plans.explain() for job in _session.context.jobs)


def explain() -> str:
    """The state of every queue of this rank, and what it waits for; for finding out why a run hangs."""
    return current().explain()
