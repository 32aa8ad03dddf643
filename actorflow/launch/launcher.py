"""Run a script on this node: attempt after attempt, while ranks fail and restarts are left."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from actorflow.launch.attempt import AttemptResult, run_attempt
from actorflow.launch.rounds import EndedBySignal, OneNode, Rounds
from actorflow.rendezvous.script_request import RunShape, check_token
from actorflow.rendezvous.settings import Settings
from actorflow.support.held_files import FileHolder
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.owned_folders import remove_leftovers

__all__ = ["launch"]


def launch(run: Settings) -> int:
    """Run the script on this node's ranks until all have ended; returns the exit status of the run.

    0 when every rank came to its end; 130 after Ctrl-C and 143 after SIGTERM; else the status with which a script
    exited, or 1.  After a failure it prints which rank failed, how, and which ranks noticed, and starts all ranks
    again while restarts are left (``--max-restarts``).
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    remove_leftovers()
    try:
        while True:
            result = _run(console, run)
            if result.wanted is None:
                return result.status
            run = _reshaped(console, run, result.wanted)
    except ClusterError as e:
        console.print(f"actorflow: {e}", style="bold red")
        return 1
    except EndedBySignal as e:  # while this node waits for others
        console.print(f"actorflow: ended by {e.signal.name}")
        return 128 + e.signal


def _run(console: Console, run: Settings) -> AttemptResult:
    """All attempts of a run of this shape; the result of the last one.  Raises ClusterError if nodes do not meet."""
    result: AttemptResult | None = None
    failed = False
    log_dir = run.log_dir or tempfile.mkdtemp(prefix="actorflow-logs-")
    try:
        with _held_files(run) as held, _rounds(console, run) as rounds:
            while (part := _next(rounds, result)) is not None:
                folder, trace = (_of_attempt(part.attempt, one) for one in (log_dir, part.trace))
                part = replace(part, held_files=held, trace=trace)
                result = run_attempt(console, part, folder, rounds.attend)
                failed = failed or result.status != 0
            return result or AttemptResult(rounds.status)
    finally:
        if not run.log_dir and (run.world == 1 or not failed):  # the only rank has printed to the terminal
            shutil.rmtree(log_dir, ignore_errors=True)


def _of_attempt(number: int, folder: str) -> str:
    """The folder of an attempt's logs, or traces, in that of the run; empty where that is."""
    return str(Path(folder, f"attempt-{number}")) if number and folder else folder


@contextmanager
def _held_files(run: Settings) -> Iterator[str]:
    """Where the ranks can leave files in memory for those of the next attempt; empty if there will be none."""
    if not run.restarts:
        yield ""
        return
    holder = FileHolder()
    try:
        yield holder.address
    finally:
        holder.close()


def _rounds(console: Console, run: Settings) -> Rounds:
    """What decides whether there is a next attempt, and with which nodes."""

    def say(text: str) -> None:
        console.print(f"actorflow: {text}")

    if not run.meets:
        return OneNode(run, say)
    from actorflow.launch.node_rounds import SeveralNodes

    return SeveralNodes(run, say)


def _next(rounds: Rounds, before: AttemptResult | None) -> Settings | None:
    """This node's part of the next attempt; Ctrl-C and SIGTERM end a wait for other nodes (EndedBySignal)."""

    def end(number: int, _frame: object) -> NoReturn:
        raise EndedBySignal(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        return rounds.next(before)
    earlier = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return rounds.next(before)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _reshaped(console: Console, run: Settings, shape: RunShape) -> Settings:
    """The run in the shape that its script asks for (``flow.config``, ``flow.env.machine``).

    Raises ClusterError for several nodes without a secret.
    """
    check_token(shape, run.token or run.tls_cert)
    console.print(f"actorflow: the script asks for {shape.spoken}: it starts anew", style="dim")
    port = run.master_port or shape.port
    return replace(
        run.with_shape(shape.devices, shape.nnodes, shape.node_rank),
        master_host=shape.master_addr,
        master_port=port,
        log_dir=run.log_dir or shape.log_dir,
        given=frozenset({"devices", "nodes", "port"} if port else {"devices", "nodes"}),
    )
