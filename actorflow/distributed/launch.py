"""The second generation's launcher: start a script's processes on this node and return their exit status.

``python -m actorflow.distributed.launch --nproc_per_node 2 script.py`` starts them with torch's elastic launcher and
the variables that it sets (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` …).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actorflow.distributed.elastic_logs import STDERR, STDOUT, ElasticLogs, log_folder
from actorflow.support import openmp
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.owned_folders import owned_folder, remove_leftovers

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["ElasticLaunch", "launch", "main", "parse"]

SHUTDOWN = 5  # seconds between asking processes to end and killing them
MEETING = 300  # seconds for the nodes to meet


@dataclass(frozen=True, slots=True)
class ElasticLaunch:
    """The checked options of a launch."""

    script: str  # path, module or program
    arguments: tuple[str, ...] = ()
    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    module: bool = False
    no_python: bool = False
    redirect: bool = False
    logdir: str = ""  # empty: none

    @property
    def command(self) -> list[str]:
        """The command of each process."""
        python = [] if self.no_python else [sys.executable, "-u", *(["-m"] if self.module else [])]
        return [*python, self.script, *self.arguments]

    @property
    def folder(self) -> str:
        """The folder of redirected output; empty where none is redirected."""
        return str(Path(self.logdir).resolve()) if self.redirect else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher on a command line; returns its exit status."""
    try:
        return launch(parse(sys.argv[1:] if arguments is None else arguments))
    except ClusterError as error:
        say(str(error))
        return 1


def parse(arguments: Sequence[str]) -> ElasticLaunch:
    """Read and check a command line; for a wrong one, print the error and exit with 2."""
    parser = _make_parser()
    found = parser.parse_args(arguments)
    if found.nnodes < 1 or found.nproc_per_node < 1:
        parser.error(f"--nnodes {found.nnodes} --nproc_per_node {found.nproc_per_node}: both must be at least 1")
    if not 0 <= found.node_rank < found.nnodes:
        parser.error(
            f"--node_rank {found.node_rank} is not one of --nnodes {found.nnodes}: it must be 0 to {found.nnodes - 1}"
        )
    if not 0 < found.master_port < 65536:
        parser.error(f"--master_port {found.master_port} is no port: it must be 1 to 65535")
    if found.no_python and found.module:
        parser.error("--no_python and --module contradict each other: a module is run by python; drop one")
    if found.redirect_stdout_and_stderr and not found.logdir:
        parser.error("--redirect_stdout_and_stderr needs --logdir, the folder of the files; it was not given")
    if found.logdir and Path(found.logdir).exists() and not Path(found.logdir).is_dir():
        parser.error(f"--logdir {found.logdir} is a file; it must be a folder, or not there yet")
    return ElasticLaunch(
        found.training_script,
        tuple(found.training_script_args),
        found.nnodes,
        found.node_rank,
        found.nproc_per_node,
        found.master_addr,
        found.master_port,
        found.module,
        found.no_python,
        found.redirect_stdout_and_stderr,
        found.logdir or "",
    )


def launch(run: ElasticLaunch) -> int:
    """Run this node's processes until all have ended; returns 0, or the status of the process that failed first.

    When one fails the others are ended; 128 + the signal after a signal.  Raises ClusterError where the
    port of node 0 is taken, or the nodes do not meet.
    """
    if run.node_rank == 0:
        _check_port(run)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    if run.redirect:
        _print_log_folders(run)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # its messages are printed below, shorter
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # the agent fills in templates such as ${local_rank} in arguments; "$$" is a plain "$"
    command = [argument.replace("$", "$$") for argument in run.command]
    wrapper = ["-I", "-S", str(Path(__file__).with_name("die_with_parent.py")), str(os.getpid())]
    remove_leftovers()
    with _environment(run), owned_folder("errors") as errors:
        config = LaunchConfig(
            min_nodes=run.nnodes,
            max_nodes=run.nnodes,
            nproc_per_node=run.nproc_per_node,
            logs_specs=ElasticLogs(errors, run.folder),
            run_id="actorflow",  # equal on all nodes, which meet under it
            role="actorflow",
            rdzv_endpoint=f"{_bracketed(run.master_addr)}:{run.master_port}",
            rdzv_backend="static",
            rdzv_configs={"rank": run.node_rank, "timeout": MEETING},
            local_addr=run.master_addr if run.nnodes == 1 else None,
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            launch_agent(config, sys.executable, [*wrapper, *command])
        except ChildFailedError as error:
            return _report(run, error.failures)
        except SignalException as error:
            say(f"ended by {signal.Signals(error.sigval).name}")
            return 128 + int(error.sigval)
        except KeyboardInterrupt:  # before the agent has its handlers
            return 128 + signal.SIGINT
        except RuntimeError as error:
            raise ClusterError(
                f"node {run.node_rank} of {run.nnodes} could not meet the others at {run.master_addr}:{run.master_port}"
                f" ({error}). Start the same command on every node, each with its own --node_rank; --master_addr must "
                "be an address of node 0 that all nodes reach, and --master_port free there."
            ) from error
    return 0


def _report(run: ElasticLaunch, failures: Mapping[int, ProcessFailure]) -> int:
    """Print which process failed, and how; returns the exit status."""
    local, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    rank = run.node_rank * run.nproc_per_node + local
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    where = f"; its output is in {log_folder(run.folder, local)}" if run.folder else ""
    say(f"rank {rank} (pid {failure.pid}) {how}{where}")
    return int(code) if code > 0 else 128 - int(code)


def _check_port(run: ElasticLaunch) -> None:
    """Raise ClusterError where node 0's port cannot be listened on here."""
    family = socket.AF_INET6 if ":" in run.master_addr else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", run.master_port))
        except PermissionError as error:
            raise ClusterError(
                f"--master_port {run.master_port} is below 1024, which this user may not use; give one above"
            ) from error
        except OSError as error:
            raise ClusterError(
                f"--master_port {run.master_port} cannot be used on this machine, node 0 ({error.strerror}): another "
                "program has it, perhaps another run; give a free one, the same on every node"
            ) from error


@contextmanager
def _environment(run: ElasticLaunch) -> Iterator[None]:
    """Set the environment variables of the processes, on top of those that the agent sets."""
    before = dict(os.environ)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN)
    share = max(1, len(os.sched_getaffinity(0)) // run.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    os.environ.update(openmp.variables(os.environ))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _print_log_folders(run: ElasticLaunch) -> None:
    for local in range(run.nproc_per_node):
        rank = run.node_rank * run.nproc_per_node + local
        out = log_folder(run.folder, local)
        say(f"rank {rank} writes to {out / STDOUT} and {out / STDERR}")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m actorflow.distributed.launch",
        description="actorflow distributed training launch helper utility that will spawn up multiple distributed "
        "processes",
        allow_abbrev=False,
    )
    for names, kind, default, text in _VALUES:
        name = f"--{names}"
        parser.add_argument(name, type=kind, default=default, help=text)
        if "_" in names:  # as torchrun writes it; not shown
            parser.add_argument(name.replace("_", "-"), dest=names, type=kind, default=default, help=argparse.SUPPRESS)
    for flags, text in _FLAGS:
        parser.add_argument(*flags, action="store_true", help=text)
        long = flags[-1].removeprefix("--")
        if "_" in long:
            hidden = f"--{long.replace('_', '-')}"
            parser.add_argument(hidden, dest=long, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--logdir", help=_LOGDIR)
    parser.add_argument("training_script", help=_SCRIPT)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


_VALUES: tuple[tuple[str, type, object, str], ...] = (
    ("nnodes", int, 1, "The number of nodes to use for distributed training"),
    ("node_rank", int, 0, "The rank of the node for multi-node distributed training"),
    (
        "nproc_per_node",
        int,
        1,
        "The number of processes to launch on each node, for GPU training, this is recommended to be set to the number "
        "of GPUs in your system so that each process can be bound to a single GPU.",
    ),
    (
        "master_addr",
        str,
        "127.0.0.1",
        "Master node (rank 0)'s address, should be either the IP address or the hostname of node 0, for single node "
        "multi-proc training, the --master_addr can simply be 127.0.0.1",
    ),
    (
        "master_port",
        int,
        29500,
        "Master node (rank 0)'s free port that needs to be used for communication during distributed training",
    ),
)
_FLAGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("-m", "--module"),
        "Changes each process to interpret the launch script as a python module, executing with the same behavior as "
        "'python -m'.",
    ),
    (
        ("--no_python",),
        'Do not prepend the training script with "python" - just exec it directly. Useful when the script is not a '
        "Python script.",
    ),
    (
        ("--redirect_stdout_and_stderr",),
        f"write the stdout and stderr to files '{STDOUT}' and '{STDERR}'. Only available when logdir is set",
    ),
)
_LOGDIR = (
    "Relative path to write subprocess logs to. Passing in a relative path will create a directory if needed. Note "
    "that successive runs with the same path to write logs to will overwrite existing logs, so be sure to save logs as "
    "needed."
)
_SCRIPT = (
    "The full path to the single GPU training program/script to be launched in parallel, followed by all the arguments "
    "for the training script"
)


if __name__ == "__main__":
    sys.exit(main())
