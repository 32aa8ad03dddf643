"""The main program of a rank's process: join the run, and run the script as one rank of it.

Only the launcher should start it: ``python -m actorflow.launch.entry [-m MODULE] SCRIPT ARGS``.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from actorflow.control import cluster
from actorflow.control.cluster import Alone, Cluster
from actorflow.doctor.shm import advice
from actorflow.launch.fork_server import become_rank, is_fork_server
from actorflow.launch.log_disk import full_disk
from actorflow.launch.wait_watch import watch_waits
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.options import DeviceType
from actorflow.rendezvous.reports import RankStarted, cause_left, report_to_launcher
from actorflow.rendezvous.secret import take_token
from actorflow.rendezvous.seeding import seed_alike
from actorflow.rendezvous.settings import Settings
from actorflow.status.rank_status import StatusRequest, own_status
from actorflow.status.sockets import answer_requests, print_own_status
from actorflow.support import exit_hooks
from actorflow.support.imports import without_collections
from actorflow.support.script_error import mute_repeated_tracebacks, one_line, print_script_error
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ActorflowError

_PR_SET_PDEATHSIG = 1
INTERRUPTED = "was interrupted (Ctrl-C)"
TERM_PATIENCE = 0.7  # seconds after SIGTERM to wait for the report of a failure
_told_to_end = threading.Event()  # SIGTERM has come


def main(argv: Sequence[str]) -> int:
    """Join the run, run the script, say goodbye; returns the exit status if the process ends by itself.

    In a launcher's fork server this goes on in its forks alone, of which each is a rank.
    """
    module = argv[1] if argv[0] == "-m" else ""
    script, *arguments = argv[2:] if module else argv
    if is_fork_server():
        become_rank(script)
    token = take_token(os.environ)
    settings = replace(Settings.from_env(), script=script, module=module, argv=tuple(arguments), token=token)
    _die_with(settings.launcher_pid)
    report_to_launcher(settings.launcher, RankStarted(settings.rank, os.getpid()))
    if settings.rank:
        _close_stdin()
    run: Cluster | Alone = Alone(settings)
    try:
        if settings.world > 1:
            run = Cluster(settings)
        cluster.use(run)
        run.serve(StatusRequest, lambda _: [json.dumps(own_status(settings.rank).to_json()).encode()])
        answer_requests(settings.launcher, settings.rank, settings.world, lambda rank: run.pull(rank, StatusRequest()))
        _handle_signals(run)
        if isinstance(run, Cluster):
            run.begin()  # joins while torch is imported
        _seed(settings)
        run.join()
        if isinstance(run, Cluster):
            watch_waits(run)
    except ActorflowError as e:
        if settings.rank or not settings.launcher:  # the launcher prints it beside the master's output
            say(str(e))
        if run.failure is None:
            run.abort(FailureKind.JOIN, str(e))
        return _end(run, 1)
    except KeyboardInterrupt:
        return _interrupted(run)
    _set_variables(settings, run)
    return _run(run, settings)


def _run(run: Cluster | Alone, settings: Settings) -> int:
    rank, script = os.getpid(), settings.script
    try:
        try:
            run_script(script, settings.argv, settings.module)
        except SystemExit as e:
            if os.getpid() != rank:
                raise
            if e.code not in (None, 0):
                code = e.code if isinstance(e.code, int) else 1
                if not isinstance(e.code, int):
                    print(e.code, file=sys.stderr)
                run.abort(FailureKind.ENDED, f"ended with exit status {code}")
                return _end(run, code)
        if os.getpid() != rank:  # a process that the script has forked comes to an end, and not the rank
            return 0
        exit_hooks.after_script()
        run.goodbye()
        return 0
    except KeyboardInterrupt:
        if os.getpid() != rank:
            raise
        return _interrupted(run)
    except BaseException as e:
        if os.getpid() != rank:
            if not isinstance(e, SystemExit):
                print_script_error(e, script)
                return 1
            raise
        try:
            return _failed(run, e, script)
        except KeyboardInterrupt:  # it reaches this rank behind others, whose end has raised the error
            return _interrupted(run)


def _failed(run: Cluster | Alone, error: BaseException, script: str) -> int:
    """Exit after an error in the script: tell people of it, and the other ranks unless it comes from them."""
    exit_hooks.after_error()
    if _told_to_end.is_set():  # with the processes of the script, whose end may have raised this
        run.failed.wait(2 * TERM_PATIENCE)
    behind = run.explain(error)
    elsewhere = behind is not error and run.failure is not None and run.failure.rank != run.rank
    if elsewhere and run.failure is not None and run.failure.cause == INTERRUPTED:
        return _interrupted(run)  # as all ranks are, some sooner than others
    with suppress(OSError):  # the disk may be full, which the launcher reports
        print_script_error(behind.with_traceback(error.__traceback__) if elsewhere else error, script)
    if behind is error:
        hint = full_disk(error, run.rank, run.settings.log_dir) or advice(str(error))
        if hint:
            with suppress(OSError):
                say(hint)
        run.abort(FailureKind.RAISED, f"raised {one_line(error, script)}" + (f". {hint}" if hint else ""))
        if isinstance(error, Exception):
            _write_error_file(error)
    return _end(run, 1)


def run_script(script: str, arguments: Sequence[str], module: str = "") -> None:
    """Run a script as ``python script arguments`` would, or ``python -m module arguments``, in this process."""
    sys.argv = [script, *arguments]
    folder = Path.cwd() if module else Path(script).resolve().parent
    sys.path.insert(0, str(folder))
    _give_way_to(folder)
    mute_repeated_tracebacks()
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _give_way_to(folder: Path) -> None:
    """Forget modules of Python's that are loaded here and whose names the script's folder has for modules of its own.

    The script imports its own where it would as ``python script``, in a process in which nothing is loaded yet.
    """
    for name in sys.stdlib_module_names & sys.modules.keys() - {"encodings"}:  # which is loaded before any script
        spec = getattr(sys.modules[name], "__spec__", None)
        if spec is None or spec.origin in (None, "built-in", "frozen"):  # found before any folder is looked at
            continue
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[loaded]


def _end(run: Cluster | Alone, code: int) -> int:
    """Exit after a failure; with peers, the process ends in here once they have been notified."""
    if isinstance(run, Cluster) and run.failure is not None:
        run.end(code)
    return code


def _interrupted(run: Cluster | Alone) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore further ones
    if run.failure is None:
        run.abort(FailureKind.ENDED, INTERRUPTED)
    return _end(run, 128 + signal.SIGINT)


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher dies."""
    if not launcher:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher died before the call
        sys.exit(1)


def _close_stdin() -> None:
    """Close standard input, since only the master reads the terminal."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _seed(settings: Settings) -> None:
    """Seed all ranks equally, and give each its share of the cores and of the GPUs."""
    with without_collections():
        import torch

        seed_alike()
    torch.set_num_threads(settings.threads)
    if settings.devices > 1 and settings.device_type != DeviceType.CPU and torch.cuda.device_count():
        from actorflow.rendezvous.device_assignment import claim_gpu

        claim_gpu(settings)


def _set_variables(settings: Settings, run: Cluster | Alone) -> None:
    """Set RANK, WORLD_SIZE and so on for the whole run, as torch's launcher does; the agent set those of one node.

    A process group of the script that names no store meets in the run's.
    """
    os.environ.update(
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.local_rank),
        GROUP_RANK=str(settings.node),
        WORLD_SIZE=str(settings.world),
        LOCAL_WORLD_SIZE=str(settings.devices),
        GROUP_WORLD_SIZE=str(settings.nnodes),
        TORCHELASTIC_RESTART_COUNT=str(settings.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(settings.max_restarts),
    )
    if isinstance(run, Cluster):
        host, port = run.address_for_scripts
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    from actorflow.control.run_store import meet_here

    meet_here(lambda: run.store().clone(), settings.rank, settings.world)
    atexit.register(_end_before_nccl)  # before what the script registers, and so called after that


_status = 0  # of this process's exit, once the script has ended


def _end_before_nccl() -> None:
    """At the exit of a process with a group of NCCL that the script has left open: end without taking Python apart.

    NCCL's threads look into the group's store from time to time.  The run's is in Python, and a thread that comes to it
    while Python ends takes the whole process down.
    """
    import torch
    from torch import distributed

    on_gpu: Any = torch.cuda  # whose function has no type
    if on_gpu.is_initialized() and distributed.is_available() and distributed.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_status)


def _handle_signals(run: Cluster | Alone) -> None:
    """On SIGTERM tell the peers and end, also when the main thread is blocked outside Python; on SIGUSR1 print status.

    The launcher sends SIGTERM when another rank has failed.  This rank then first waits for the report of that
    failure, so that all ranks report its cause.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def handle(number: int, _frame: FrameType | None) -> None:
        """Remember it; the wake-up descriptor has received the signal already, on any thread."""
        if number == signal.SIGTERM:
            _told_to_end.set()

    def wait() -> None:
        while signal.SIGTERM not in (told := os.read(reader, 64)):
            if signal.SIGUSR1 in told:
                print_own_status(run.rank)
        known = run.failed.wait(TERM_PATIENCE)
        if not known and isinstance(run, Cluster) and (cause := cause_left(run.settings.launcher)) is not None:
            run.fail(cause)
            known = True
        if not known:
            run.abort(FailureKind.ENDED, "was told to end (SIGTERM)")
        if isinstance(run, Cluster):
            run.await_end() if known else run.end(128 + signal.SIGTERM)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR1, handle)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    handled = (signal.SIGTERM, signal.SIGUSR1)
    forking = threading.local()

    def before_fork() -> None:
        """A child would hand on to this process what it is sent before its first line of Python: let that wait."""
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def in_child() -> None:
        """A process that the script forks (a pool, a worker) is no rank: signals to it are its own."""
        signal.set_wakeup_fd(-1)
        for number in handled:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)
        after_fork()

    os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=in_child)
    threading.Thread(target=wait, name="actorflow-sigterm", daemon=True).start()


def _write_error_file(error: Exception) -> None:
    """Write the traceback, atomically, to the file in which torch's tools look for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        get_error_handler().record_exception(error)
    except OSError:  # torch's agent cannot read an incomplete file
        with suppress(OSError, KeyError):
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)


if __name__ == "__main__":
    _status = main(sys.argv[1:])
    sys.exit(_status)
