"""Run a whole plan of many ranks with the ranks as threads of this process.

For tests and benchmarks.  Workers and scheduler are those of a real run; only the transport and the data plane are
replaced by ones in memory.  No other part of actorflow uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from actorflow.devices import Cpu, Device
from actorflow.runtime.call import Call
from actorflow.runtime.parts import assemble, part, sources
from actorflow.runtime.recorder import Recorder
from actorflow.runtime.worker import Worker
from actorflow.transport.memory import Switchboard
from actorflow.transport.messages import DataPlane, Message
from actorflow.transport.staged import StagedPlane
from actorflow_compiler.plan.plan import Plan


class MemoryTransport:
    """Delivers messages to the workers of this process, on the thread that sends them."""

    def __init__(self, rank: int, workers: Sequence[Worker]) -> None:
        self._rank = rank
        self._workers = workers

    def send(self, peer: int, message: Message) -> None:
        """See ``Transport``."""
        self._workers[peer].deliver(self._rank, message)


class LocalCluster:
    """A worker in this process for each rank of the plans.

    ``variables`` are logical tensors: each rank gets its part of those that a plan lists, and a copy of all others.
    Every plan is installed on every rank, with its position among ``plans`` as its number.

    >>> with LocalCluster(plan, variables={"w": w}) as cluster:
    ...     (loss,) = cluster.run({"x": x})
    """

    def __init__(
        self,
        *plans: Plan,
        variables: Mapping[str, Tensor] | None = None,
        in_flight: int = 4,
        timeout: float = 200.0,  # seconds for one call, which only a hang takes
        library: Mapping[str, Callable[..., Any]] | None = None,
        trace: int | None = None,  # iterations to record; 0: only count how long queues work; None: no recorder
        device: Callable[[int], Device] = Cpu,  # rank → its device
        planes: Callable[[int, Device], Mapping[str, DataPlane]] = lambda rank, device: {},  # more or other data planes
        stage: Callable[[DataPlane, Device], DataPlane] = StagedPlane,  # adapts a host plane to a device
    ) -> None:
        self.plans = plans
        self.workers: list[Worker] = []
        self._timeout = timeout
        board = Switchboard()
        for rank in range(max(p.world for p in plans)):
            on = device(rank)
            plane: DataPlane = stage(board.plane(rank), on) if on.ahead else board.plane(rank)
            own = {**dict.fromkeys(("gloo", "memory"), plane), **planes(rank, on)}
            transport = MemoryTransport(rank, self.workers)
            record = None if trace is None else Recorder(trace)
            self.workers.append(
                Worker(rank, transport, own, on, in_flight=in_flight, gated=False, library=library, record=record)
            )
        for worker in self.workers:
            worker.on_failure(self._fail)
        try:
            for number, plan in enumerate(plans):
                for worker in self.workers:
                    worker.install(number, plan.for_rank(worker.rank), _parts(plan, worker.rank, variables or {}))
        except BaseException:
            self.close()
            raise

    def issue(
        self, inputs: Mapping[str, Tensor] | None = None, scalars: Mapping[str, float] | None = None, plan: int = 0
    ) -> list[Call]:
        """Issue a call of a plan on every rank; return the handles, rank by rank."""
        return [worker.issue(plan, inputs, scalars) for worker in self.workers]

    def run(
        self, inputs: Mapping[str, Tensor] | None = None, scalars: Mapping[str, float] | None = None, plan: int = 0
    ) -> list[Tensor]:
        """Call a plan, wait, and return its logical results.  Raises a worker's failure, or TimeoutError."""
        calls = self.issue(inputs, scalars, plan)
        try:
            for call in calls:
                call.wait(self._timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.explain()}") from None
        return self.results(calls, plan)

    def results(self, calls: Sequence[Call], plan: int = 0) -> list[Tensor]:
        """The logical results of a call, assembled from the parts of its ranks."""
        found = []
        for result in self.plans[plan].results:
            place = result.placement
            parts = {
                i: calls[place.ranks[i]].result(result.index, self._timeout)
                for i in sources(place, result.sbp, place.ranks[0])
            }
            found.append(assemble(parts, result.shape, place, result.sbp))
        return found

    def variable(self, name: str) -> Tensor:
        """The logical value of a variable that a plan lists.  Call it only while nothing is running."""
        variable = next(v for plan in self.plans for v in plan.variables if v.name == name)
        place = variable.placement
        parts = {i: self.workers[place.ranks[i]].variables[name] for i in sources(place, variable.sbp, place.ranks[0])}
        return assemble(parts, variable.shape, place, variable.sbp).clone()

    def explain(self) -> str:
        """What every rank waits for, as text."""
        return "\n".join(worker.explain() for worker in self.workers)

    def close(self) -> None:
        """End all threads."""
        for worker in self.workers:
            worker.close()

    def _fail(self, failure: BaseException) -> None:
        for worker in self.workers:
            worker.fail(failure)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _parts(plan: Plan, rank: int, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    listed = {v.name: v for v in plan.variables}
    found = {}
    for name, tensor in variables.items():
        variable = listed.get(name)
        if variable is None:
            found[name] = tensor.detach().clone()
        elif rank in variable.placement:
            found[name] = part(tensor.detach(), variable.placement, variable.sbp, variable.placement.index(rank))
    return found
