"""Start a launcher's ranks, wait until they have ended, and end the others where one has failed.

The variables of a rank are those that torch's elastic agent sets, so that scripts for ``torchrun`` find what they read.
Nothing here imports torch: a launcher that did would double the CPU time of a start.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from actorflow.launch.rank_processes import RankProcess, end_all, wait_for_one
from actorflow.rendezvous.network import unused_port

__all__ = ["EndedBySignal", "RankEnds", "StartRanks", "supervise"]

StartRanks = Callable[[Sequence[Mapping[str, str]]], Sequence[RankProcess]]
"""Starts the ranks, given the variables of each."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class EndedBySignal(BaseException):
    """A signal has ended a wait for other nodes, or for ranks."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


@dataclass(frozen=True, slots=True)
class RankEnds:
    """How a launcher's ranks have ended; both by local rank."""

    failed: dict[int, int]  # those that failed before others were told to end → their exit statuses
    statuses: dict[int, int]  # of all; a negative one is the signal that has killed it


def supervise(
    count: int,
    start: StartRanks,
    patience: float,
    on_failed: Callable[[Mapping[int, int]], object] = lambda _: None,
) -> RankEnds:
    """Start so many ranks and wait until all have ended, or one has failed and the others have ended with it.

    ``patience`` is how many seconds a rank has to end once it is told to; before that, ``on_failed`` is called with
    those that failed: local rank → exit status.  Raises EndedBySignal after a signal that ends this process, when the
    ranks have ended; on the main thread alone, which signals come to.
    """
    processes: Sequence[RankProcess] = ()
    failed: dict[int, int] = {}
    with _raising_signals():
        try:
            processes = start(_variables(count))
            failed = _first_failed(processes)
            if failed:
                on_failed(failed)
        except EndedBySignal as e:
            end_all(processes, e.signal, patience)
            raise
        finally:
            end_all(processes, signal.SIGTERM, patience)
            for process in processes:
                process.close()
    return RankEnds(failed, {local: p.status for local, p in enumerate(processes) if p.status is not None})


def _first_failed(processes: Sequence[RankProcess]) -> dict[int, int]:
    """Wait until ranks have failed, which are returned with their exit statuses, or all have ended well: none."""
    while True:
        statuses = [process.poll() for process in processes]
        if failed := {local: status for local, status in enumerate(statuses) if status}:
            return failed
        if None not in statuses:
            return {}
        wait_for_one(processes)


def _variables(count: int) -> list[dict[str, str]]:
    """Those that torch's elastic agent would set for so many ranks if this launcher's were all there are.

    Each rank replaces what says otherwise once it has joined a run of several launchers.  The address is for a store
    that a script opens itself.
    """
    of_all = {
        "GROUP_RANK": "0",
        "ROLE_NAME": "actorflow",
        "LOCAL_WORLD_SIZE": str(count),
        "WORLD_SIZE": str(count),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port("127.0.0.1")),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # the first rank opens it
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return [{"LOCAL_RANK": str(local), "RANK": str(local), "ROLE_RANK": str(local), **of_all} for local in range(count)]


@contextmanager
def _raising_signals() -> Iterator[None]:
    """Raise EndedBySignal in the main thread at a signal that ends this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise EndedBySignal(signal.Signals(number))

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
