"""Run a script once on this node: start its ranks under torch's agent, watch them, and report what failed."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from actorflow.launch.fork_server import ForkServer, NoForks
from actorflow.launch.log_disk import is_full
from actorflow.launch.log_files import LogTransfer, NoLogTransfer, log_path
from actorflow.launch.rank_processes import RankProcess, rank_command, rank_place, spawn
from actorflow.launch.watch import RankWatch, WatchFindings
from actorflow.rendezvous.failure import LAUNCHER, LOST, Failure, FailureKind
from actorflow.rendezvous.network import hold_port
from actorflow.rendezvous.options import TOKEN
from actorflow.rendezvous.reports import leave_cause
from actorflow.rendezvous.script_request import RunShape
from actorflow.rendezvous.secret import without_token
from actorflow.rendezvous.settings import Settings
from actorflow.status.sockets import RunInfo, announce_run, ask_ranks, on_signal
from actorflow.support import heap, openmp
from actorflow.support.imports import without_collections
from actorflow_compiler.core.errors import ClusterError

__all__ = ["AttemptResult", "run_attempt"]

SHUTDOWN = 3  # seconds between asking ranks to end and killing them
TAIL = 15  # lines of a failed rank's errors that are shown


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt has ended on this node."""

    status: int = 0  # exit status: 0 when every rank came to its end
    failure: Failure | None = None  # why it failed, if it did
    interrupted: bool = False  # a signal to the launcher has ended it
    wanted: RunShape | None = None  # the shape with which the script asks to be started instead
    regroup: bool = False  # the ranks ended so that waiting nodes can be taken in


def run_attempt(
    console: Console, run: Settings, log_dir: str, attend: Callable[[str], object] = lambda _: None
) -> AttemptResult:
    """Run the script on this node's ranks until all have ended.

    ``attend`` is called with the address on which the ranks report.  After a failure this prints which rank failed,
    how, and which ranks noticed.  The result's status is 0 when every rank came to its end; 130 after Ctrl-C and 143
    after SIGTERM; else the status with which a script exited, or 1.
    """
    with _fork_server(run) as server:
        return _attempt(console, run, log_dir, attend, server)


def _attempt(
    console: Console, run: Settings, log_dir: str, attend: Callable[[str], object], server: ForkServer | None
) -> AttemptResult:
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    if run.trace and run.launcher_number == 0:
        from actorflow.tracing import folder as traces

        traces.clear(run.trace)
    if run.world > 1:
        console.print(_greeting(run, log_dir), style="dim")
    logs = _logs(console, run, log_dir)
    watch = RankWatch(logs.send_to, run.silence_limit if run.world > 1 else None)
    about = RunInfo(os.getpid(), run.script, run.argv, run.world, tuple(run.launcher_ranks), time.time(), log_dir)
    announce_run(watch.address, about)
    with (
        _reserved_port(run) as port,
        _environment(_variables(ranks := _rank_settings(run, port, log_dir, watch.address, logs.port))),
        _signals_kept(),
        on_signal(lambda: _print_status(console, watch.address, about)),
    ):
        watch.start()
        attend(watch.address)
        codes, statuses, interrupted = _supervise(console, ranks, log_dir, server, watch)
    findings = watch.close()
    _warn_of_disk(console, run, log_dir)
    unreachable = {f.rank // len(run.launcher_ranks) for f in findings.failures if f.kind is FailureKind.UNREACHABLE}
    logs.finish(not codes and interrupted is None and findings.wanted is None, unreachable)
    if interrupted is not None:
        console.print(f"actorflow: ended by {interrupted.name}")
        _say_where_output_is(console, run, log_dir)
        return AttemptResult(128 + interrupted, interrupted=True)
    if not codes:
        return AttemptResult(wanted=findings.wanted, regroup=findings.regroup)
    failure = _first_failure(findings, codes, statuses)
    _report(console, log_dir, failure)
    _say_where_output_is(console, run, log_dir)
    status = _exit_status_of(failure, statuses.get(failure.rank, 1)) if failure.kind == FailureKind.ENDED else 1
    return AttemptResult(status if status > 0 else 1, failure)


def _print_status(console: Console, launcher: str, about: RunInfo) -> None:
    """Print what the ranks are doing, and which rank waits for which."""
    from actorflow.status.text import to_text

    console.print(to_text(about, ask_ranks(launcher, about)), end="")


def _logs(console: Console, run: Settings, log_dir: str) -> LogTransfer:
    """This launcher's part in gathering all nodes' logs on the master's; a run continues even if it fails."""
    if run.launchers == 1:
        return NoLogTransfer()
    from actorflow.launch.log_gather import LogKeeper, LogSender

    if run.launcher_number:
        return LogSender(
            run.launcher_number, run.launcher_ranks, log_dir, run.token, run.silence_limit, run.at_master, run.tls
        )
    keeper = LogKeeper(
        range(1, run.launchers), len(run.launcher_ranks), log_dir, run.bind_host(), run.token, run.silence_limit,
        lambda text: console.print(f"actorflow: {text}"), run.tls,
    )  # fmt: skip
    try:
        keeper.start()
    except ClusterError as e:
        console.print(f"actorflow: logs of other nodes stay there: {e}", style="bold")
    return keeper


def _supervise(
    console: Console, run: Settings, log_dir: str, server: ForkServer | None, watch: RankWatch
) -> tuple[dict[int, int], dict[int, int], signal.Signals | None]:
    """Run the ranks under torch's agent.

    Returns the exit statuses of the ranks that failed first and those of all, and the signal that ended it.
    """
    first = run.launcher_ranks.start
    command = rank_command(run.script, run.argv, run.module)

    def start(variables: Sequence[Mapping[str, str]]) -> Sequence[RankProcess]:
        secret = {TOKEN.variable: run.token}
        places = [rank_place(log_dir, first + local, {**of_rank, **secret}) for local, of_rank in enumerate(variables)]
        started: Sequence[RankProcess] = ()
        if server is not None:
            try:
                started = server.fork(places)
            except NoForks as e:
                console.print(f"actorflow: each rank imports torch itself (--no-fork): {e}", style="dim")
                server.close()
        started = started or spawn(command, places)
        watch.expect({first + local: process for local, process in enumerate(started)})
        return started

    def tell_cause(failed: Mapping[int, int]) -> None:
        """Leave word of why ranks are told to end, for those that have not heard it from others."""
        codes = {first + local: code for local, code in failed.items()}
        leave_cause(watch.address, _first_failure(watch.findings, codes, codes))

    try:
        with without_collections():
            from torch.distributed.elastic.multiprocessing import SignalException

            from actorflow.launch.rank_agent import supervise
    except KeyboardInterrupt:
        return {}, {}, signal.SIGINT
    try:
        ends = supervise(len(run.launcher_ranks), start, command, SHUTDOWN, tell_cause)
    except SignalException as e:
        return {}, {}, signal.Signals(e.sigval)
    except KeyboardInterrupt:  # before the agent has its handlers
        return {}, {}, signal.SIGINT
    failed, statuses = ({first + local: code for local, code in of.items()} for of in (ends.failed, ends.statuses))
    return failed, statuses, None


@contextmanager
def _fork_server(run: Settings) -> Iterator[ForkServer | None]:
    """The process of which the ranks will be forks, if they are to be; it imports what they need meanwhile."""
    if not run.fork:
        yield None
        return
    server = ForkServer(rank_command(run.script, run.argv, run.module), _early_variables(run), run.silence_limit)
    try:
        yield server
    finally:
        server.close()


def _report(console: Console, log_dir: str, failure: Failure) -> None:
    """Print what happened, with the last lines of the rank that failed."""
    console.print(f"actorflow: {failure.text}", style="bold red")
    if failure.rank != 0 and failure.kind not in (FailureKind.CALL, FailureKind.JOIN):
        path = log_path(log_dir, failure.rank, "stderr")  # exists for another node's rank only if logs are gathered
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if lines:
            console.print(f"actorflow: the last lines of {path}:")
            console.print("\n".join(f"  {line}" for line in lines[-TAIL:]))


def _say_where_output_is(console: Console, run: Settings, log_dir: str) -> None:
    """After a failure: print where the logs and the trace are."""
    if run.world > 1:
        whose = "all" if run.launchers > 1 and run.launcher_number == 0 else "this node's"
        console.print(f"actorflow: logs of {whose} ranks are in {log_dir}", style="dim")
    if run.trace and run.launcher_number == 0:
        from actorflow.tracing.partial_trace import trace_note

        if line := trace_note(run.trace, range(run.world)):
            console.print(f"actorflow: {line}", style="dim")


def _warn_of_disk(console: Console, run: Settings, log_dir: str) -> None:
    """Warn of lost output if the disk is full; the scripts themselves get no error."""
    if run.world > 1 and is_full(log_dir):
        console.print(f"actorflow: the disk of {log_dir} is full: what ranks print there is lost", style="bold red")


def _exit_status_of(failure: Failure, code: int) -> int:
    """The exit status of a script; the status it reported, if the rank was killed for ending too slowly."""
    said = re.search(r"exit status (\d+)", failure.cause)
    return int(said[1]) if said is not None and code <= 0 else code


def _first_failure(findings: WatchFindings, codes: dict[int, int], statuses: dict[int, int]) -> Failure:
    """The first failure, with its exact cause if this node knows it.

    ``codes`` are the exit statuses of ranks that had ended before others were told to, ``statuses`` those of all.
    """
    died = dict(findings.deaths)
    for failure in findings.failures:
        seen_by_peers = failure.kind in LOST and failure.noticed_by != failure.rank
        code = _own_end(failure, codes, statuses) if seen_by_peers and failure.rank in died else None
        if code is None:
            return failure
        cause = _status(code)  # more exact than what its peers could see
        return Failure(failure.rank, failure.host, failure.pid, FailureKind.KILLED, cause, failure.noticed_by)
    rank, pid = next(iter(findings.deaths), (min(codes), 0))
    pid = pid or findings.started.get(rank, 0)
    return Failure(rank, socket.gethostname(), pid, FailureKind.KILLED, _status(statuses.get(rank, 1)), LAUNCHER)


def _own_end(failure: Failure, codes: dict[int, int], statuses: dict[int, int]) -> int | None:
    """The exit status of a rank that peers have lost; None where it is not here, or has ended because it was told to.

    The kernel closes the connections of a process that is killed before its parent can have the status, so that on a
    busy machine peers may have ended by then.
    """
    code = statuses.get(failure.rank, 0)
    killed = failure.kind is FailureKind.KILLED and code < 0 and code != -signal.SIGTERM
    return codes.get(failure.rank, code if killed else None)


def _status(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _greeting(run: Settings, log_dir: str) -> str:
    first, last = run.launcher_ranks[0], run.launcher_ranks[-1]
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    node = f"node {run.node} of {run.nnodes}, " if run.nnodes > 1 else ""
    kept = "" if run.log_dir else ", kept where the run fails, or with --log-dir"
    return f"actorflow: {node}{ranks}; output of ranks other than 0 in {log_dir}{kept}"


def _rank_settings(run: Settings, port: int, log_dir: str, launcher: str, logs_port: int) -> Settings:
    """The settings of the launcher's ranks: the run's, with this launcher's ports and folders."""
    return replace(
        run,
        master_port=port,
        reserved_port=run.reserved_port or not run.master_port,
        log_dir=log_dir,
        launcher=launcher,
        launcher_pid=os.getpid(),
        logs_port=logs_port,
        token=run.token or (secrets.token_hex(16) if run.launchers == 1 else ""),
    )


def _variables(run: Settings) -> dict[str, str]:
    """The environment of the ranks, on top of our own, but for the token."""
    return without_token(run.to_env()) | _early_variables(run)


def _early_variables(run: Settings) -> dict[str, str]:
    """Those of them that are read when Python starts, or when a library is loaded; equal on all ranks."""
    ours = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(run.threads)}
    said = {name: os.environ.get(name, value) for name, value in ours.items()}
    return said | heap.variables(os.environ) | openmp.variables(os.environ)


@contextmanager
def _reserved_port(run: Settings) -> Iterator[int]:
    """The master's port: the one given, else a free one that is held until the ranks have ended."""
    if run.master_port:
        yield run.master_port
        return
    with hold_port(run.master_host) as holder:
        yield int(holder.getsockname()[1])


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
    """Restore the signal handlers that the agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
