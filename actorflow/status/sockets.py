"""Ask the ranks of this machine's runs for their status, each over a Unix socket beside its launcher's socket.

The thread that answers does not need the main thread, which may be stuck in any code that releases the GIL.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from actorflow.support.peer_user import check_user, peer_process
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.owned_folders import birth

if TYPE_CHECKING:
    from actorflow.status.rank_status import RankStatus

__all__ = ["RunInfo", "RunStatus", "announce_run", "answer_requests", "ask_ranks", "on_signal", "find_runs"]

PATIENCE = 3.0  # seconds for an answer, including those of other machines
ELSEWHERE = 2.0  # seconds for the answers of other machines
BETWEEN = 0.5  # seconds between two rounds, so that messages under way between ranks arrive
_ABOUT = "run.json"
MOST = 1 << 16  # characters of a question


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as described by its launcher on this machine."""

    pid: int  # of the launcher
    script: str
    argv: tuple[str, ...]
    world: int
    ranks: tuple[int, ...]  # of this machine
    began: float  # seconds since the epoch
    log_dir: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The answers of the ranks of a run."""

    standings: Mapping[int, RankStatus]  # by rank
    silent: Mapping[int, str]  # ranks of this machine that did not answer → the state of their process
    before: Mapping[int, RankStatus] | None = None  # the answers of an earlier round, if there was one


def announce_run(launcher: str, about: RunInfo) -> None:
    """Describe the run in a file beside the launcher's socket."""
    found = {"run": asdict(about), "birth": birth(about.pid)}
    Path(launcher).with_name(_ABOUT).write_text(json.dumps(found))


def find_runs() -> list[tuple[str, RunInfo]]:
    """The runs of this machine and user with a live launcher, oldest first: (path of the launcher's socket, run)."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"actorflow-*/{_ABOUT}"):
        try:
            told = json.loads(path.read_text())
            about = told["run"]
            run = RunInfo(**{**about, "argv": tuple(about["argv"]), "ranks": tuple(about["ranks"])})
            if path.stat().st_uid == os.getuid() and birth(run.pid) == told["birth"]:
                found.append((str(path.with_name("launcher")), run))
        except (OSError, ValueError, TypeError, KeyError):  # it has just ended, or is another user's
            continue
    return sorted(found, key=lambda entry: entry[1].began)


def answer_requests(launcher: str, rank: int, world: int, pull: Callable[[int], bytes]) -> None:
    """Answer status requests to this rank from now on, on a thread; ``pull`` asks another rank for its status."""
    if not launcher:
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(launcher, rank))
        os.chmod(_address(launcher, rank), 0o600)
    except OSError:  # its launcher is gone, and it is about to end
        listener.close()
        return
    listener.listen(8)
    threading.Thread(target=_serve, args=(listener, rank, world, pull), name="actorflow-status", daemon=True).start()


def ask_ranks(launcher: str, run: RunInfo) -> RunStatus:
    """Ask all ranks of a run; if they seem to wait in a cycle, ask again to see whether that lasts."""
    from actorflow.status.graph import has_cycle

    found = _round(launcher, run)
    if not has_cycle(found.standings):
        return found
    time.sleep(BETWEEN)
    return replace(_round(launcher, run), before=found.standings)


def _round(launcher: str, run: RunInfo) -> RunStatus:
    """Ask all ranks of a run: ranks of this machine directly, and all others through one of these."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=min(64, len(run.ranks))) as pool:
        heard = dict(zip(run.ranks, pool.map(lambda rank: _ask(launcher, rank, "own"), run.ranks), strict=True))
    standings = {s.rank: s for found in heard.values() if not isinstance(found, str) for s in found}
    silent = {rank: found for rank, found in heard.items() if isinstance(found, str)}
    if standings and run.world > len(run.ranks):
        through = min(standings)
        others = _ask(launcher, through, " ".join(map(str, sorted({*range(run.world)} - {*run.ranks}))))
        standings |= {} if isinstance(others, str) else {s.rank: s for s in others}
    return RunStatus(standings, silent)


@contextmanager
def on_signal(tell: Callable[[], object]) -> Iterator[None]:
    """Inside the context, SIGUSR1 calls ``tell`` on a thread, unless the signal already has a handler."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=tell, daemon=True).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _serve(listener: socket.socket, rank: int, world: int, pull: Callable[[int], bytes]) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, suppress(Exception):  # one request that fails must not end the thread
            from actorflow.status.rank_status import own_status

            check_user(connection)
            connection.settimeout(PATIENCE)
            asked = connection.makefile("r").readline(MOST).split()
            own = asked == ["own"]
            ranks = [] if own else sorted({int(r) for r in asked if 0 <= int(r) < world})
            standings = [own_status(rank)] if own else _others(ranks, pull)
            connection.sendall(json.dumps([s.to_json() for s in standings]).encode())


def _others(ranks: Sequence[int], pull: Callable[[int], bytes]) -> list[RankStatus]:
    """The answers of other ranks that come within ``ELSEWHERE`` seconds."""
    from actorflow.status.rank_status import RankStatus

    found: list[RankStatus] = []

    def fetch(rank: int) -> None:
        with suppress(Exception):  # lost or too busy: it counts as not answering
            found.append(RankStatus.from_json(json.loads(pull(rank))))

    threads = [threading.Thread(target=fetch, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ELSEWHERE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(found)


def _ask(launcher: str, rank: int, what: str) -> list[RankStatus] | str:
    """A rank's answer, or why there is none."""
    from actorflow.status.rank_status import RankStatus

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(PATIENCE)
        pid = 0
        try:
            s.connect(_address(launcher, rank))
            pid = peer_process(s)
            s.sendall(f"{what}\n".encode())
            data = b"".join(iter(lambda: s.recv(1 << 16), b""))
            return [RankStatus.from_json(one) for one in json.loads(data)]
        except FileNotFoundError:
            return "has not started"
        except ClusterError as e:
            return f"gave no answer ({e})"
        except (ConnectionError, ValueError, TypeError, KeyError, RecursionError):  # it has gone, or talks nonsense
            return f"gave no answer ({_state(pid)})" if pid and psutil.pid_exists(pid) else "has ended"
        except TimeoutError:
            return f"does not answer ({_state(pid)})"


def _state(pid: int) -> str:
    """Describe the state of a process, as the kernel sees it."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        state = psutil.STATUS_ZOMBIE
    said = {
        psutil.STATUS_STOPPED: "is stopped: kill -CONT lets it go on",
        psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
        psutil.STATUS_DISK_SLEEP: "waits for a disk",
        psutil.STATUS_ZOMBIE: "has ended",
    }
    return f"process {pid} {said.get(state, 'is in code that keeps the GIL')}"


def _address(launcher: str, rank: int) -> str:
    return str(Path(launcher).with_name(f"rank{rank}"))


def print_own_status(rank: int) -> None:
    """Print this rank's status on standard error."""
    from actorflow.status.rank_status import own_status

    say(own_status(rank).text)
