"""The failure of a run, as text and as an exception, and the end of this process after it."""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from actorflow_compiler.core.errors import ActorflowError, CallError, ClusterError

LAUNCHER = -1  # ``noticed_by`` when it was the launcher
CALLBACK_SECONDS = 2.5  # for callbacks of a failed run, such as writing a trace; the launcher waits a little longer


class FailureKind(enum.StrEnum):
    """How a rank failed."""

    KILLED = "killed"  # this and the next three: how peers see a rank that is gone
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    RAISED = "raised"  # its script raised
    ENDED = "ended"  # its script exited with a non-zero status, or was asked to stop
    CALL = "call"  # ranks did not take the same steps
    JOIN = "join"  # the ranks could not come together
    MALFORMED = "malformed"  # it has sent what no rank sends


# texts for ranks that are gone, as their peers report them
LOST: dict[FailureKind, str] = {
    FailureKind.KILLED: "was killed or crashed (its connections closed)",
    FailureKind.STOPPED: "stopped answering",
    FailureKind.UNREACHABLE: "cannot be reached any more",
    FailureKind.BROKEN: "still answers, but its connection broke",
}
ADVICE: dict[FailureKind, str] = {
    FailureKind.KILLED: "Look into its log; the kernel's log (dmesg) tells whether it ran out of memory.",
    FailureKind.STOPPED: "It hangs or was stopped (SIGSTOP, a debugger, a suspended machine).",
    FailureKind.UNREACHABLE: "Look at its host and the network between.",
    FailureKind.BROKEN: "Look at the network between the two hosts.",
    FailureKind.MALFORMED: "Install the same version of actorflow on every node; where they have it, see who else "
    "knows the token of the run.",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run is over: which rank failed, how, and which rank noticed."""

    rank: int
    host: str
    pid: int  # 0 where it is not known
    kind: FailureKind
    cause: str  # continues "rank K (host, pid) …"; a whole text for CALL and JOIN
    noticed_by: int  # rank, or LAUNCHER

    @property
    def text(self) -> str:
        """One line for people: the rank, its host and process, the cause, who noticed."""
        if self.kind in (FailureKind.CALL, FailureKind.JOIN):
            return self.cause
        who = f"rank {self.rank} ({self.host}{f', pid {self.pid}' if self.pid else ''})"
        if self.noticed_by == self.rank:
            return f"{who} {self.cause}"
        by = "its launcher" if self.noticed_by == LAUNCHER else f"rank {self.noticed_by}"
        return f"{who} {self.cause}; noticed by {by}"

    def error(self) -> ActorflowError:
        """The exception to raise in a script that waits for the failed run."""
        if self.kind == FailureKind.CALL:
            return CallError(self.cause)
        if self.kind == FailureKind.JOIN:
            return ClusterError(self.cause)
        advice = ADVICE.get(self.kind, "Look into its log for the error that came first.")
        return ClusterError(f"the run ended because {self.text}. {advice}")


class FailureCallbacks:
    """Callbacks for a failure of the run, each called on its own thread, for a bounded time."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []
        self._threads: list[threading.Thread] = []
        self._deadline = 0.0

    def add(self, callback: Callable[[], object]) -> None:
        """Add a callback; any thread."""
        self._callbacks.append(callback)

    def start(self) -> FailureCallbacks:
        """Start all callbacks; further calls do nothing."""
        if not self._deadline:
            self._deadline = time.monotonic() + CALLBACK_SECONDS
            self._threads = [threading.Thread(target=c, name="actorflow-last", daemon=True) for c in self._callbacks]
            for thread in self._threads:
                thread.start()
        return self

    def wait(self) -> None:
        """Block until all callbacks are done, or ``CALLBACK_SECONDS`` have passed."""
        for thread in self._threads:
            thread.join(max(0.0, self._deadline - time.monotonic()))


class ProcessEnd:
    """Ends this process after a failure, after a short time in which the script can raise and print.

    A thread does it, because the main thread may be blocked for ever in a receive that cannot be
    aborted.  It waits for the event ``told``, so that peers learn the cause before they see the connection close.
    """

    def __init__(self, exit: Callable[[int], object] = os._exit, grace: float = 2.0) -> None:
        self._exit = exit
        self._grace = grace  # seconds
        self._released = threading.Event()
        self._code = 1
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last = FailureCallbacks()

    def at_failure(self, callback: Callable[[], object]) -> None:
        """Add a callback to run before the end, which waits for it at most ``CALLBACK_SECONDS``."""
        self._last.add(callback)

    def begin(self, told: threading.Event) -> None:
        """Start the countdown; further calls do nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(told,), name="actorflow-end", daemon=True)
                self._thread.start()

    def release(self, code: int = 1) -> None:
        """After the last output: end with this exit status as soon as peers are notified."""
        self._code = code
        self._released.set()

    def wait(self) -> None:
        """Block until the process ends (returns only where ``exit`` does)."""
        with self._lock:  # the thread is made and started under the lock
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, told: threading.Event) -> None:
        doing = self._last.start()
        self._released.wait(self._grace)
        told.wait(0.5)
        doing.wait()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed pipe must not keep the process alive
                stream.flush()
        self._exit(self._code)
