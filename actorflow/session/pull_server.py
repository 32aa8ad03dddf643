"""Other ranks' requests for results and values go in; the bytes come out once this rank is where the asking one is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from actorflow.control.cluster import Alone, Cluster
from actorflow.runtime.results import ResultDropped, ResultPart, Results
from actorflow.runtime.worker import Worker
from actorflow.session.barrier import Gates
from actorflow.variables.state import OfferedValue, VariablePart, Variables

__all__ = ["PullServer"]


class Held(Protocol):
    """What of a session is served; results and variables are there with the worker."""

    worker: Worker | None
    results: Results
    variables: Variables


class PullServer:
    """Answers requests, each on a thread of its own, which waits as long as it has to."""

    def __init__(self, held: Held, cluster: Alone | Cluster, gates: Gates) -> None:
        self._held, self._gates = held, gates
        cluster.serve(VariablePart, self.variable_part)
        cluster.serve(OfferedValue, self.offered_value)
        cluster.serve(ResultPart, self.result_part)
        cluster.serve(ResultDropped, self.result_dropped)

    def variable_part(self, asked: VariablePart) -> Iterable[bytes]:
        """This rank's part of a variable, as the calls and writes that the asking rank has seen leave it."""
        held, gates = self._held, self._gates

        def there() -> bool:
            """Whether this rank has taken in, and written, what the one that reads has before its next call."""
            if held.worker is None:
                return False
            known = asked.name in held.variables.layouts or gates.begun > asked.calls
            return known and (not asked.writes or held.variables.writes >= asked.writes)

        gates.until_done(asked.calls, there)
        return [held.variables.serve(asked.name)]

    def offered_value(self, asked: OfferedValue) -> Iterable[bytes]:
        """A value that the master offers during a call."""
        held = self._held
        self._gates.until(lambda: held.worker is not None and held.variables.offered >= asked.call)
        return [held.variables.serve_offer(asked.name)]

    def result_part(self, asked: ResultPart) -> Iterable[bytes]:
        """This rank's part of a result, when the call is done."""
        self._gates.until_done(asked.call + 1)
        return [self._held.results.serve(asked.call, asked.index)]

    def result_dropped(self, asked: ResultDropped) -> Iterable[bytes]:
        """Another rank's handle on a result is gone; that rank may be through with its first call by now."""
        self._gates.until(lambda: self._held.worker is not None)
        self._held.results.forget(asked.call, asked.index)
        return []
