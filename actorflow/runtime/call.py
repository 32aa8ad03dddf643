"""One call of a job enters the worker as its inputs; its results leave here, as they become ready."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from actorflow_compiler.errors import ActorflowError, CallError


class Call:
    """The handle of one issued call on one rank.

    ``results[i]`` is None until the sink of result i has fired on this rank.
    """

    __slots__ = (
        "_changed",
        "_failure",
        "_kinds",
        "begun",
        "done",
        "inputs",
        "left",
        "number",
        "plan",
        "results",
        "scalars",
    )

    def __init__(
        self,
        number: int,
        plan: int,
        inputs: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        results: frozenset[int],
        left: int,
        changed: threading.Condition,
        failure: Callable[[], BaseException | None],
    ) -> None:
        self.number = number  # counted from 0 over all plans of the run
        self.plan = plan
        self.inputs = inputs
        self.scalars = scalars
        self.left = left  # firings on this rank until it is done
        self.begun = False  # its actors may fire
        self.done = False
        self.results: list[Tensor | None] = [None] * (max(results, default=-1) + 1)
        self._kinds = results
        self._changed = changed
        self._failure = failure

    def wait(self, timeout: float | None = None) -> None:
        """Return when every actor of this rank has fired for the call.

        Raises the worker's failure, or TimeoutError after ``timeout`` seconds.
        """
        self._until(lambda: self.done, timeout, "its end")

    def result(self, index: int, timeout: float | None = None) -> Tensor:
        """Return result ``index`` as soon as its sink has fired; it belongs to the caller.

        Raises the worker's failure, CallError where this rank gets no such result, and TimeoutError
        after ``timeout`` seconds.
        """
        if index not in self._kinds:
            raise CallError(f"result {index} of call {self.number} was asked for; this rank gets {sorted(self._kinds)}")
        self._until(lambda: self.results[index] is not None, timeout, f"result {index}")
        found = self.results[index]
        assert found is not None
        return found

    def _until(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        if ready():
            return
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not ready():
                failure = self._failure()
                if failure is not None:
                    raise fresh(failure)
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"call {self.number}: {what} did not come in {timeout} s")
                self._changed.wait(left)


def fresh(failure: BaseException) -> BaseException:
    """A failure to raise once more, on whatever thread waits: its own message and cause, no traceback of others."""
    if not isinstance(failure, ActorflowError):
        return failure
    again = copy.copy(failure)
    again.__cause__ = failure.__cause__
    return again


__all__ = ["Call", "fresh"]
