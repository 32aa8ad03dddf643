"""``actorflow run``: a command line goes in; this node's part of a run is started, and its exit status comes out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from actorflow.commands.folders import writable_folder
from actorflow.commands.on_ray import on_ray, starts_on_ray
from actorflow.commands.placing import ON, Flags, placing
from actorflow.commands.script import ARGUMENTS, DEVICE_KIND, SCRIPT, ScriptCommand
from actorflow.launch.slurm import outside_srun
from actorflow.rendezvous.network import check_interface
from actorflow.rendezvous.settings import INTERFACE, LOCAL, OVERSUBSCRIBE, TOKEN
from actorflow_compiler.core.errors import ClusterError


@click.command(cls=ScriptCommand, short_help="Run a script on the devices of this machine, or of several.")
@SCRIPT
@ARGUMENTS
@click.option("--devices", type=click.IntRange(1), help="Devices on each node.  [default: all GPUs, else 1]")
@click.option("--nnodes", type=click.IntRange(1), help="Nodes in the run.  [default: 1]")
@click.option("--node-rank", type=click.IntRange(0), help="Which of them this one is.  [default: 0]")
@click.option("--master-addr", help="Name or IP address of node 0, as the other nodes reach it.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="A free port on node 0, the same on every node.")
@click.option(
    "--ctrl-port", type=click.IntRange(1, 65535), help="Port of the control server.  [default: the master port]"
)
@click.option(
    "--join-timeout",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    envvar="ACTORFLOW_JOIN_TIMEOUT",
    help="Seconds to wait for all nodes; then the missing ones are named.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    help=f"File with the secret that all nodes share.  [default: {TOKEN}]",
)
@click.option(
    "--insecure",
    is_flag=True,
    envvar="ACTORFLOW_INSECURE",
    help="Several nodes without a token: anyone who reaches the port can join.",
)
@click.option(
    "--on",
    type=click.Choice(ON),
    default="auto",
    show_default=True,
    help="What has started this process and says where it is (auto: whichever did; none: the flags alone), or, with "
    "ray, starts the run on a Ray cluster.",
)
@click.option(
    "--interface",
    metavar="NAME",
    envvar=INTERFACE,
    help="Network card that leads to the other nodes.  [default: the one by which node 0 is reached]",
)
@click.option(
    "--log-dir",
    type=click.Path(),
    callback=writable_folder,
    help="For other ranks' output.  [default: a new one, which is removed when the run has gone well]",
)
@click.option("--live", is_flag=True, help="Show, while it runs, what each rank does, how busy it is, and its waits.")
@click.option(
    "--bar/--no-bar",
    default=None,
    help="Show steps, speed and loss while it runs.  [default: on a terminal, unless the script draws bars itself]",
)
@click.option(
    "--trace",
    type=click.Path(),
    callback=writable_folder,
    help="Folder for what each rank did and when, for `actorflow trace` and Perfetto, and in which order its actors "
    "fired: 0F0 0F1 0B0 …",
)
@click.option(
    "--local/--no-local",
    default=True,
    envvar=LOCAL,
    help="Between ranks of one machine, use Unix sockets and shared memory, or the network as between machines.  "
    "[default: local]",
)
@DEVICE_KIND
@click.option(
    "--oversubscribe",
    is_flag=True,
    envvar=OVERSUBSCRIBE,
    help="Let several ranks share a GPU; what they exchange then goes through host memory.",
)
def run(
    script: str,
    arguments: tuple[str, ...],
    devices: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    ctrl_port: int | None,
    join_timeout: float,
    token_file: str | None,
    insecure: bool,
    on: str,
    interface: str | None,
    log_dir: str | None,
    live: bool,
    bar: bool | None,
    trace: str | None,
    local: bool,
    device_type: str | None,
    oversubscribe: bool,
) -> None:
    """Run SCRIPT with one process for each device.  What follows -- goes to the script.

    Every process runs the whole script; rank 0, the master, writes to this terminal, the others to
    files in the log directory.  When a rank fails, all end, and the cause is printed.  What is not
    said here, flow.config and flow.env.machine in the script may say.

    \b
    One machine:
      actorflow run train.py --devices 4 -- --epochs 3
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
    port = ctrl_port or master_port or 0
    flags = Flags(
        devices, nnodes, node_rank, master_addr, port, _token(token_file), insecure, join_timeout,
        gpus=device_type != "cpu",
    )  # fmt: skip
    if starts_on_ray(on, os.environ):
        sys.exit(on_ray(click.get_current_context(), flags))
    try:
        if interface:
            check_interface(interface, os.environ)
        found = placing(flags, os.environ, on)
    except ClusterError as e:
        raise click.UsageError(f"{e}.".replace("..", ".")) from e
    if on == "auto" and (note := outside_srun(os.environ)):
        click.echo(f"actorflow: {note}", err=True)

    own = _devices(device_type)
    from actorflow.launch.launcher import Launch, launch

    sys.exit(
        launch(
            Launch(
                script=script,
                argv=arguments,
                devices=found.devices or own,
                nnodes=found.nnodes,
                node_rank=found.node_rank,
                master_addr=found.master_addr,
                port=found.port,
                join_timeout=join_timeout,
                token=found.token,
                log_dir=log_dir or "",
                live="live" if live else {None: "", True: "bar", False: "none"}[bar],
                trace=os.path.abspath(trace) if trace else "",
                local=local,
                device_type=device_type or "",
                oversubscribe=oversubscribe,
                given=found.given,
                tasks=found.tasks,
                task=found.task,
                own_cores=found.own_cores,
                reserved=found.reserved,
                interface=interface or "",
            )
        )
    )


def _token(file: str | None) -> str:
    if file is None:
        return os.environ.get(TOKEN, "").strip()
    token = Path(file).read_text().strip()
    if not token:
        raise click.BadParameter(f"{file!r} is empty; put a long random text into it.", param_hint="--token-file")
    return token


def _devices(kind: str | None) -> int:
    """The GPUs of this machine, else one CPU device; of a kind, where it was asked for."""
    if kind == "cpu":
        return 1
    import torch

    found = torch.cuda.device_count()
    if kind == "cuda" and not found:
        raise click.UsageError(
            "--device-type cuda was found, and this machine has no CUDA device that torch can use (torch "
            f"{torch.__version__}); leave it out, or look at the driver and CUDA_VISIBLE_DEVICES."
        )
    return found or 1
