"""What looks on at a process's calls: live views, traces, callbacks."""

from __future__ import annotations

from actorflow.runtime.call import Call
from actorflow.runtime.recorder import Recorder
from actorflow.runtime.worker import Worker
from actorflow_compiler.plan.plan import Plan

__all__ = ["Observer"]


class Observer:
    """Is told what happens to calls, and changes none; methods that are not overridden do nothing."""

    keeps_plans = False  # plans that nobody can call any more stay installed

    def recorder(self) -> Recorder | None:
        """Where the worker is to note what it does; asked once, just before the worker is made."""
        return None

    def started(self, worker: Worker) -> None:
        """The worker is there."""

    def installed(self, number: int, plan: Plan) -> None:
        """The worker has another plan: whole on the master, else this rank's part."""

    def issued(self, call: Call, plan: Plan, rows: int, trains: bool) -> None:
        """A call is under way; ``rows`` is the first dim of its first argument, 0 where it has none."""

    def finish(self) -> None:
        """The script has ended, and all calls are done.  What it raises ends the run."""
