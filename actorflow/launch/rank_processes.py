"""The processes of a launcher's ranks: how each is started anew, asked for its status, and told to end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from actorflow.rendezvous.secret import put_into_pipe

__all__ = ["RankPlace", "RankProcess", "end_all", "rank_command", "rank_place", "spawn", "wait_for_one"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs: its whole environment, and its files."""

    environment: Mapping[str, str]
    stdout: str = ""  # path of the file for its output; empty: the launcher's own
    stderr: str = ""


class RankProcess:
    """A child of this process, which leads a session of its own."""

    def __init__(self, pid: int, poll: Callable[[], int | None]) -> None:
        self.pid = pid
        self._poll = poll
        self._handle = os.pidfd_open(pid)  # readable once it has ended
        self.status: int | None = None  # of its exit; negative: the signal that ended it

    def fileno(self) -> int:
        """The descriptor that is readable once the process has ended."""
        return self._handle

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        if self.status is None:
            self.status = self._poll()
        return self.status

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it has started, if it still runs."""
        if self.poll() is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it leads no group yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Forget it."""
        os.close(self._handle)


def rank_command(script: str, arguments: Iterable[str], module: str = "") -> list[str]:
    """The command line of a rank; with a ``module``, the script is run by that name."""
    program = ["-m", module, script] if module else [script]
    return [sys.executable, "-u", "-P", "-m", "actorflow.launch.entry", *program, *arguments]


def rank_place(log_dir: str, rank: int, variables: Mapping[str, str]) -> RankPlace:
    """``LOG_DIR/rankK.stdout.log``, ``.stderr.log`` and ``.error.json``; rank 0 keeps the terminal.

    ``variables`` come on top of this process's environment.
    """
    path = str(Path(log_dir, f"rank{rank}."))
    environment = {**os.environ, **variables, "TORCHELASTIC_ERROR_FILE": path + "error.json"}
    return RankPlace(environment, *((path + "stdout.log", path + "stderr.log") if rank else ("", "")))


def spawn(command: list[str], places: Iterable[RankPlace]) -> list[RankProcess]:
    """Start a new process of the command for each place."""
    started = []
    for place in places:
        with ExitStack() as files:
            out, err = (files.enter_context(open(path, "w")) if path else None for path in (place.stdout, place.stderr))
            environment, token = put_into_pipe(place.environment)
            if token is not None:
                files.callback(os.close, token)
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=err, start_new_session=True,
                pass_fds=() if token is None else (token,),
            )  # fmt: skip
        started.append(RankProcess(process.pid, process.poll))
    return started


def wait_for_one(processes: Iterable[RankProcess], seconds: float) -> None:
    """Wait until one of those that were running has ended, but no longer than that; not at all if none was."""
    running = [process for process in processes if process.status is None]
    events = select.poll()
    for process in running:
        events.register(process, select.POLLIN)
    if running:
        events.poll(seconds * 1000)


def end_all(processes: Iterable[RankProcess], number: signal.Signals, seconds: float) -> None:
    """Send the signal to all that still run, and SIGKILL to those that run for so many seconds more."""
    running = [process for process in processes if process.poll() is None]
    for told in (number, signal.SIGKILL):
        for process in running:
            process.signal(told)
        end = time.monotonic() + seconds
        while running and (left := end - time.monotonic()) > 0:
            wait_for_one(running, left)
            running = [process for process in running if process.poll() is None]
