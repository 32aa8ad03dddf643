"""Start the worker with the first plan, connect it to the run, and end it with the run."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from actorflow.control.cluster import Cluster
from actorflow.control.drops import DropSet
from actorflow.devices import Device, make_device
from actorflow.rendezvous.device_assignment import device_of, idle_oversubscribe
from actorflow.rendezvous.failure import Failure, FailureKind
from actorflow.rendezvous.options import NCCL_TIMEOUT
from actorflow.runtime.results import Results
from actorflow.runtime.story import too_late
from actorflow.runtime.worker import Worker
from actorflow.session.context import PlanRuntime, SessionContext
from actorflow.support.refusals import MessageRefused
from actorflow.support.terminal import say
from actorflow.transport.gloo import GlooPlane
from actorflow.transport.messages import DataPlane
from actorflow.transport.nccl import NcclPlane, nccl_version
from actorflow.transport.staged import StagedPlane
from actorflow.transport.timeouts import Started
from actorflow.variables.rebinding import RebindingTable
from actorflow.variables.variable_table import VariableTable
from actorflow_compiler.plan.plan import Plane

__all__ = ["Lifecycle", "planes_of"]


class Lifecycle:
    """Starts a session's worker, passes it events of the run, and ends it."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        context.cluster.on_call_agreed(self._go)
        context.cluster.on_failure(self._failed)

    def start(self, kinds: tuple[str, ...], seed: int) -> PlanRuntime:
        """Make the worker and the rest of the runtime; ``kinds`` are those of all ranks' devices."""
        context, cluster = self._context, self._context.cluster
        device = make_device(device_of(kinds[context.rank], context.settings, kinds))
        if context.rank == 0 and (note := idle_oversubscribe(context.settings, kinds)):
            say(note)
        planes: dict[str, DataPlane] = {}
        if isinstance(cluster, Cluster):
            planes = planes_of(context.rank, cluster.store(), device, context.settings.transfer_limit, self._late)
            nccl = planes.get(Plane.NCCL)
            if isinstance(nccl, NcclPlane):
                cluster.on_end(nccl.finish)
        record = None
        for observer in context.observers:  # observers that record firings come after those that only count
            record = observer.recorder() or record
        worker = Worker(context.rank, cluster, planes, device, record=record, cores=context.settings.cores)
        variables = VariableTable(
            cluster, context.names, worker.variables, device.where, worker.wait_all, lambda: context.barrier.begun,
            context.together, context.barrier.notify, lambda: context.capturing,
            worker.before_write, context.barrier.history,
        )  # fmt: skip
        results = Results(cluster, device, context.barrier.history)
        runtime = PlanRuntime(worker, variables, results, RebindingTable(variables), kinds, seed)
        context.runtime = runtime
        worker.permit(context.barrier.agreed_calls - 1)
        context.barrier.notify()
        for observer in context.observers:
            observer.started(worker)
        cluster.on_message(worker.deliver)
        cluster.on_line(worker.attach)
        worker.on_failure(self._worker_failed)
        if isinstance(cluster, Cluster):
            worker.on_lost(cluster.say)
            cluster.on_order(worker.obey)
        if cluster.failure is not None:
            self._failed(cluster.failure)
        return runtime

    def finish(self) -> None:
        """Wait for every issued call and for the observers; raises the first failure."""
        runtime = self._context.runtime
        if runtime is not None:
            runtime.worker.wait_all()
        try:
            for observer in self._context.observers:
                observer.finish()
        finally:
            if runtime is not None:
                runtime.results.close()

    # -- other threads -----------------------------------------------------------------------------

    def _go(self, number: int, dropped: DropSet) -> None:
        """On agreement: every rank has made this call, and has released these plans and variables."""
        self._context.barrier.agreed(number, dropped)
        if self._context.runtime is not None:
            self._context.runtime.worker.permit(number)

    def _late(self, started: Started) -> None:
        """On a timeout of a transfer: fail with a report of what every queue of this rank waits for."""
        runtime = self._context.runtime
        assert runtime is not None
        worker = runtime.worker
        worker.fail(too_late(self._context.rank, started, NCCL_TIMEOUT.variable, worker.explain()))

    def _failed(self, failure: Failure) -> None:
        """On failure of the run, on this or another rank."""
        self._context.barrier.notify()
        if self._context.runtime is not None:
            self._context.runtime.worker.fail(failure.error())

    def _worker_failed(self, error: BaseException) -> None:
        """On failure of an actor of this rank."""
        cluster = self._context.cluster
        if isinstance(error, MessageRefused) and isinstance(cluster, Cluster):
            cluster.accuse(error)
        elif cluster.explain(error) is error:  # else a lost peer is the cause, and is reported as such
            cluster.abort(FailureKind.RAISED, f"failed: {error}")


def planes_of(
    rank: int, store: Store, device: Device, patience: float, late: Callable[[Started], None]
) -> dict[str, DataPlane]:
    """The data planes that a rank can use with its device, by their names in plans.

    ``store`` is shared by all ranks of the run.  The first NCCL call that takes longer than ``patience`` seconds is
    passed to ``late``, which has to end the run.
    """
    if not device.ahead:
        return {Plane.GLOO: GlooPlane(rank, store)}
    planes: dict[str, DataPlane] = {Plane.GLOO: StagedPlane(GlooPlane(rank, store, room=device.staging), device)}
    if nccl_version():
        planes[Plane.NCCL] = NcclPlane(rank, store, device, patience=patience, late=late)
    return planes
