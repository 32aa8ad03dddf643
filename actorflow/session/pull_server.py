"""Serve other ranks' requests for results and values, once this rank has made the same calls as the asking one."""

from __future__ import annotations

from collections.abc import Iterable

from actorflow.runtime.results import ResultDropped, ResultPart
from actorflow.session.context import PlanRuntime, SessionContext
from actorflow.variables.variable_table import OfferedValue, VariablePart
from actorflow_compiler.core.errors import ClusterError

__all__ = ["PullServer"]


class PullServer:
    """Answers requests, each on its own thread, which waits until this rank has made the calls it depends on."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._barrier = context, context.barrier
        cluster = context.cluster
        cluster.serve(VariablePart, self.variable_part)
        cluster.serve(OfferedValue, self.offered_value)
        cluster.serve(ResultPart, self.result_part)
        cluster.serve(ResultDropped, self.result_dropped)

    def variable_part(self, request: VariablePart) -> Iterable[bytes]:
        """This rank's part of a variable, after the calls and writes that the asking rank has made."""

        def there() -> bool:
            """Whether this rank knows the variable, and has made the writes that the asking rank has made."""
            runtime = self._context.runtime
            if runtime is None:
                return False
            variables = runtime.variables
            known = request.name in variables.layouts or self._barrier.begun > request.calls
            return known and (not request.writes or variables.writes >= request.writes)

        self._barrier.wait_until_done(request.calls, there)
        self._barrier.wait_if_other(request.calls, request.history)
        runtime = self._running()
        found = runtime.variables.serve(request.name)
        changed = runtime.worker.last_change(request.name)
        if changed >= request.calls:
            raise ClusterError(
                f"{request.name} was asked for as {request.calls} calls have left it, and call {changed + 1} has "
                f"changed it on rank {self._context.rank}, which holds it. A job does not wait for a rank that has no "
                "part in it, unless every rank reads the value: read it on every rank, not in a branch of one"
            )
        return [found]

    def offered_value(self, request: OfferedValue) -> Iterable[bytes]:
        """A value that the master offers during a call."""
        runtime = self._running()
        self._barrier.wait_until(lambda: runtime.variables.offered >= request.call)
        return [runtime.variables.serve_offer(request.name)]

    def result_part(self, request: ResultPart) -> Iterable[bytes]:
        """This rank's part of a result, when the call is done."""
        self._barrier.wait_until_done(request.call + 1)
        self._barrier.wait_if_other(request.call + 1, request.history)
        return [self._running().results.serve(request.call, request.index)]

    def result_dropped(self, request: ResultDropped) -> Iterable[bytes]:
        """Note that another rank has freed its handle on a result; this rank may have no plan yet."""
        self._running().results.forget(request.call, request.index)
        return []

    def _running(self) -> PlanRuntime:
        """This rank's runtime; blocks until there is one."""
        self._barrier.wait_until(lambda: self._context.runtime is not None)
        assert self._context.runtime is not None
        return self._context.runtime
