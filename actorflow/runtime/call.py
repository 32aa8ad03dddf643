"""The handle of one call of a plan on one rank: its inputs, its results, and whether it is done."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from actorflow.devices import Device, Mark
from actorflow.support import background
from actorflow_compiler.core.errors import ActorError, ActorflowError, CallError


class TakesBack(Protocol):
    """What a call has changed in the script."""

    @property
    def places(self) -> Sequence[str]:
        """Where that is, for people."""

    @property
    def lines(self) -> Collection[str]:
        """The lines of the user's code at which it can be taken back."""

    def carry_out(self, line: str) -> None:
        """Leave the script as it is in PyTorch where an op of this line fails."""


class Call:
    """The handle of one issued call on one rank.

    ``results[i]`` is None until the sink of result i has fired on this rank; what it holds may be read when
    ``marks[i]`` has passed, where there is one.
    """

    __slots__ = (
        "_changed",
        "_device",
        "_failure",
        "_kinds",
        "before",
        "begun",
        "ended",
        "failed_at",
        "fired",
        "inputs",
        "issued",
        "leaves",
        "left",
        "lost",
        "marks",
        "number",
        "plan",
        "results",
        "scalars",
        "start",
        "told",
        "undo",
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
        device: Device,
        leaves: Sequence[str] = (),
        undo: TakesBack | None = None,
    ) -> None:
        self.number = number  # counted from 0 over all plans of the run
        self.plan = plan
        self.inputs = inputs
        self.scalars = scalars
        self.leaves = leaves  # what the script has changed beside the plan's variables because of it
        self.undo = undo  # what else it has changed, which can be taken back
        self.failed_at = ""  # the line of the user's code where it was given up
        self.left = left  # firings on this rank until it is done
        self.begun = False  # its actors may fire
        self.issued = time.perf_counter_ns()  # when the script made it
        self.fired = False  # every actor of this rank has, for this call
        self.start = device.here().mark()  # after what the caller had put on the device before
        self.ended: Sequence[Mark] = ()  # once it has fired: when these have passed, the device is done with it
        self.marks: dict[int, Mark | None] = {}  # by result: when it can be read; None: it could be, and was
        self.results: list[Tensor | None] = [None] * (max(results, default=-1) + 1)
        self.lost: BaseException | None = None  # why it was given up, where nothing else was lost with it
        self.told = False  # whether the script has got that
        self.before: dict[str, Tensor] = {}  # values of variables that it has changed, where they can be put back
        self._kinds = results
        self._changed = changed
        self._failure = failure
        self._device = device

    @property
    def done(self) -> bool:
        """Whether all that this rank does for the call is done, on its device as well; never blocks."""
        if self.fired and self.ended and all(mark.passed() for mark in self.ended):
            self._settle()
        return self.fired and not self.ended

    def wait(self, timeout: float | None = None, *, tell: bool = True) -> None:
        """Return when the call is done on this rank.

        Raises what it failed with, for the script to ``tell``, the worker's failure, or TimeoutError after ``timeout``
        seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self._until(lambda: self.fired, end, timeout, "its end")
        if tell:
            self.tell()
        for mark in self.ended:
            self._pass(mark, end, timeout, "its end")
        self._settle()

    def result(self, index: int, timeout: float | None = None) -> Tensor:
        """Return result ``index`` as soon as it can be read; it belongs to the caller.

        Raises what the call failed with, the worker's failure, CallError where this rank gets no such result, and
        TimeoutError after ``timeout`` seconds.
        """
        if index not in self._kinds:
            raise CallError(f"result {index} of call {self.number} was asked for; this rank gets {sorted(self._kinds)}")
        end = None if timeout is None else time.monotonic() + timeout
        self._until(lambda: self.results[index] is not None or self.lost is not None, end, timeout, f"result {index}")
        self.tell()
        found = self.results[index]
        assert found is not None
        if index in self.marks:
            mark = self.marks[index]
            if mark is not None:
                self._pass(mark, end, timeout, f"result {index}")
                self.marks[index] = None
            self._device.here().use([found])  # its memory is the runtime's, and the caller lets go of it at any time
        return found

    def lose(self, error: BaseException, line: str) -> None:
        """Give it up: it has failed at a ``line`` and changed nothing; on the compute thread."""
        with self._changed:
            self.lost, self.failed_at = error, line
            self._changed.notify_all()

    def tell(self, more: str = "") -> None:
        """Raise what it failed with, if it has: the script knows it then, and has what it had changed taken back.

        ``more`` is one more sentence for it.
        """
        if self.lost is None:
            return
        with self._changed:
            undo = None if self.told else self.undo
            self.told = True
        if undo is not None:
            undo.carry_out(self.failed_at)
        raise told(self.lost, more) if more else fresh(self.lost)

    def give(self, found: Iterable[tuple[int, Tensor]], mark: Mark | None) -> None:
        """Results are there, or will be when the mark has passed; on the compute thread."""
        with self._changed:
            for index, value in found:
                if mark is not None:
                    self.marks[index] = None if mark.passed() else mark
                self.results[index] = value
            self._changed.notify_all()

    def keep(self) -> None:
        """The worker fails: what can be read now can be read later, too; never blocks.

        Called before transfers are given up: what passes after that may be what one of them left.
        """
        for index, mark in tuple(self.marks.items()):
            with suppress(RuntimeError):  # a device that has failed says nothing
                if mark is not None and mark.passed():
                    self.marks[index] = None
        with suppress(RuntimeError):
            _ = self.done

    def _settle(self) -> None:
        """The device is done with the call."""
        self.ended = ()
        self.marks = dict.fromkeys(self.marks)

    def _pass(self, mark: Mark, end: float | None, timeout: float | None, what: str) -> None:
        if end is not None and not passes(mark, end):
            raise TimeoutError(
                f"call {self.number}: {what} did not come in {timeout} s; its device is not done with it"
            )
        mark.wait_on_host()
        failure = self._failure()
        if failure is not None:
            raise fresh(failure)

    def _until(self, ready: Callable[[], bool], end: float | None, timeout: float | None, what: str) -> None:
        if ready():
            return
        with self._changed:
            while not ready():
                failure = self._failure()
                if failure is not None:
                    raise fresh(failure)
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"call {self.number}: {what} did not come in {timeout} s")
                self._changed.wait(left)


class Behind:
    """Calls whose actors have all fired, and that a device which runs ahead may not be done with yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque()  # from the first to the last that fired

    def add(self, call: Call) -> None:
        """A call has fired."""
        with self._lock:
            self._calls.append(call)

    def keep_pace(self, before: Sized, most: int, end: float | None = None) -> None:
        """Block until fewer than ``most`` calls are behind, those in ``before``, which have not fired, among them.

        Raises TimeoutError where ``time.monotonic()`` comes to ``end`` before.
        """
        while self._calls:
            with self._lock:
                while self._calls and self._calls[0].done:
                    self._calls.popleft()
                late = self._calls[0] if self._calls and len(before) + len(self._calls) >= most else None
            if late is None:
                return
            late.wait(None if end is None else max(0.0, end - time.monotonic()))

    def has(self, plans: Collection[int]) -> bool:
        """Whether a call of one of these plans is behind."""
        with self._lock:
            return any(call.plan in plans and not call.done for call in self._calls)

    def wait(self, end: float | None = None) -> None:
        """Block until no call is behind.  Raises TimeoutError where ``time.monotonic()`` comes to ``end`` before."""
        self.keep_pace((), 1, end)

    def keep(self) -> None:
        """See ``Call.keep``."""
        with self._lock:
            for call in self._calls:
                call.keep()


def passes(mark: Mark, end: float) -> bool:
    """Whether a mark passes before ``time.monotonic()`` is ``end``.

    A device can only be waited for without an end, so a thread does that.
    """
    if mark.passed():
        return True
    passed = threading.Event()

    def wait() -> None:
        with suppress(RuntimeError):  # who asks for the mark itself gets it
            mark.wait_on_host()
        passed.set()

    background.start(wait, "actorflow mark")
    return passed.wait(max(0.0, end - time.monotonic()))


def fresh(failure: BaseException) -> BaseException:
    """A failure to raise once more, on whatever thread waits: its own message and cause, no traceback of others."""
    if not isinstance(failure, ActorflowError):
        return failure
    again = copy.copy(failure)
    again.__cause__ = failure.__cause__
    return again


def told(error: BaseException, more: str) -> BaseException:
    """An actor's error with one more sentence."""
    made = ActorError(f"{error}. {more[:1].upper()}{more[1:]}")
    made.__cause__ = error.__cause__
    return made


__all__ = ["Behind", "Call", "TakesBack", "fresh", "told"]
