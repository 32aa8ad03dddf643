"""``actorflow trace``: report what a traced run waited for, and write the page of its timeline."""

from __future__ import annotations

from pathlib import Path

import click

from actorflow.commands.options import writable_file
from actorflow.support.output_paths import why_not_writable


@click.command(short_help="Say what a run that was traced waited for, beside its forecast.")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option(
    "--out",
    type=click.Path(),
    callback=writable_file,
    help="The page to write, .html.  [default: trace.html in the folder]",
)
@click.option("--plan", "number", type=click.IntRange(0), help="Which plan the page shows.  [default: the busiest]")
@click.option("--text", is_flag=True, help="Print what there is to say, and write no page.")
def trace(folder: str, out: str | None, number: int | None, text: bool) -> None:
    """Say what a run waited for that was started with: actorflow run SCRIPT --trace FOLDER.

    Prints for each plan the step time beside the forecast, what the compute queues waited for
    (data, credit, queue, host) and the actors whose cost was forecast worst; writes a page with the
    measured timeline beside the forecast.  trace.json in the folder opens in https://ui.perfetto.dev
    and in chrome://tracing.

    \b
      actorflow run train.py --devices 4 --trace traced
      actorflow trace traced
    """  # noqa: D301 -- click's own mark
    if out is not None and Path(out).suffix != ".html":
        raise click.BadParameter(f"{out!r} does not end in .html.", param_hint="--out")

    from actorflow.show.formats import write_text
    from actorflow.tracing import folder as folders
    from actorflow.tracing.partial_trace import merge_rank_traces
    from actorflow.tracing.report import make_report, to_text
    from actorflow_compiler.core.errors import ActorflowError, TraceError

    try:
        merge_rank_traces(folder)
        traced = folders.read(folder)
        if not traced.ran:
            raise click.ClickException(f"{folder} holds no plan: the script that ran called no job.")
        reports, silent = [], []
        for ran in traced.ran:
            try:
                reports.append(make_report(traced, ran))
            except TraceError as e:
                if not traced.cut:
                    raise
                silent.append(str(e))  # of a plan that was cut short before its first step was done
        if not reports:
            raise TraceError("\n".join(silent))
        known = {found.ran.number: found for found in reports}
        if number is not None and number not in known:
            raise click.BadParameter(f"{number} is none of the plans {sorted(known)} of {folder}.", param_hint="--plan")
        click.echo("\n".join(to_text(traced, found) for found in reports), nl=False)
        if text:
            return
        shown = max(reports, key=lambda r: r.period * r.measured.iterations) if number is None else known[number]
        from actorflow.tracing.view import html

        path = Path(folder, "trace.html") if out is None else Path(out)
        if out is None and (why := why_not_writable(path)):
            raise click.ClickException(f"{why} with --out.")
        write_text(path, html(traced, shown))
        click.echo(f"\npage written to {path}")
    except ActorflowError as e:
        raise click.ClickException(str(e)) from None
