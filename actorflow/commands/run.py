"""``actorflow run``: start this node's part of a run and return its exit status."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from actorflow.commands.launcher_settings import LaunchFlags, launcher_settings
from actorflow.commands.on_ray import on_ray, starts_on_ray
from actorflow.commands.options import ARGUMENTS, MODULE, SCRIPT, ScriptCommand, run_options
from actorflow.launch.slurm import outside_srun
from actorflow.rendezvous.network import check_interface
from actorflow.rendezvous.options import TOKEN, TOKEN_FILE, DeviceType
from actorflow.rendezvous.secret import check_token_text, take_token
from actorflow_compiler.core.errors import ClusterError


@click.command(cls=ScriptCommand, short_help="Run a script on the devices of this machine, or of several.")
@SCRIPT
@ARGUMENTS
@MODULE
@run_options
def run(script: str, module: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with one process for each device.  What follows -- goes to the script.

    Every process runs the whole script; rank 0, the master, writes to this terminal, the others to
    files in the log directory.  When a rank fails, all end, and the cause is printed.  What is not
    said here, flow.config and flow.env.machine in the script may say.

    \b
    One machine:
      actorflow run train.py --devices 4 -- --epochs 3
      actorflow run --devices 4 -m recipes.train -- --epochs 3
    \b
    Two machines, the same command on both but for --node-rank:
      export ACTORFLOW_TOKEN=$(cat shared-secret)
      actorflow run train.py --devices 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29400
      actorflow run train.py --devices 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29400
    \b
    On a cluster, which says itself where each process is (docs/clusters.md):
      srun --nodes 2 --ntasks-per-node 1 actorflow run train.py
      torchrun --nnodes 2 --nproc-per-node 8 … -m actorflow run train.py
      actorflow run --on ray --nnodes 2 --devices 8 train.py
    """  # noqa: D301 -- click's own mark
    _open_standard_files()
    _keep_ends_of_children()
    flags = LaunchFlags(**options, token=_token(options["token_file"]))
    if starts_on_ray(flags.on, os.environ):
        sys.exit(on_ray(click.get_current_context(), flags))
    try:
        if flags.interface:
            check_interface(flags.interface, os.environ)
        settings = launcher_settings(flags, os.environ, lambda text: click.echo(f"actorflow: {text}", err=True))
    except ClusterError as e:
        raise click.UsageError(f"{e}.".replace("..", ".")) from e
    if flags.on == "auto" and (note := outside_srun(os.environ)):
        click.echo(f"actorflow: {note}", err=True)

    counted = not settings.devices or flags.device_type == DeviceType.CUDA  # which imports torch
    own_devices = _devices(flags.device_type) if counted else 0
    from actorflow.launch.launcher import launch

    settings = settings.with_shape(settings.devices or own_devices, settings.nnodes, settings.node)
    status = launch(replace(settings, script=script, module=module, argv=arguments))
    gc.freeze()  # Python's end looks through all that is left several times
    sys.exit(status)


def _open_standard_files() -> None:
    """Open the null device for standard files that are closed, so that no socket takes their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


def _keep_ends_of_children() -> None:
    """Have the kernel keep how children end, which is lost where what started this process ignores SIGCHLD."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _token(file: str | None) -> str:
    inherited = take_token(os.environ)  # in any case, so that nothing started here inherits it
    if file is None:
        return _checked(inherited, TOKEN.variable)
    token = _checked(Path(file).read_text(errors="replace").strip(), f"{TOKEN_FILE.flag} {file}")
    if not token:
        raise click.BadParameter(f"{file!r} is empty; put a long random text into it.", param_hint=TOKEN_FILE.flag)
    return token


def _checked(token: str, whose: str) -> str:
    try:
        return check_token_text(token, whose)
    except ClusterError as e:
        raise click.UsageError(str(e)) from e


def _devices(kind: str | None) -> int:
    """The GPUs of this machine, else one CPU device; of a kind, where it was asked for."""
    if kind == DeviceType.CPU:
        return 1
    import torch

    found = torch.cuda.device_count()
    if kind == DeviceType.CUDA and not found:
        raise click.UsageError(
            "--device-type cuda was found, and this machine has no CUDA device that torch can use (torch "
            f"{torch.__version__}); leave it out, or look at the driver and CUDA_VISIBLE_DEVICES."
        )
    return found or 1
