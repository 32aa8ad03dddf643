"""Collect a script's requests for devices and nodes; when its run begins, continue or restart the script.

If a script needs more than one process, its process becomes the launcher (by ``exec``, so that no state of
the script remains), and the whole script runs again in each rank.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

from actorflow.rendezvous.elastic import torch_settings
from actorflow.rendezvous.options import (
    DEVICES,
    INSECURE,
    LOG_DIR,
    MASTER_ADDR,
    MASTER_PORT,
    NNODES,
    NODE_RANK,
    TLS_CERT,
    TOKEN,
)
from actorflow.rendezvous.reports import report_to_launcher
from actorflow.rendezvous.script_request import RunShape, ScriptRequest, check_token, kind_of_gpu, restart_shape
from actorflow.rendezvous.secret import why_not_inherited
from actorflow.rendezvous.settings import Settings
from actorflow.support.module_files import is_installed, module_file
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError

__all__ = ["begin_run", "request_setting", "script_request"]

_HERE = str(Path(__file__).resolve().parents[1])  # actorflow's own folder
_request = ScriptRequest()
_settled = False  # whether the run has begun, after which no request is possible


class JoinedRun(Protocol):
    """The part of the run's interface that is used here."""

    settings: Settings

    def goodbye(self) -> None:
        """Leave the run together with all others."""


def script_request() -> ScriptRequest:
    """The script's settings so far."""
    return _request


def request_setting(setting: str, value: Any, call: str) -> None:
    """Record a setting; ``call`` is the user's source text.  Raises ClusterError once the run has begun."""
    global _request
    if _settled:
        raise ClusterError(
            f"{call} came after the run had begun (flow.env.init, a job's first call, or a question for this "
            "process's rank or the number of ranks begins it); put it before all of these"
        )
    _request = replace(_request, **{setting: value}, said={**_request.said, setting: f"{call}{_line()}"})


def begin_run(run: JoinedRun | None) -> None:
    """Begin the run: check the script's request; if it needs more processes, restart and do not return.

    ``run`` is the run that a launcher has put this process in, None under plain ``python script.py``: then this
    process becomes the launcher.  A rank of a run that is too small reports to its launcher, which restarts it.
    Raises ClusterError if the script contradicts the command line, if this machine is none of its nodes, or if it
    cannot be restarted.
    """
    global _settled
    if _settled:
        return
    _settled = True
    try:
        if multiprocessing.parent_process() is not None or (run is not None and run.settings.pretend):
            return  # a child process of the script, or ``actorflow plan``, whose devices the command line names
        settings = _by_torch() if run is None else run.settings
        shape = restart_shape(_request, settings, os.environ)
        if shape is None:
            if _request.gpu is not None:
                kind_of_gpu(0 if settings is None else settings.rank)  # prints once if there is no GPU
            return
        if run is None:
            _become_launcher(shape)
        _ask_launcher(run, shape)
    except BaseException:
        _settled = False  # a script that catches the error gets it again
        raise


def _by_torch() -> Settings | None:
    """This process's settings if torch's launcher started it; its command line takes precedence."""
    place = torch_settings()
    return None if place is None else replace(place, given=frozenset({"devices", "nodes"}))


def _become_launcher(shape: RunShape) -> NoReturn:
    check_token(shape, _secret(), why_not_inherited(os.environ))
    script, arguments = _script(sys.modules["__main__"], sys.orig_argv, sys.argv)
    say(
        f"{script[-1]} asks for {shape.spoken}: this process becomes the launcher, and the script runs from its "
        "beginning on each device"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *_command(shape, script, arguments)])


def _secret() -> str:
    """What keeps strangers out, of the environment: the token, or the path of a certificate."""
    return os.environ.get(TOKEN.variable, "").strip() or os.environ.get(TLS_CERT.variable, "")


def _command(shape: RunShape, script: list[str], arguments: list[str]) -> list[str]:
    """The launcher's command line."""
    command = ["-P", "-m", "actorflow", "run", *script, *DEVICES.words(shape.devices), *NNODES.words(shape.nnodes)]
    if shape.nnodes > 1:
        command += NODE_RANK.words(shape.node_rank) + MASTER_ADDR.words(shape.master_addr)
        if not _secret() and not INSECURE.read(os.environ):
            command += INSECURE.words(shape.insecure)
    if shape.port:
        command += MASTER_PORT.words(shape.port)
    if shape.log_dir:
        command += LOG_DIR.words(shape.log_dir)
    return [*command, "--", *arguments]


def _script(main: ModuleType, command: list[str], argv: list[str]) -> tuple[list[str], list[str]]:
    """The script that this process runs, as it was named ("train.py", or "-m", "package.train"), and its arguments.

    Raises ClusterError without a script that each device can run.
    """
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise ClusterError(
            "several devices need a script that each of them can run, and this process has none (an interactive "
            "session, a notebook, python -c or standard input); save it as a file and run `python script.py`"
        )
    spec = getattr(main, "__spec__", None)  # which a debugger takes away
    if spec is not None:
        return _module(spec.name, file, command, argv)
    at = next((i for i, word in enumerate(command[1:], 1) if os.path.abspath(word) == os.path.abspath(file)), None)
    if at is None:  # the script has changed the working directory
        return [os.path.abspath(file)], argv[1:]
    return [command[at]], command[at + 1 :]  # as typed: a script may have changed sys.argv


def _module(name: str, file: str, command: list[str], argv: list[str]) -> tuple[list[str], list[str]]:
    """What ``_script`` returns for a process that python -m has started."""
    try:
        found = os.path.samefile(module_file(name), file)
    except (ValueError, OSError):
        found = False
    if not found or is_installed(file):  # such as python -m pytest, which runs a script of the user's itself
        raise ClusterError(
            f"several devices need a script that each of them can run, and this process was started with python -m "
            f"({name}), which is no module of yours that is found in {os.getcwd()} or on sys.path; start a file or a "
            "module of your own"
        )
    typed = command[command.index("-m") + 2 :] if "-m" in command else argv[1:]
    return ["-m", name], typed


def _ask_launcher(run: JoinedRun | None, shape: RunShape) -> NoReturn:
    assert run is not None
    if not run.settings.launcher:
        raise ClusterError(f"the script asks for {shape.spoken}; start it with plain python, or with `actorflow run`")
    report_to_launcher(run.settings.launcher, shape)
    run.goodbye()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skip exit handlers, since the script has not really run


def _line() -> str:
    """The file and line of the call in the user's script."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
