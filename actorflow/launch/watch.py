"""Watch the launcher's ranks: collect their reports and deaths, and kill remaining ranks after a failure."""

from __future__ import annotations

import math
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from actorflow.launch.rank_processes import RankProcess
from actorflow.launch.standstill import Standstill, is_stopped
from actorflow.rendezvous.failure import LAUNCHER, LOST, Failure, FailureKind
from actorflow.rendezvous.reports import (
    LogsKept,
    Notice,
    RankFinished,
    RankReport,
    RankSilence,
    RankStarted,
    Regroup,
    next_report,
)
from actorflow.rendezvous.script_request import RunShape
from actorflow.support.peer_user import hear_senders
from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalReason
from actorflow.support.silences import SilenceCounter, SilenceEvent
from actorflow.support.terminal import say
from actorflow_compiler.core.owned_folders import make_owned_folder, remove_owned_folder

GRACE = 3.0  # seconds that ranks have to end by themselves after a failure
LATER = 4.0  # seconds beyond the run's limit in which a stopped process's peers may say themselves that it is lost
TICK = 0.5  # seconds between checks of process states
NOT_BEGUN = f"{LOST[FailureKind.STOPPED]} before it had begun"


@dataclass(slots=True)
class _Process:
    rank: int
    pid: int
    handle: int  # pidfd, which refers to this process even if its pid is reused
    leads: bool  # a process group
    begins: Standstill | None = None  # until it says that it has started


@dataclass(slots=True)
class WatchFindings:
    """The findings of the watch at the end of the run."""

    failures: list[Failure] = field(default_factory=list)  # as reported, the first one first
    deaths: list[tuple[int, int]] = field(default_factory=list)  # (rank, pid) that died unasked, in order
    started: dict[int, int] = field(default_factory=dict)  # rank -> pid
    killed: set[int] = field(default_factory=set)  # ranks that the watch ended itself
    wanted: RunShape | None = None  # the shape with which the script asks to be restarted
    regroup: bool = False  # the ranks ended so that waiting nodes can be taken in


class RankWatch:
    """Reads the ranks' reports on a socket, notices their deaths, and kills remaining ranks seconds after a failure.

    torch's agent waits 30 s for a process that ignores SIGTERM, as a stopped one does; the watch
    ends a run quickly in any state of its ranks.  ``on_kept`` is called with the address to which
    logs are to be sent.  A process that is stopped for longer than ``limit`` seconds is lost, as is one that does not
    run at all for as long before it has said that it has started; None: never, which is for a run of one rank, for
    which nobody waits.
    """

    def __init__(self, on_kept: Callable[[str], object] = lambda _: None, limit: float | None = None) -> None:
        self.findings = WatchFindings()
        self._on_kept = on_kept
        self._folder = make_owned_folder()
        self.address = str(Path(self._folder, "launcher"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        hear_senders(self._socket)
        self._socket.bind(self.address)
        os.chmod(self.address, 0o600)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._stop, self._stop_writer = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._expected: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._alive: dict[int, _Process] = {}  # by rank
        self._finished: set[int] = set()
        self._silent: set[int] = set()  # ranks, also of other nodes, whose silence has been printed
        self._stops = None if limit is None else SilenceCounter(math.inf, limit + LATER, TICK)
        self._deadline: float | None = None  # when remaining ranks are killed
        self._thread = threading.Thread(target=self._run, name="actorflow-watch", daemon=True)

    def start(self) -> None:
        """Watch in the background."""
        self._thread.start()

    def expect(self, started: Mapping[int, RankProcess]) -> None:
        """Watch processes that have been started, by rank, from before they say so themselves; any thread."""
        for rank, process in started.items():
            begins = Standstill(process.pid)
            self._expected.put(_Process(rank, process.pid, os.dup(process.fileno()), leads=True, begins=begins))

    def close(self) -> WatchFindings:
        """Stop watching; returns what was found."""
        os.write(self._stop_writer, b".")
        self._thread.join()
        self._take_expected()
        self._selector.close()
        self._socket.close()
        for fd in (self._stop, self._stop_writer, *(p.handle for p in self._alive.values())):
            os.close(fd)
        remove_owned_folder(self._folder)
        return self.findings

    def _run(self) -> None:
        stopping = False
        while not stopping:
            ready = {key.fd for key, _ in self._selector.select(TICK)}
            stopping = self._stop in ready
            self._take_expected()
            self._read_reports()  # first the reports that a process sent before it died
            for process in [p for p in self._alive.values() if stopping or p.handle in ready]:
                self._check_death(process)
            if not stopping:
                self._check_stopped()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    for process in list(self._alive.values()):
                        self._kill(process)

    def _take_expected(self) -> None:
        with suppress(queue.Empty):
            while True:
                process = self._expected.get_nowait()
                if process.rank in self.findings.started:  # it has said so meanwhile
                    os.close(process.handle)
                else:
                    self._add(process)

    def _add(self, process: _Process) -> None:
        self._alive[process.rank] = process
        self._selector.register(process.handle, selectors.EVENT_READ)

    def _forget(self, process: _Process) -> None:
        self._selector.unregister(process.handle)
        os.close(process.handle)
        del self._alive[process.rank]

    def _read_reports(self) -> None:
        while True:
            try:
                self._handle(*next_report(self._socket))
            except BlockingIOError:
                return
            except MessageRefused as error:
                REFUSALS.add("launcher", error, "a process of this user")
            except Exception as error:  # an error in one report must not block the others
                _say(f"a report of a rank could not be taken in: {error}")

    def _handle(self, report: RankReport, sender: int) -> None:
        if isinstance(report, RankStarted):
            self._note_start(report, sender)
        elif isinstance(report, RankFinished):
            self._finished.add(report.rank)
        elif isinstance(report, RunShape):
            self.findings.wanted = report
        elif isinstance(report, Regroup):
            self.findings.regroup = True
        elif isinstance(report, Notice):
            _say(report.text)
        elif isinstance(report, RankSilence):
            self._note_silence(report)
        elif isinstance(report, LogsKept):
            self._on_kept(report.address)
        else:
            self._note_failure(report)

    def _note_start(self, report: RankStarted, sender: int) -> None:
        if report.rank < 0 or report.pid < 1:
            what = f"the start of rank {report.rank} as process {report.pid}"
            raise MessageRefused(RefusalReason.NUMBER, what, "that of a rank")
        expected = self._alive.get(report.rank)
        if expected is not None and expected.begins is None:
            what = f"a second start of rank {report.rank}"
            raise MessageRefused(RefusalReason.SEQUENCE, what, "one, while its process lives")
        if report.pid != sender and not _is_ours(report.pid):
            what = f"the start of rank {report.rank} as process {report.pid}, which is another one's"
            raise MessageRefused(RefusalReason.SENDER, what, "a process of this launcher, or the one that says it")
        self.findings.started[report.rank] = report.pid
        if expected is not None:
            self._forget(expected)
        with suppress(ProcessLookupError):  # dead already; the agent has its status
            leads = os.getpgid(report.pid) == report.pid
            self._add(_Process(report.rank, report.pid, os.pidfd_open(report.pid), leads))

    def _note_failure(self, failure: Failure) -> None:
        self.findings.failures.append(failure)
        self._end_soon()
        stands = failure.kind in (FailureKind.STOPPED, FailureKind.UNREACHABLE) and failure.noticed_by != failure.rank
        if stands and failure.rank in self._alive:
            self._kill(self._alive[failure.rank])  # it will not end by itself

    def _note_silence(self, report: RankSilence) -> None:
        """Print what several ranks say once: that a rank is silent, and that it answers again."""
        if report.over == (report.rank in self._silent):
            (self._silent.discard if report.over else self._silent.add)(report.rank)
            _say(report.text)

    def _check_death(self, process: _Process) -> None:
        with selectors.DefaultSelector() as one:
            one.register(process.handle, selectors.EVENT_READ)
            if not one.select(0):
                return
        self._forget(process)
        if process.rank not in self._finished and process.rank not in self.findings.killed:
            self.findings.deaths.append((process.rank, process.pid))
            self._kill_group(process)
            self._end_soon()

    def _check_stopped(self) -> None:
        if self._stops is None:
            return
        going = {
            process.rank: not is_stopped(process.pid) if process.begins is None else process.begins.runs()
            for process in self._alive.values()
        }
        for stop in self._stops.tick(time.monotonic(), going):
            if stop.event is SilenceEvent.LONG:
                process = self._alive[stop.peer]
                cause = LOST[FailureKind.STOPPED] if process.begins is None else NOT_BEGUN
                self._note_failure(
                    Failure(process.rank, socket.gethostname(), process.pid, FailureKind.STOPPED, cause, LAUNCHER)
                )

    def _end_soon(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    def _kill(self, process: _Process) -> None:
        self.findings.killed.add(process.rank)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.handle, signal.SIGKILL)
        self._kill_group(process)

    def _kill_group(self, process: _Process) -> None:
        """Kill the processes that the rank started, such as data loaders; each rank has its own process group."""
        if process.leads:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be gone, but the ranks still have to be watched
        say(text)


def _is_ours(pid: int) -> bool:
    """Whether a process is a child of this one, or the child of one, or has ended.

    Only these, and those that speak for themselves, are ever killed.
    """
    try:
        return any(one.pid == os.getpid() for one in psutil.Process(pid).parents())
    except psutil.Error:
        return True
