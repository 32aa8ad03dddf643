"""Serve other ranks' requests for results and values, once this rank has made the same calls as the asking one."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from actorflow.runtime.results import ResultDropped, ResultPart
from actorflow.session.context import PlanRuntime, SessionContext
from actorflow.variables.variable_table import OfferedValue, VariablePart
from actorflow_compiler.core.errors import ClusterError

__all__ = ["PullServer"]


class PullServer:
    """Answers requests, each when this rank has made the calls it depends on."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._barrier = context, context.barrier
        cluster = context.cluster
        cluster.serve(VariablePart, self.variable_part, lambda request: self._when(request.calls, request))
        cluster.serve(
            OfferedValue, self.offered_value, lambda request: self._barrier.when(lambda: self._is_offered(request))
        )
        cluster.serve(ResultPart, self.result_part, lambda request: self._when(request.call + 1, request))
        cluster.serve(
            ResultDropped, self.result_dropped, lambda request: self._barrier.when(lambda: self._made(request.call + 1))
        )

    def _made(self, calls: int) -> bool:
        return self._context.runtime is not None and self._barrier.begun >= calls

    def _when(self, calls: int, request: VariablePart | ResultPart) -> Future[None]:
        """What is done when this rank has made so many calls, as the asking rank has, and knows the variable."""

        def there() -> bool:
            known = self._made(calls) and self._barrier.alike(calls, request.history)
            return known and (isinstance(request, ResultPart) or self._knows(request))

        return self._barrier.when(there)

    def _knows(self, request: VariablePart) -> bool:
        """Whether this rank knows the variable, and has made the writes that the asking rank has made."""
        runtime = self._context.runtime
        if runtime is None:
            return False
        variables = runtime.variables
        known = request.name in variables.layouts or self._barrier.begun > request.calls
        return known and (not request.writes or variables.writes >= request.writes)

    def _is_offered(self, request: OfferedValue) -> bool:
        runtime = self._context.runtime
        return runtime is not None and runtime.variables.offered >= request.call

    def variable_part(self, request: VariablePart) -> Iterable[bytes]:
        """This rank's part of a variable, after the calls and writes that the asking rank has made."""
        self._barrier.wait_until_done(request.calls, lambda: self._knows(request))
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
        self._barrier.wait_until(lambda: self._is_offered(request))
        return [runtime.variables.serve_offer(request.name)]

    def result_part(self, request: ResultPart) -> Iterable[bytes]:
        """This rank's part of a result, when the call is done."""
        self._barrier.wait_until_done(request.call + 1)
        self._barrier.wait_if_other(request.call + 1, request.history)
        return [self._running().results.serve(request.call, request.index)]

    def result_dropped(self, request: ResultDropped) -> Iterable[bytes]:
        """Note that another rank has freed its handle on a result, when this one has made the call."""
        self._barrier.wait_until(lambda: self._made(request.call + 1))
        self._running().results.forget(request.call, request.index, request.rank)
        return []

    def _running(self) -> PlanRuntime:
        """This rank's runtime; blocks until there is one."""
        self._barrier.wait_until(lambda: self._context.runtime is not None)
        assert self._context.runtime is not None
        return self._context.runtime
