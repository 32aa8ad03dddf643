"""A script and the shape of the cluster go in; this node's ranks run under torch's agent; a status comes out."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from actorflow.runtime.failure import LAUNCHER, LOST, Failure
from actorflow.runtime.settings import LOCAL, TOKEN, TRACE
from actorflow.runtime.watch import Findings, Watch

SHUTDOWN = 3  # seconds between asking ranks to end and killing them
MALLOC = {  # the C library keeps what is freed: to take a step's memory anew from the kernel each time costs 2% of it
    "MALLOC_ARENA_MAX": "1",  # only the main arena is ever kept
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),  # bytes
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # bytes, the most that it takes
}
TAIL = 15  # lines of a failed rank's errors that are shown


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and where; checked by the caller."""

    script: str
    argv: tuple[str, ...] = ()
    devices: int = 1  # ranks on each node
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    port: int = 0  # of the master's control server; 0 on one node: any
    join_timeout: float = 300.0  # seconds
    token: str = ""  # empty: on one node one is made; on several, peers need none
    log_dir: str = ""  # empty: a new temporary folder
    trace: str = ""  # folder for the orders in which actors fired; empty: they are not kept
    local: bool = True  # ranks of this machine use Unix sockets and shared memory

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node_rank * self.devices, (self.node_rank + 1) * self.devices)


def launch(run: Launch) -> int:
    """Run the script on this node's ranks until all have ended; returns the exit status of the whole.

    0 when every rank came to its end; 130 after Ctrl-C and 143 after SIGTERM; else the status with
    which a script left, or 1.  After a failure it prints which rank failed, how, and who noticed.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    log_dir = run.log_dir or tempfile.mkdtemp(prefix="actorflow-logs-")
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    if run.nnodes * run.devices > 1:
        console.print(_greeting(run, log_dir), style="dim")
    watch = Watch()
    with _reserved_port(run) as port, _environment(_variables(run, port, log_dir, watch.address)), _signals_kept():
        watch.start()
        codes, interrupted = _supervise(run, log_dir)
    findings = watch.close()
    if interrupted is not None:
        console.print(f"actorflow: ended by {interrupted.name}")
        return 128 + interrupted
    if not codes:
        return 0
    return _report(console, run, log_dir, findings, codes)


def _supervise(run: Launch, log_dir: str) -> tuple[dict[int, int], signal.Signals | None]:
    """Run the ranks under torch's agent: the exit statuses of those that failed, or the signal that ended us."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    from actorflow.runtime.rank_logs import RankLogs

    config = LaunchConfig(
        min_nodes=1,  # each node has an agent of its own; nodes meet when their ranks join
        max_nodes=1,
        nproc_per_node=run.devices,
        logs_specs=RankLogs(log_dir, run.ranks.start),
        run_id=uuid.uuid4().hex,
        role="actorflow",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_backend="static",
        rdzv_configs={"rank": 0},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # what they say, our report says shorter
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # the agent fills in templates such as ${local_rank} in arguments; "$$" is a plain "$"
    script = [argument.replace("$", "$$") for argument in (run.script, *run.argv)]
    arguments = ["-u", "-P", "-m", "actorflow.runtime.entry", *script]
    try:
        launch_agent(config, sys.executable, arguments)
    except ChildFailedError as e:
        return {run.ranks.start + local: failure.exitcode for local, failure in e.failures.items()}, None
    except SignalException as e:
        return {}, signal.Signals(e.sigval)
    except KeyboardInterrupt:  # before the agent has its handlers
        return {}, signal.SIGINT
    return {}, None


def _report(console: Console, run: Launch, log_dir: str, findings: Findings, codes: dict[int, int]) -> int:
    """Print what happened; returns the exit status."""
    failure = _culprit(findings, codes)
    code = codes.get(failure.rank, 1) if failure.kind in ("ended", "raised") else 1
    console.print(f"actorflow: {failure.text}", style="bold red")
    if failure.rank in run.ranks and failure.rank != 0 and failure.kind not in ("call", "join"):
        path = Path(log_dir, f"rank{failure.rank}.stderr.log")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if lines:
            console.print(f"actorflow: the last lines of {path}:")
            console.print("\n".join(f"  {line}" for line in lines[-TAIL:]))
    if run.nnodes * run.devices > 1:
        console.print(f"actorflow: logs of this node's ranks are in {log_dir}", style="dim")
    return code if code > 0 else 1


def _culprit(findings: Findings, codes: dict[int, int]) -> Failure:
    """The failure that came first, told as exactly as this node can."""
    died = dict(findings.deaths)
    for failure in findings.failures:
        if failure.kind not in LOST or failure.rank not in codes or failure.rank not in died:
            return failure
        cause = _status(codes[failure.rank])  # better than what its peers could see
        return Failure(failure.rank, failure.host, failure.pid, "killed", cause, failure.noticed_by)
    rank, pid = next(iter(findings.deaths), (min(codes), 0))
    pid = pid or findings.started.get(rank, 0)
    return Failure(rank, socket.gethostname(), pid, "killed", _status(codes.get(rank, 1)), LAUNCHER)


def _status(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _greeting(run: Launch, log_dir: str) -> str:
    first, last = run.ranks[0], run.ranks[-1]
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    node = f"node {run.node_rank} of {run.nnodes}, " if run.nnodes > 1 else ""
    return f"actorflow: {node}{ranks}; output of ranks other than 0 in {log_dir}"


def _variables(run: Launch, port: int, log_dir: str, launcher: str) -> dict[str, str]:
    """The environment of the ranks, on top of our own."""
    cores = len(os.sched_getaffinity(0))
    variables = {
        "ACTORFLOW_MASTER": f"{run.master_addr}:{port}",
        "ACTORFLOW_DEVICES": str(run.devices),
        "ACTORFLOW_NNODES": str(run.nnodes),
        "ACTORFLOW_NODE_RANK": str(run.node_rank),
        "ACTORFLOW_RESERVED_PORT": str(int(run.port == 0)),
        "ACTORFLOW_JOIN_TIMEOUT": str(run.join_timeout),
        "ACTORFLOW_LOG_DIR": log_dir,
        TRACE: run.trace,
        "ACTORFLOW_LAUNCHER": launcher,
        "ACTORFLOW_LAUNCHER_PID": str(os.getpid()),
        TOKEN: run.token or (secrets.token_hex(16) if run.nnodes == 1 else ""),
        LOCAL: str(int(run.local)),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # equal on all ranks
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN),
    }
    variables |= {name: value for name, value in MALLOC.items() if name not in os.environ}
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // run.devices))
    return variables


@contextmanager
def _reserved_port(run: Launch) -> Iterator[int]:
    """The master's port: the one given, else a free one that is held until the ranks have ended."""
    if run.port:
        yield run.port
        return
    with socket.socket() as holder:  # bound, never listening: only the master's server gets connections
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((run.master_addr, 0))
        yield holder.getsockname()[1]


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The agent sets signal handlers; give back those that were there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
