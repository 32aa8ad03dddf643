"""The interface of observers of a process's calls, such as live views, traces and callbacks."""

from __future__ import annotations

from actorflow.runtime.call import Call
from actorflow.runtime.recorder import Recorder
from actorflow.runtime.worker import Worker
from actorflow_compiler.plan.plan import Plan

__all__ = ["Observer"]


class Observer:
    """Base class of observers, whose methods are called on events of calls.  The defaults do nothing."""

    keeps_plans = False  # if True, plans that nobody can call any more stay installed

    def recorder(self) -> Recorder | None:
        """The recorder for the worker, if any; called once, just before the worker is made."""
        return None

    def started(self, worker: Worker) -> None:
        """The worker was made."""

    def installed(self, number: int, plan: Plan) -> None:
        """The worker has installed a plan: the whole plan on the master, elsewhere this rank's part."""

    def issued(self, call: Call, plan: Plan, rows: int, trains: bool) -> None:
        """A call was issued; ``rows`` is the size of dim 0 of its first argument, 0 if it has none."""

    def finish(self) -> None:
        """The script has ended and all calls are done.  An exception raised here ends the run."""
