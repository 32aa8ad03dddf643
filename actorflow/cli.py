"""The command line goes in; a run is started, or a plan is shown, and an exit status comes out."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import click

from actorflow.runtime.settings import TOKEN, Settings


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
            )
        )
    )


@main.command(cls=_Command, short_help="Compile a script's step and show the plan, without running it.")
@_SCRIPT
@_ARGUMENTS
@click.option("--devices", type=click.IntRange(1), required=True, help="Devices of the cluster that is pretended.")
@click.option("--job", default="", help="Show the plan of this job.  [default: the first train job]")
@click.option("--out", type=click.Path(dir_okay=False, writable=True), help="Write to this file: .json or .txt.")
@click.option(
    "--explain",
    metavar="PATTERN",
    help="Instead of the plan, say which layouts the ops, modules or variables that this regular expression "
    "matches could have had, and what each would have cost.",
)
def plan(
    script: str, arguments: tuple[str, ...], devices: int, job: str, out: str | None, explain: str | None
) -> None:
    """Show which actors SCRIPT would run on each device, and what passes between them.

    The script runs as rank 0 of a pretended cluster until its job is compiled: no process is
    started, and nothing is computed.

    \b
      actorflow plan train.py --devices 4 -- --epochs 3
      actorflow plan train.py --devices 64 --out plan.json
      actorflow plan train.py --devices 4 --explain '.*qkv.*'
    """  # noqa: D301 -- click's own mark
    if out is not None and Path(out).suffix not in (".json", ".txt"):
        raise click.BadParameter(f"{out!r} ends neither in .json nor in .txt.", param_hint="--out")

    if explain is not None:
        _check_pattern(explain)

    from actorflow.runtime import cluster
    from actorflow.runtime.entry import print_script_error, run_script
    from actorflow.runtime.session import PlanReady
    from actorflow_compiler.plan_text import to_json, to_text

    cluster.use(cluster.Alone(Settings(world=devices, devices=devices, pretend=True, plan_job=job, explain=explain)))
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
    elif out is None:
        click.echo(to_text(made))
    else:
        Path(out).write_text(to_json(made) if out.endswith(".json") else to_text(made), encoding="utf-8")
        click.echo(f"plan written to {out}")


def _no_plan(script: str, job: str) -> str:
    wanted = f"job {job!r}" if job else 'job of type "train"'
    return f"{script} ended without a call of a {wanted}, so there is no plan; see the script's arguments, or --job."


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as e:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {e}.", param_hint="--explain") from e


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
