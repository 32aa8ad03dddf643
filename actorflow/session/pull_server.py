"""Other ranks' requests for results and values go in; the bytes come out once this rank is where the asking one is."""

from __future__ import annotations

from collections.abc import Iterable

from actorflow.runtime.results import ResultDropped, ResultPart
from actorflow.session.context import Context, Running
from actorflow.variables.variable_table import OfferedValue, VariablePart

__all__ = ["PullServer"]


class PullServer:
    """Answers requests, each on a thread of its own, which waits as long as it has to."""

    def __init__(self, context: Context) -> None:
        self._context, self._gates = context, context.gates
        cluster = context.cluster
        cluster.serve(VariablePart, self.variable_part)
        cluster.serve(OfferedValue, self.offered_value)
        cluster.serve(ResultPart, self.result_part)
        cluster.serve(ResultDropped, self.result_dropped)

    def variable_part(self, asked: VariablePart) -> Iterable[bytes]:
        """This rank's part of a variable, as the calls and writes that the asking rank has seen leave it."""

        def there() -> bool:
            """Whether this rank has taken in, and written, what the one that reads has before its next call."""
            running = self._context.running
            if running is None:
                return False
            variables = running.variables
            known = asked.name in variables.layouts or self._gates.begun > asked.calls
            return known and (not asked.writes or variables.writes >= asked.writes)

        self._gates.until_done(asked.calls, there)
        return [self._running().variables.serve(asked.name)]

    def offered_value(self, asked: OfferedValue) -> Iterable[bytes]:
        """A value that the master offers during a call."""
        running = self._running()
        self._gates.until(lambda: running.variables.offered >= asked.call)
        return [running.variables.serve_offer(asked.name)]

    def result_part(self, asked: ResultPart) -> Iterable[bytes]:
        """This rank's part of a result, when the call is done."""
        self._gates.until_done(asked.call + 1)
        return [self._running().results.serve(asked.call, asked.index)]

    def result_dropped(self, asked: ResultDropped) -> Iterable[bytes]:
        """Another rank's handle on a result is gone; that rank may be through with its first call by now."""
        self._running().results.forget(asked.call, asked.index)
        return []

    def _running(self) -> Running:
        """What runs plans here, once there is one."""
        self._gates.until(lambda: self._context.running is not None)
        assert self._context.running is not None
        return self._context.running
