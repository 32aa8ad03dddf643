"""The state that the parts of a session share: cluster, names, jobs and, from the first plan on, the worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from actorflow.control.cluster import Alone, Cluster
from actorflow.runtime.observer import Observer
from actorflow.runtime.results import Results
from actorflow.runtime.worker import Worker
from actorflow.script_state.arguments import CallArguments
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.search import search_script
from actorflow.script_state.search_result import SearchResult
from actorflow.session.call_barrier import CallBarrier
from actorflow.session.compile_request import located
from actorflow.session.jobs import JobLike
from actorflow.variables.rebinding import RebindingSites
from actorflow.variables.variable_table import VariableTable
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.values.variables import ScriptState

__all__ = ["SessionContext", "Observers", "PlanRuntime"]

Observers = Callable[[Alone | Cluster, CallBarrier], Iterable[Observer]]  # makes the observers of a new session


@dataclass(frozen=True, slots=True)
class PlanRuntime:
    """The objects made with the first plan, because the ranks' devices are known only then."""

    worker: Worker
    variables: VariableTable
    results: Results
    rebound: RebindingSites
    kinds: tuple[str, ...]  # of each rank's device
    seed: int  # the master's seed of random ops, used where the script sets none


class SessionContext:
    """The shared state of one process's session."""

    def __init__(self, cluster: Cluster | Alone, observers: Observers) -> None:
        self.cluster = cluster
        self.settings = cluster.settings
        self.rank, self.world = cluster.rank, cluster.world
        self.names = NameRegistry()
        self.barrier = CallBarrier(cluster)
        self.observers = tuple(observers(cluster, self.barrier))
        self.jobs: weakref.WeakKeyDictionary[JobLike, None]  # jobs that have a plan, in the order of their first plans
        self.jobs = weakref.WeakKeyDictionary()
        self.runtime: PlanRuntime | None = None
        self.capturing = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which jobs that are called are plain functions."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def look(self, job: JobLike, held: Mapping[str, Any], arguments: CallArguments) -> SearchResult:
        """Search the state that a job's function and ``held`` reach.  Raises CaptureError with the function's line."""
        try:
            return search_script(job.function, job.model, job.optimizer, self.names, held, arguments.objects)
        except CaptureError as error:
            raise located(error, job.function) from error.__cause__

    def states(self) -> Iterator[ScriptState]:
        """The script states that the plans in use were made with."""
        return (plan.bound.found.state for job in self.jobs for plan in job.plans if plan.parked is None)

    def together(self, what: str) -> None:
        """Block until every rank has called this with the same text."""
        here = self.cluster.gather(what, b"")
        self.cluster.scatter(what, here)
