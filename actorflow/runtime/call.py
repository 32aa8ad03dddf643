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
from actorflow.standins.logical_batch import ArrivingInput
from actorflow.support import background
from actorflow.transport.messages import Stamp
from actorflow_compiler.core.errors import ActorError, ActorflowError, CallError


class TakesBack(Protocol):
    """What a call has changed in the script, and how to take it back."""

    @property
    def places(self) -> Sequence[str]:
        """Names of the changed places, for messages."""

    @property
    def lines(self) -> Collection[str]:
        """The lines of the user's code at which a failure can be taken back."""

    def carry_out(self, line: str) -> None:
        """Put the script into the state in which PyTorch leaves it when an op of this line fails."""


class Call:
    """The handle of one issued call on one rank.

    ``results[i]`` is None until the sink of result i has fired on this rank.  If ``marks[i]`` holds a mark, the tensor
    may be read once that mark has passed.
    """

    __slots__ = (
        "_changed",
        "_device",
        "_failure",
        "_kinds",
        "before",
        "begun",
        "by_rows",
        "common",
        "ended",
        "failed_at",
        "fired",
        "free",
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
        "stamp",
        "start",
        "told",
        "undo",
    )

    def __init__(
        self,
        number: int,
        plan: int,
        inputs: Mapping[str, Tensor | ArrivingInput],
        scalars: Mapping[str, float],
        results: frozenset[int],
        left: int,
        changed: threading.Condition,
        failure: Callable[[], BaseException | None],
        device: Device,
        leaves: Sequence[str] = (),
        undo: TakesBack | None = None,
        stamp: Stamp | None = None,
        free: bool = True,
    ) -> None:
        self.number = number  # counted from 0 over all plans of the run
        self.stamp = stamp  # shows other ranks that the call is made; None: no other rank asks
        self.common = number if stamp is None else stamp.call  # its number as all ranks count calls
        self.free = free  # it may begin before all ranks have made it
        self.plan = plan
        self.inputs = dict(inputs)  # those that arrive are replaced by their rows when a source takes them
        self.by_rows = frozenset(name for name, given in inputs.items() if isinstance(given, ArrivingInput))
        self.scalars = scalars
        self.leaves = leaves  # names of what the call changes in the script for good, beside the plan's variables
        self.undo = undo  # takes back the call's other changes in the script
        self.failed_at = ""  # the line of the user's code at which the call failed
        self.left = left  # firings on this rank until the call is done
        self.begun = False  # the call's actors may fire
        self.issued = time.perf_counter_ns()  # when the script made the call
        self.fired = False  # every firing of this call on this rank has ended on the host
        self.start = device.here().mark()  # passes after the work that the caller had put on the device before
        self.ended: Sequence[Mark] = ()  # set when ``fired``: once these have passed, the device is done with the call
        self.marks: dict[int, Mark | None] = {}  # by result: passes when it can be read; None once it has passed
        self.results: list[Tensor | None] = [None] * (max(results, default=-1) + 1)
        self.lost: BaseException | None = None  # why the call alone was given up; the run goes on
        self.told = False  # ``lost`` was raised in the script
        self.before: dict[str, Tensor] = {}  # old values of variables that the call has changed, to put them back
        self._kinds = results
        self._changed = changed
        self._failure = failure
        self._device = device

    @property
    def done(self) -> bool:
        """Whether all work of this rank for the call is done, on its device as well.  Never blocks."""
        if self.fired and self.ended and all(mark.passed() for mark in self.ended):
            self._settle()
        return self.fired and not self.ended

    def wait(self, timeout: float | None = None, *, tell: bool = True) -> None:
        """Return when the call is done on this rank.

        Raises the error of the call if it was given up (only if ``tell``, see the method of that name), the worker's
        failure, or TimeoutError after ``timeout`` seconds.
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

        Raises the error of a call that was given up, the worker's failure, CallError if this rank gets no such result,
        and TimeoutError after ``timeout`` seconds.
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
            self._device.here().use([found])  # a queue of the runtime allocated it; the caller may free it at any time
        return found

    def arriving(self, names: Collection[str]) -> ArrivingInput | None:
        """One of these inputs whose rows are still being read; None if all are here, which are tensors from then on.

        Raises the error of the reading.  For the compute thread.
        """
        for name in self.by_rows.intersection(names):
            given = self.inputs[name]
            if isinstance(given, ArrivingInput):
                if not given.read.ready():
                    return given
                self.inputs[name] = given.value()
        return None

    def lose(self, error: BaseException, line: str) -> None:
        """Give the call up: it has failed at ``line`` of the user's code.  For the compute thread."""
        with self._changed:
            self.lost, self.failed_at = error, line
            self._changed.notify_all()

    def tell(self, more: str = "") -> None:
        """Raise the error of the call in the script if the call was given up; else do nothing.

        The first time, it takes back what the call had changed in the script before it raises.  ``more`` is one more
        sentence for the message.
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
        """Hand over results, which may be read when ``mark`` has passed (None: now).  For the compute thread."""
        with self._changed:
            for index, value in found:
                if mark is not None:
                    self.marks[index] = mark
                self.results[index] = value
            self._changed.notify_all()

    def keep(self) -> None:
        """Note which marks have passed, so that results which can be read now stay readable.  Never blocks.

        The worker calls it when it fails, before transfers are aborted: a mark that passes after that may guard memory
        which an aborted transfer left half written.
        """
        for index, mark in tuple(self.marks.items()):
            with suppress(RuntimeError):  # a device that has failed raises when asked
                if mark is not None and mark.passed():
                    self.marks[index] = None
        with suppress(RuntimeError):
            _ = self.done

    def _settle(self) -> None:
        """Forget the marks: the device is done with the call."""
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
    """Calls whose actors have all fired, but whose work the device may not have finished.

    There are some only on a device that runs ahead of the host, such as a GPU.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque()  # in the order in which they fired

    def add(self, call: Call) -> None:
        """Add a call whose actors have all fired."""
        with self._lock:
            self._calls.append(call)

    def limit_in_flight(self, before: Sized, most: int, end: float | None = None) -> None:
        """Block until fewer than ``most`` calls are unfinished, or none of the calls here is.

        Calls count that have not fired, which are in ``before``, and calls here with which the device is not done.

        Raises TimeoutError if ``time.monotonic()`` reaches ``end`` first.
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
        """Whether the device is not done with a call of one of these plans."""
        with self._lock:
            return any(call.plan in plans and not call.done for call in self._calls)

    def wait(self, end: float | None = None) -> None:
        """Block until the device is done with all calls; TimeoutError if ``time.monotonic()`` reaches ``end`` first."""
        self.limit_in_flight((), 1, end)

    def keep(self) -> None:
        """See ``Call.keep``."""
        with self._lock:
            for call in self._calls:
                call.keep()


def passes(mark: Mark, end: float) -> bool:
    """Wait for a mark until ``time.monotonic()`` is ``end``, and return whether it passed.

    Waiting for a mark has no timeout, so a background thread does it.
    """
    if mark.passed():
        return True
    passed = threading.Event()

    def wait() -> None:
        with suppress(RuntimeError):  # the caller meets the same error when it waits for the mark
            mark.wait_on_host()
        passed.set()

    background.start(wait, "actorflow mark")
    return passed.wait(max(0.0, end - time.monotonic()))


def fresh(failure: BaseException) -> BaseException:
    """A copy of a failure, to raise on another thread: same message and cause, without the traceback so far."""
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
