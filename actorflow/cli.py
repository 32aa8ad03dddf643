"""The ``actorflow`` command: the group, and its commands ``plan`` and ``doctor``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from actorflow.commands.checkpoint import checkpoint
from actorflow.commands.ending import ended_beside_threads
from actorflow.commands.options import ARGUMENTS, DEVICE_KIND, MODULE, SCRIPT, ScriptCommand
from actorflow.commands.run import run
from actorflow.commands.status import status
from actorflow.commands.trace import trace
from actorflow.rendezvous.node_list import NODE
from actorflow.rendezvous.options import DeviceType
from actorflow.rendezvous.settings import Settings

if TYPE_CHECKING:
    from actorflow_compiler.plan.plan import Plan
    from actorflow_compiler.plan.shown_plan import ShownPlan


DRAWN = 64  # devices of which a page shows all; of more, it shows one of each class of those that are alike


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Train a plain PyTorch script on many devices.

    \b
    Add @flow.global_function to the function that does a training step, then:
      actorflow run train.py                        one device for each GPU, or one CPU device
      actorflow run train.py --devices 4            four devices on this machine
      actorflow plan train.py --devices 4           what would run where, without running it
      actorflow trace FOLDER                        what a run with --trace FOLDER waited for
      actorflow checkpoint list FOLDER              which checkpoints there are; show, verify, export
      actorflow status                              what running jobs are at, and who waits for whom
      actorflow doctor                              what would keep several machines from a run
    """  # noqa: D301 -- click's own mark


main.add_command(run)
main.add_command(trace)
main.add_command(status)
main.add_command(checkpoint)


@main.command(cls=ScriptCommand, short_help="Compile a script's step and show the plan, without running it.")
@SCRIPT
@ARGUMENTS
@MODULE
@click.option("--devices", type=click.IntRange(1), required=True, help="Devices of the cluster that is pretended.")
@DEVICE_KIND
@click.option("--job", default="", help="Show the plan of this job.  [default: the first train job]")
@click.option(
    "--out",
    type=click.Path(),
    help="Write to this file: .html (a page to look at), .svg, .dot, .json, .txt, or the orders alone as .csv, as "
    "torch's pipeline schedules load them.",
)
@click.option(
    "--hardware",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    help="TOML file that describes the devices the plan is for; see docs/hardware.md.  [default: this machine]",
)
@click.option(
    "--auto",
    is_flag=True,
    help="Choose the mesh, pipeline stages, layouts, ZeRO and micro-batches of a job that does not say them, and "
    "compare what is chosen with the next best.",
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
    module: str,
    arguments: tuple[str, ...],
    devices: int,
    device_type: str | None,
    job: str,
    out: str | None,
    hardware: str | None,
    auto: bool,
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
      actorflow plan train.py --devices 4 --out plan.html
      actorflow plan train.py --devices 4 --measure --forecast
      actorflow plan train.py --devices 128 --replicas 128 --hardware h100x8.toml --forecast
      actorflow plan train.py --devices 4 --explain '.*qkv.*'
    """  # noqa: D301 -- click's own mark
    _refuse_contradictions(out, hardware, measure, forecast, replicas, explain)
    if out is not None:
        _check_out(out)
    if explain is not None:
        _check_pattern(explain)
    if hardware is not None:
        _check_hardware(hardware)

    looked_at = "forecast" if forecast and out is None and replicas == 1 else "plan"
    if out is not None and out.endswith(".html"):
        looked_at = "classes" if devices > DRAWN and replicas == 1 else "all"
    settings = Settings(
        script=script, module=module, argv=arguments, looked_at=looked_at,
        world=devices, devices=devices, pretend=True, plan_job=job, explain=explain,
        hardware="" if hardware is None else os.path.abspath(hardware),
        measure=measure, auto=auto, device_type=DeviceType(device_type or ""),
    )  # fmt: skip
    place = None if out is None else os.path.abspath(out)  # the script may go to another folder
    with ended_beside_threads():
        made = _plan_of(settings)
        if explain is not None:
            _explain(made.plan, explain)
        else:
            _show(made, settings, out, place, forecast, replicas)


def _refuse_contradictions(
    out: str | None, hardware: str | None, measure: bool, forecast: bool, replicas: int, explain: str | None
) -> None:
    """Raise UsageError for options of which one would be without effect."""
    if hardware is not None and measure:
        raise click.UsageError(
            "--measure measures this machine, --hardware says that the plan is for another one; drop one of them."
        )
    given = {"--out": out is not None, "--forecast": forecast, "--replicas": replicas > 1}
    instead = next((name for name, is_given in given.items() if is_given), None)
    if explain is not None and instead is not None:
        raise click.UsageError(
            f"--explain prints which layouts there were and nothing else, so that {instead} would be without effect; "
            f"drop one of them."
        )
    if out is not None and replicas > 1 and not forecast:
        raise click.UsageError(
            "--replicas multiplies the forecast that is printed, and with --out none is; add --forecast, or drop "
            "one of them."
        )


def _show(
    made: ShownPlan, settings: Settings, out: str | None, place: str | None, forecast: bool, replicas: int
) -> None:
    """Print the plan or its forecast, and write the file ``place``, which people have called ``out``."""
    from actorflow.commands import planned
    from actorflow_compiler.core.errors import ActorflowError

    try:
        if place is None or forecast:
            click.echo(planned.show(made, settings, forecast, replicas), nl=False)
        if place is not None:
            _, *others = planned.write(made, settings, place)
            folder = os.path.join(os.path.dirname(out or ""), others[0].parent.name) if others else ""
            beside = f", and {len(others)} that it was compared with to {folder}" if others else ""
            click.echo(f"plan written to {out}{beside}")
    except ActorflowError as e:
        raise click.ClickException(str(e)) from None


def _plan_of(settings: Settings) -> ShownPlan:
    """Run the script on a pretended cluster until its plan is ready; ends the process if the script fails before."""
    from actorflow.control import cluster
    from actorflow.launch.entry import run_script
    from actorflow.session import process
    from actorflow.session.session import PlanReady
    from actorflow.support.script_error import print_script_error
    from actorflow.support.terminal import say

    cluster.use(cluster.Alone(settings))
    script = settings.script
    ended: BaseException | None = None
    try:
        run_script(script, settings.argv, settings.module)
    except PlanReady as ready:
        return ready.made
    except KeyboardInterrupt:
        say("interrupted before the plan was made, so that there is none to show")
        raise
    except (Exception, SystemExit) as e:
        ended = e
    session = process.started()
    if session is not None and session.shown is not None:  # the script has caught what was to end it
        return session.shown
    if isinstance(ended, SystemExit) and ended.code not in (None, 0):
        raise ended
    if ended is None or isinstance(ended, SystemExit):
        called = [] if session is None else [f"{job.name} ({job.type})" for job in session.context.jobs]
        raise click.ClickException(_no_plan(script, settings.plan_job, called))
    print_script_error(ended, script)
    sys.exit(1)


def _explain(plan: Plan, pattern: str) -> None:
    """Print the layouts that were possible for the ops, modules or variables that match the pattern."""
    if not any("\n" in note for note in plan.notes):  # an explanation has a line for each alternative
        names = ", ".join(v.name for v in plan.variables[:3])
        raise click.ClickException(
            f"{pattern!r} matches no op, module or variable of the step; a pattern must match a whole name, such "
            f"as those of variables ({names}, …), of modules, or of ops (aten.mm.default)."
        )
    click.echo("\n".join(plan.notes))


@main.command(short_help="Look for what would keep the nodes of a run from coming together.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, readable=True), required=False)
@click.option("--nodes", metavar="A,B,…", help="Names or addresses of all nodes, node 0 first, the same on every node.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="The port that the run will use.")
@click.option(
    "--node-rank",
    type=click.IntRange(0),
    envvar=NODE,
    help="Which of the nodes this one is.  [default: the one whose address it has]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the other nodes.",
)
def doctor(
    script: str | None, nodes: str | None, master_port: int | None, node_rank: int | None, timeout: float
) -> None:
    """Look for what would keep the nodes of a run from coming together, and say what to do about it.

    Without --nodes it looks at this machine alone.  With them, run the same command on every node at
    the same time: each opens the port, reaches out to all others, on that port and on another one, and compares
    versions with them (and SCRIPT, where it is given).  The exit status is 1 where something would stop a run.

    \b
      actorflow doctor --master-port 29400
      actorflow doctor train.py --nodes 10.0.0.1,10.0.0.2 --master-port 29400
    """  # noqa: D301 -- click's own mark
    from rich.console import Console

    from actorflow.doctor import report
    from actorflow.doctor.machine_facts import MachineFacts
    from actorflow.rendezvous.node_list import own_node
    from actorflow.rendezvous.ticket import own_ticket
    from actorflow_compiler.core.errors import ClusterError

    listed = tuple(filter(None, (node.strip() for node in (nodes or "127.0.0.1").split(","))))
    if len(listed) > 1 and master_port is None:
        raise click.UsageError("several nodes need --master-port, the port that the run will use.")
    try:
        here = MachineFacts(listed, own_node(listed, None if node_rank is None else str(node_rank)), master_port or 0)
    except ClusterError as e:
        raise click.ClickException(str(e)) from None
    rank, world = here.node or 0, len(listed)
    own = own_ticket(Settings(rank=rank, node=rank, world=world, nnodes=world, script=script or ""))
    console = Console(highlight=False, markup=False)
    rows = report.local_rows(here)
    if world > 1:
        rows += report.meet(here, own, timeout, console)
    sys.exit(0 if report.show(rows, console) else 1)


def _no_plan(script: str, job: str, called: Sequence[str]) -> str:
    wanted = f"job {job!r}" if job else 'job of type "train"'
    others = f" it called {', '.join(called)}," if called else " it called none,"
    return f"{script} ended without a call of a {wanted};{others} so there is no plan; see its arguments, or --job."


def _check_out(path: str) -> None:
    from actorflow.show.formats import check_place
    from actorflow_compiler.core.errors import ShowError

    try:
        check_place(path)
    except ShowError as e:
        raise click.BadParameter(str(e), param_hint="--out") from None


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as e:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {e}.", param_hint="--explain") from e


def _check_hardware(path: str) -> None:
    from actorflow_compiler.core.errors import HardwareError
    from actorflow_scheduler.hardware_file import read_hardware

    try:
        read_hardware(path)
    except HardwareError as e:
        raise click.ClickException(str(e)) from None
