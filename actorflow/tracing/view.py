"""Make the HTML page of a trace: the measured timeline beside the forecast."""

from __future__ import annotations

from html import escape

from actorflow.show.page import Section, page
from actorflow.show.timeline import TimelineSpan, TimelineView, simulated_timeline
from actorflow.tracing.folder import TraceData
from actorflow.tracing.measurement import IdleReason, Measurement
from actorflow.tracing.report import LEAST, TraceReport
from actorflow_compiler.core.units import ranges_text, seconds_text

__all__ = ["drawn", "html"]

AROUND = 1  # iterations drawn before and after the one shown


def html(traced: TraceData, found: TraceReport) -> str:
    """The page."""
    forecast = simulated_timeline(found.ran.plan, found.ran.costs)
    tiles = [
        (seconds_text(found.period), "a step, measured"),
        (seconds_text(found.forecast), "a step, forecast"),
        (f"{found.busy:.0%}", "of the time computing"),
    ]
    waited = next(w.most for w in found.waits if w.reason is IdleReason.SOURCE)
    if waited >= LEAST:
        tiles.append((f"{waited:.0%}", "of the time waits for source"))
    sections = (_waits(traced, found), _costs(found))
    return page(found.ran.plan, forecast, drawn(found.measured, forecast.begin), sections, tiles)


def drawn(found: Measurement, begin: float = 0.0) -> TimelineView:
    """The most typical measured step with its neighbours, shifted so that it begins at ``begin`` seconds."""
    counted = range(found.first, found.iterations)
    which = min(counted, key=lambda i: abs(found.end_of(i) - found.end_of(i - 1) - found.period))
    first, last = max(0, which - AROUND), min(found.iterations - 1, which + AROUND)
    start = min(found.starts[a.id][which * a.rate] for a in found.plan.actors)

    def at(ns: int) -> float:
        return (ns - start) / 1e9 + begin

    spans = [
        TimelineSpan(
            a.rank, a.queue, a.id, n - first * a.rate, n % a.rate, a.kind, at(found.starts[a.id][n]),
            at(found.ends[a.id][n]),
        )
        for a in found.plan.actors
        for n in range(first * a.rate, (last + 1) * a.rate)
    ]  # fmt: skip
    spans.sort(key=lambda s: (s.start, s.rank, s.queue))
    return TimelineView(tuple(spans), begin, at(found.end_of(which)))


def _waits(traced: TraceData, found: TraceReport) -> Section:
    rows = "".join(
        f"<tr><td>{w.reason}</td><td>{w.share:.1%}</td><td>{escape(w.on)}</td><td>{w.rank}</td><td>{w.most:.1%}</td></tr>"
        for w in found.waits
        if w.share >= LEAST
    )
    head = "<tr><th>waited for</th><th>share</th><th>most of it for</th><th>worst rank</th><th>its share</th></tr>"
    doubt = max((r.doubt for r in traced.ranks), default=0)
    about = (
        "What compute queues waited for while they ran nothing, as a share of their time: data (a token), queue (a "
        "transfer that stood behind others), credit (a free slot), source (rows of a data source that were still being "
        "read), host (the script, or the thread that fires)."
    )
    if traced.cut:
        about = f"The run was cut short: {traced.cut}. {about}"
    if doubt:
        about += f" Clocks of different machines agree to {seconds_text(doubt / 1e9)}."
    table = f'<table class="rows"><thead>{head}</thead><tbody>{rows}</tbody></table>'
    return Section("waits", "What the run waited for", table if rows else "<p>Nothing.</p>", about)


def _costs(found: TraceReport) -> Section:
    rows = []
    for c in found.costs:
        off = ("+" if c.off >= 0 else "−") + seconds_text(abs(c.off))
        ratio = f"{c.measured / c.forecast:.2f} ×" if c.forecast else "–"
        name = f'<a href="#" data-actor="{c.actor}">{escape(c.name)}</a>'
        cells = (name, c.kind, ranges_text(c.ranks), c.rate, seconds_text(c.forecast), seconds_text(c.measured), ratio)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, off)) + "</tr>")
    names = ("actor", "kind", "ranks", "firings", "forecast", "measured", "ratio", "in a step")
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    table = f'<table class="rows"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    about = f"What a firing was forecast to take on {found.ran.hardware}, and what it took; furthest off first."
    return Section("costs", "Forecast costs and measured ones", table, about)
