"""The command line goes in; a run is started, or a plan is shown, and an exit status comes out."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import click

from actorflow.runtime.settings import LOCAL, TOKEN, Settings


class _Command(click.Command):
    """A command with a script's arguments after ``--``, which says so when one is taken for its own option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            if "--" in args:
                raise
            hint = f"An argument of the script goes after --: actorflow {ctx.info_name} SCRIPT -- {e.option_name} …"
            raise click.UsageError(f"{e.format_message()} {hint}", ctx) from e


_SCRIPT = click.argument("script", type=click.Path(exists=True, dir_okay=False, readable=True))
_ARGUMENTS = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS…]")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Train a plain PyTorch script on many devices.

    \b
    Add @flow.global_function to the function that does a training step, then:
      actorflow run train.py                        one device for each GPU, or one CPU device
      actorflow run train.py --devices 4            four devices on this machine
      actorflow plan train.py --devices 4           what would run where, without running it
    """  # noqa: D301 -- click's own mark


@main.command(cls=_Command, short_help="Run a script on the devices of this machine, or of several.")
@_SCRIPT
@_ARGUMENTS
@click.option("--devices", type=click.IntRange(1), help="Devices on each node.  [default: all GPUs, else 1]")
@click.option("--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes in the run.")
@click.option("--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Which of them this one is.")
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
    help="Seconds to wait for all nodes; then the missing ones are named.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    help=f"File with the secret that all nodes share.  [default: {TOKEN}]",
)
@click.option("--insecure", is_flag=True, help="Several nodes without a token: anyone who reaches the port can join.")
@click.option("--log-dir", type=click.Path(file_okay=False), help="For other ranks' output.  [default: a new one]")
@click.option(
    "--trace",
    type=click.Path(file_okay=False),
    help="Folder for a file of each rank that says in which order its actors fired: 0F0 0F1 0B0 …",
)
@click.option(
    "--local/--no-local",
    default=True,
    envvar=LOCAL,
    help="Between ranks of one machine, use Unix sockets and shared memory, or the network as between machines.  "
    "[default: local]",
)
def run(
    script: str,
    arguments: tuple[str, ...],
    devices: int | None,
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int | None,
    ctrl_port: int | None,
    join_timeout: float,
    token_file: str | None,
    insecure: bool,
    log_dir: str | None,
    trace: str | None,
    local: bool,
) -> None:
    """Run SCRIPT with one process for each device.  What follows -- goes to the script.

    Every process runs the whole script; rank 0, the master, writes to this terminal, the others to
    files in the log directory.  When a rank fails, all end, and the cause is printed.

    \b
    One machine:
      actorflow run train.py --devices 4 -- --epochs 3
    \b
    Two machines, the same command on both but for --node-rank:
      export ACTORFLOW_TOKEN=$(cat shared-secret)
      actorflow run train.py --devices 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29400
      actorflow run train.py --devices 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29400
    """  # noqa: D301 -- click's own mark
    port = ctrl_port or master_port or 0
    token = _token(token_file)
    if node_rank >= nnodes:
        raise click.BadParameter(f"{node_rank} is not below --nnodes {nnodes}.", param_hint="--node-rank")
    if nnodes > 1:
        if master_addr is None or not port:
            raise click.UsageError(
                f"{nnodes} nodes need --master-addr (of node 0, as the others reach it) and --master-port (free there)."
            )
        if not token and not insecure:
            raise click.UsageError(
                f"several nodes need a shared secret, so that nobody else can join: set {TOKEN} to the same value on "
                "every node, or give --token-file. On a network that you trust wholly, --insecure does without."
            )
    if insecure and token:
        raise click.UsageError(f"--insecure contradicts the token that --token-file or {TOKEN} gives; drop one.")

    from actorflow.runtime.launch import Launch, launch

    sys.exit(
        launch(
            Launch(
                script=script,
                argv=arguments,
                devices=devices or _devices(),
                nnodes=nnodes,
                node_rank=node_rank,
                master_addr=(master_addr if nnodes > 1 else None) or "127.0.0.1",
                port=port,
                join_timeout=join_timeout,
                token=token,
                log_dir=log_dir or "",
                trace=os.path.abspath(trace) if trace else "",
                local=local,
            )
        )
    )


@main.command(cls=_Command, short_help="Compile a script's step and show the plan, without running it.")
@_SCRIPT
@_ARGUMENTS
@click.option("--devices", type=click.IntRange(1), required=True, help="Devices of the cluster that is pretended.")
@click.option("--job", default="", help="Show the plan of this job.  [default: the first train job]")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True),
    help="Write to this file: .json, .txt, or the orders alone as .csv, as torch's pipeline schedules load them.",
)
@click.option(
    "--hardware",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    help="TOML file that describes the devices the plan is for; see docs/hardware.md.  [default: this machine]",
)
@click.option("--measure", is_flag=True, help="First measure what the plan's actors take on this machine, and keep it.")
@click.option("--forecast", is_flag=True, help="Instead of the plan, what each rank will do: times, memory, order.")
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Forecast so many times as many data-parallel replicas, each with the micro-batches of this plan's.",
)
@click.option(
    "--explain",
    metavar="PATTERN",
    help="Instead of the plan, say which layouts the ops, modules or variables that this regular expression "
    "matches could have had, and what each would have cost.",
)
def plan(
    script: str,
    arguments: tuple[str, ...],
    devices: int,
    job: str,
    out: str | None,
    hardware: str | None,
    measure: bool,
    forecast: bool,
    replicas: int,
    explain: str | None,
) -> None:
    """Show which actors SCRIPT would run on each device, and what passes between them.

    The script runs as rank 0 of a pretended cluster until its job is compiled: no process is
    started, and nothing is computed.  The forecast below the plan says how long a step takes, what
    limits it and what each device holds; --measure and --hardware make it exact.

    \b
      actorflow plan train.py --devices 4 -- --epochs 3
      actorflow plan train.py --devices 64 --out plan.json
      actorflow plan train.py --devices 4 --measure --forecast
      actorflow plan train.py --devices 128 --replicas 128 --hardware h100x8.toml --forecast
      actorflow plan train.py --devices 4 --explain '.*qkv.*'
    """  # noqa: D301 -- click's own mark
    if out is not None and Path(out).suffix not in (".json", ".txt", ".csv"):
        raise click.BadParameter(f"{out!r} ends in none of .json, .txt and .csv.", param_hint="--out")
    if explain is not None:
        _check_pattern(explain)
    if hardware is not None and measure:
        raise click.UsageError(
            "--measure measures this machine, --hardware says that the plan is for another one; drop one of them."
        )
    if hardware is not None:
        _check_hardware(hardware)

    from actorflow import planned
    from actorflow.runtime import cluster
    from actorflow.runtime.entry import print_script_error, run_script
    from actorflow.runtime.session import PlanReady
    from actorflow_compiler.errors import ActorflowError

    settings = Settings(
        world=devices, devices=devices, pretend=True, plan_job=job, explain=explain, hardware=hardware or "",
        measure=measure,
    )  # fmt: skip
    cluster.use(cluster.Alone(settings))
    try:
        run_script(script, arguments)
    except PlanReady as ready:
        made = ready.plan
    except (Exception, SystemExit) as e:
        if isinstance(e, SystemExit) and e.code in (None, 0):
            raise click.ClickException(_no_plan(script, job)) from None
        if isinstance(e, SystemExit):
            raise
        print_script_error(e, script)
        sys.exit(1)
    else:
        raise click.ClickException(_no_plan(script, job))
    if explain is not None:
        if not any("\n" in note for note in made.notes):  # an explanation has a line for each alternative
            names = ", ".join(v.name for v in made.variables[:3])
            raise click.ClickException(
                f"{explain!r} matches no op, module or variable of the step; a pattern must match a whole name, such "
                f"as those of variables ({names}, …), of modules, or of ops (aten.mm.default)."
            )
        click.echo("\n".join(made.notes))
        return
    try:
        if out is None or forecast:
            click.echo(planned.show(made, settings, forecast, replicas), nl=False)
        if out is not None:
            Path(out).write_text(planned.file(made, settings, Path(out).suffix), encoding="utf-8")
            click.echo(f"plan written to {out}")
    except ActorflowError as e:
        raise click.ClickException(str(e)) from None


def _no_plan(script: str, job: str) -> str:
    wanted = f"job {job!r}" if job else 'job of type "train"'
    return f"{script} ended without a call of a {wanted}, so there is no plan; see the script's arguments, or --job."


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as e:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {e}.", param_hint="--explain") from e


def _check_hardware(path: str) -> None:
    from actorflow_compiler.errors import HardwareError
    from actorflow_scheduler.hardware_file import read_hardware

    try:
        read_hardware(path)
    except HardwareError as e:
        raise click.ClickException(str(e)) from None


def _token(file: str | None) -> str:
    if file is None:
        return os.environ.get(TOKEN, "").strip()
    token = Path(file).read_text().strip()
    if not token:
        raise click.BadParameter(f"{file!r} is empty; put a long random text into it.", param_hint="--token-file")
    return token


def _devices() -> int:
    """The GPUs of this machine, else one CPU device."""
    import torch

    return torch.cuda.device_count() or 1
