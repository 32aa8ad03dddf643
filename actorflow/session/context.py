"""The state that the parts of a session share: cluster, names, jobs and, from the first plan on, the worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from actorflow.control.cluster import Alone, Cluster
from actorflow.runtime.observer import Observer
from actorflow.runtime.results import Results
from actorflow.runtime.worker import Worker
from actorflow.script_state.arguments import CallArguments, GlobalArgument
from actorflow.script_state.lazy_hooks import install_lazy_hooks
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.search import search_script
from actorflow.script_state.search_result import SearchResult
from actorflow.session.call_barrier import CallBarrier
from actorflow.session.compile_request import located
from actorflow.session.jobs import JobLike
from actorflow.standins.lazy_tensor import LazyTensor
from actorflow.variables.rebinding import RebindingTable
from actorflow.variables.variable_table import VariableTable
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.plan.plan import Result
from actorflow_compiler.values.variables import ScriptState, StateTensor

__all__ = ["SessionContext", "Observers", "PlanRuntime", "adopt_with"]

AsGlobal = Callable[[LazyTensor, Result, Sequence[GlobalArgument]], Tensor]  # a result, and what it may lie like
Adopt = Callable[[Iterable[nn.Module], Iterable[Optimizer], int], Mapping[int, Tensor]]
Observers = Callable[[Alone | Cluster, CallBarrier], Iterable[Observer]]  # makes the observers of a new session


@dataclass(frozen=True, slots=True)
class PlanRuntime:
    """The objects made with the first plan, because the ranks' devices are known only then."""

    worker: Worker
    variables: VariableTable
    results: Results
    rebound: RebindingTable
    kinds: tuple[str, ...]  # of each rank's device
    seed: int  # the master's seed of random ops, used where the script sets none


_globals_by: list[tuple[Adopt, AsGlobal]] = []  # one, where there are jobs


def adopt_with(adopt: Adopt, as_global: AsGlobal) -> None:
    """Take over and give global tensors by these functions.

    ``adopt`` makes those of modules and optimizers plain, and returns the plain ones by the ids of the global ones;
    ``as_global`` makes a call's result global.
    """
    _globals_by[:] = [(adopt, as_global)]


def _global_tensors(found: SearchResult) -> list[StateTensor]:
    return [one for one in found.state.held.values() if getattr(one.tensor, "has_parts", False)]


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
        """Search the state that a job's function and ``held`` reach.

        Global tensors of modules become plain ones, which the plan owns and lays out as they lay.  Raises CaptureError
        with the function's line.
        """

        def search() -> SearchResult:
            return search_script(job.function, job.model, job.optimizer, self.names, held, arguments.objects)

        try:
            found = search()
            install_lazy_hooks(found, arguments)
            if _global_tensors(found):
                state = found.state
                plain = _globals_by[0][0](state.modules.values(), state.optimizers.values(), self.world)
                for one in _global_tensors(found):
                    if id(one.tensor) in plain:
                        one.put(plain[id(one.tensor)])
                        self.names.hand_over(one.tensor, plain[id(one.tensor)])
                found = search()
                for one in _global_tensors(found):
                    raise CaptureError(
                        f"{one.name} is a global tensor that is reached from outside of modules; expected: a parameter "
                        f"or buffer of a module, whose layout the plan takes over, an argument of the call, or a plain "
                        f"tensor, such as {one.name.rpartition('.')[2]}.whole()"
                    )
            return found
        except CaptureError as error:
            raise located(error, job.function) from error.__cause__

    @staticmethod
    def as_global(
        handles: Sequence[LazyTensor], results: Sequence[Result], like: Sequence[GlobalArgument]
    ) -> list[Tensor]:
        """The results of a call as global tensors, whose rows lie as those of the arguments ``like``."""
        return [_globals_by[0][1](one, result, like) for one, result in zip(handles, results, strict=True)]

    def states(self) -> Iterator[ScriptState]:
        """The script states that the plans in use were made with."""
        return (plan.bound.found.state for job in self.jobs for plan in job.plans if plan.parked is None)

    def together(self, what: str) -> None:
        """Block until every rank has called this with the same text."""
        here = self.cluster.gather(what, b"")
        self.cluster.scatter(what, here)
