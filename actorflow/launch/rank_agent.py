"""torch's elastic agent for a launcher's ranks, which are started as the launcher says, and waited for by events."""

from __future__ import annotations

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from actorflow.launch.rank_processes import RankProcess, end_all, wait_for_one
from actorflow.rendezvous.network import unused_port

__all__ = ["RankEnds", "StartRanks", "supervise"]

StartRanks = Callable[[Sequence[Mapping[str, str]]], Sequence[RankProcess]]
"""Starts the ranks, given the variables of each that the agent sets."""

LOOK = 1.0  # seconds between the agent's own turns; the end of a rank wakes it
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class RankEnds:
    """How a launcher's ranks have ended; both by local rank."""

    failed: dict[int, int]  # those that failed before others were told to end → their exit statuses
    statuses: dict[int, int]  # of all; a negative one is the signal that has killed it


def supervise(
    count: int,
    start: StartRanks,
    command: Sequence[str],
    patience: float,
    on_failed: Callable[[Mapping[int, int]], object] = lambda _: None,
) -> RankEnds:
    """Start so many ranks and wait until all have ended, or one has failed and the others have ended with it.

    ``command`` is what a rank runs, for the agent's events.  ``patience`` is how many seconds a rank has to end once it
    is told to; before that, ``on_failed`` is called with those that failed: local rank → exit status.  Raises
    SignalException after a signal that ends this process, when the ranks have ended.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # our own report is shorter
            logging.getLogger(name).setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="actorflow", local_world_size=count, rdzv_handler=_OneAgent(), entrypoint=command[0],
        args=tuple(command[1:]), max_restarts=0, monitor_interval=1e-3, local_addr="127.0.0.1",
    )  # fmt: skip
    agent = _RankAgent(spec, start, patience, on_failed)
    try:
        with _raising_signals():
            agent.run()
    finally:
        agent.close()
    return agent.ends


class _OneAgent(RendezvousHandler):
    """The meeting of an agent with itself, in a store in its memory; nodes meet when their ranks join.

    torch's own would listen on all addresses of the machine, for nobody.
    """

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex

    def get_backend(self) -> str:
        """Its name."""
        return "actorflow"

    @property
    def use_agent_store(self) -> bool:
        """False: ranks cannot reach the store."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """One agent; the address is for a store that the script opens itself."""
        where = RendezvousStoreInfo("127.0.0.1", unused_port("127.0.0.1"))
        return RendezvousInfo(HashStore(), 0, 1, where)

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No other agent can come."""
        return 0

    def get_run_id(self) -> str:
        """A text that no other agent has."""
        return self._run

    def shutdown(self) -> bool:
        """Nothing to end."""
        return True


class _RankAgent(SimpleElasticAgent):
    def __init__(
        self, spec: WorkerSpec, start: StartRanks, patience: float, on_failed: Callable[[Mapping[int, int]], object]
    ) -> None:
        super().__init__(spec)
        self._on_failed = on_failed
        self._start = start
        self._patience = patience
        self._processes: Sequence[RankProcess] = ()
        self._failed: dict[int, int] = {}  # local ranks that failed before others were told to end → exit statuses

    @property
    def ends(self) -> RankEnds:
        """How they have ended."""
        return RankEnds(self._failed, {k: p.status for k, p in enumerate(self._processes) if p.status is not None})

    def close(self) -> None:
        """Forget the processes, which have ended."""
        for process in self._processes:
            process.close()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._processes = self._start([self._variables(worker_group, w) for w in worker_group.workers])
        return {local: process.pid for local, process in enumerate(self._processes)}

    def _variables(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        """Those that torch's own agent sets."""
        spec = group.spec
        return {
            "LOCAL_RANK": str(worker.local_rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not any(process.poll() for process in self._processes):  # none has failed
            wait_for_one(self._processes, LOOK)
        statuses = [process.poll() for process in self._processes]
        failed = {local: status for local, status in enumerate(statuses) if status}
        if failed:
            self._failed = failed
            self._on_failed(failed)
            failures = {
                worker_group.workers[local].global_rank: ProcessFailure(
                    local, self._processes[local].pid, status, error_file=""
                )
                for local, status in failed.items()
            }
            return RunResult(WorkerState.FAILED, failures=failures)
        if None in statuses:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        end_all(self._processes, death_sig, self._patience)


@contextmanager
def _raising_signals() -> Iterator[None]:
    """Raise SignalException in the main thread at a signal that ends this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SignalException(f"ended by {signal.Signals(number).name}", signal.Signals(number))

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
