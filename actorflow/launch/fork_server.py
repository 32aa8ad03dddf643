"""One process that imports torch and what ranks run with, and of which the ranks of this launcher are forks.

The launcher starts it before it imports torch itself, so that both import at the same time, and all ranks of the
machine together import once.  It has the command line and the environment of a rank, runs no thread, opens no device
and draws no random number.  When the launcher names the ranks' places it forks once for each and exits; the launcher,
which the kernel makes the parent of its orphans meanwhile (PR_SET_CHILD_SUBREAPER), then is the ranks' parent as if it
had started them itself, and lets them go on:

    launcher                           fork server                        a rank
      starts it, imports torch           imports torch
      places                →            forks                 →            leads a session, waits
      waits for its end     ←            pids, exits
      "go"                  →                                               takes its place, runs the script

A rank that reads no "go" ends: the launcher is gone, or has given up.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import math
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from actorflow.launch.rank_processes import RankPlace, RankProcess
from actorflow.launch.standstill import Standstill
from actorflow.rendezvous.secret import without_token
from actorflow.support.imports import without_collections
from actorflow.support.silences import SilenceCounter

__all__ = ["ForkServer", "NoForks", "become_rank", "is_fork_server"]

SERVER = "ACTORFLOW_FORK_SERVER"  # the variable with the descriptor of its socket
PRELOADED = ("numpy", "torch", "actorflow.jobs.job")  # what ranks need, each with all that it imports
COMPILER = "torch._dynamo"  # which any optimizer of torch imports, and the capture of a step
_SETS_COMPILER = re.compile(r"TORCH(DYNAMO|INDUCTOR|_COMPILE|_LOGS|_TRACE|_FX)")  # variables that it reads when loaded
GO = b"g"
LOOK = 0.5  # seconds between looks at whether it runs
_LENGTH = struct.Struct("<q")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class NoForks(Exception):
    """There are no forks, for a reason that the text says, and none will go on."""


# --- in the launcher ---


class ForkServer:
    """The launcher's end, used on one thread; ``close`` it in any case."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], limit: float) -> None:
        """Start it with the command line of the ranks, and with variables that are read while libraries load.

        ``limit``: seconds for which it may not run at all, after which nobody waits for it.
        """
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**without_token(os.environ), **variables, SERVER: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._limit = limit

    def fork(self, places: Sequence[RankPlace]) -> list[RankProcess]:
        """Start a rank in each place; waits until the server has imported all that they need.  Raises NoForks."""
        if _prctl(_PR_SET_CHILD_SUBREAPER, 1):
            raise NoForks("the kernel makes nobody the parent of orphans")
        try:
            pids = self._ask(places)
            self._process.wait()
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if any(_parent_of(pid) != os.getpid() for pid in pids):
            raise NoForks("forks have another parent")
        started = [RankProcess(pid, partial(_poll, pid)) for pid in pids]
        self._socket.sendall(GO * len(started))
        return started

    def close(self) -> None:
        """End the server where it still runs; forks that were not let go on end by themselves."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _ask(self, places: Sequence[RankPlace]) -> list[int]:
        """The forks' process ids.  Raises NoForks."""
        try:
            _send(self._socket, [asdict(place) for place in places])
            answer = _receive(_WhileItRuns(self._socket, self._process.pid, self._limit).read)
        except (OSError, EOFError):
            raise NoForks("the process that was to fork has ended") from None
        if isinstance(answer, str):
            raise NoForks(answer)
        return [int(pid) for pid in answer]


class _WhileItRuns:
    """Reads from a socket that a process and its forks have open, until that process has ended or stands still."""

    def __init__(self, source: socket.socket, pid: int, limit: float) -> None:
        self._source = source
        self._pid = pid
        self._limit = limit  # seconds

    def read(self, size: int) -> bytes:
        """So many bytes at most; none at the end.  Raises NoForks where the process does not run for the limit."""
        still, counter = Standstill(self._pid), SilenceCounter(math.inf, self._limit, LOOK)
        handle = os.pidfd_open(self._pid)
        try:
            events = select.poll()
            events.register(self._source, select.POLLIN)
            events.register(handle, select.POLLIN)
            while not (ready := {descriptor for descriptor, _ in events.poll(1000 * LOOK)}):
                if counter.tick(time.monotonic(), {0: still.runs()}):
                    raise NoForks(f"the process that was to fork has not run for {self._limit:g} s")
            return self._source.recv(size) if self._source.fileno() in ready else b""
        finally:
            os.close(handle)


def _poll(pid: int) -> int | None:
    """The exit status of a child, or None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _parent_of(pid: int) -> int:
    """The parent of a process, or 0."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


# --- in the server, and in its forks ---


def is_fork_server() -> bool:
    """Whether this process was started as one."""
    return SERVER in os.environ


def become_rank(script: str) -> None:
    """Import, wait for the places, fork; returns in each fork, as the rank of its place, and never in the server."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the launcher
    channel = socket.socket(fileno=int(os.environ.pop(SERVER)))
    with without_collections():
        for name in _preloaded(script):
            importlib.import_module(name)
    gc.freeze()  # what a collection looks at is written to, and would be copied in each rank
    try:
        places = _receive(channel.recv)
    except (OSError, EOFError):  # the launcher has ended
        os._exit(0)
    if sys.modules["torch"].cuda.is_initialized():
        _answer(channel, "a GPU that was opened before a fork cannot be used after it")
    if threading.active_count() > 1:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate()[1:]))
        _answer(channel, f"threads do not live on in a fork ({names})")
    pids = []
    for place in places:
        try:
            pid = os.fork()
        except OSError as error:
            _answer(channel, f"no process can be started: {error}")
        if not pid:
            _take(RankPlace(**place), channel)
            return
        pids.append(pid)
    _answer(channel, pids)


def _preloaded(script: str) -> Sequence[str]:
    """The modules to import for a script: torch's compiler as well, unless the script may set its variables itself."""
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:  # the ranks say it
        return PRELOADED
    return PRELOADED if _SETS_COMPILER.search(text) else (*PRELOADED, COMPILER)


def _answer(channel: socket.socket, said: Any) -> NoReturn:
    """Answer the launcher, and end the server."""
    with suppress(OSError):
        _send(channel, said)
    os._exit(0)


def _take(place: RankPlace, channel: socket.socket) -> None:
    """In a fork: wait for the launcher's word, then take the place."""
    os.setsid()
    with channel:
        said = channel.recv(1)  # each rank takes one byte of those that all can read
    if said != GO:
        os._exit(0)
    os.environ.clear()
    os.environ.update(place.environment)
    for path, descriptor in ((place.stdout, 1), (place.stderr, 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
            os.close(file)


# --- in all ---


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))


def _send(target: socket.socket, said: Any) -> None:
    data = json.dumps(said).encode()
    target.sendall(_LENGTH.pack(len(data)) + data)


def _receive(read: Callable[[int], bytes]) -> Any:
    """What was sent; raises EOFError at the end of what can be read."""

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = read(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    return json.loads(exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0]))
