"""Make the HTML page of a plan and its timelines, self-contained so that it needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from actorflow.show.actors import actor_graph
from actorflow.show.charts import memory_chart, time_axis, timeline_chart
from actorflow.show.communications import communication_table
from actorflow.show.considered import considered_chart, considered_table
from actorflow.show.details import details, part_details
from actorflow.show.modules import FoldedGraph, first_shown, fold_levels, module_graph
from actorflow.show.styles import kinds_css
from actorflow.show.symmetry import FoldedRanks
from actorflow.show.timeline import TimelineView
from actorflow_compiler.core.units import bytes_text, flop_text
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.cost import moved_by_all, sent_by_all

__all__ = ["Section", "page"]

ZOOM = (
    '<button data-zoom="1.3" aria-label="Zoom in">+</button><button data-zoom="0.77" aria-label="Zoom out">−</button>'
    '<button data-zoom="fit">fit</button>'
)


TIME = (
    '<button data-time="1.5" aria-label="Zoom in">+</button><button data-time="0.667" aria-label="Zoom out">−</button>'
    '<button data-time="all">reset</button><button data-save aria-label="Save as pictures">save</button>'
)


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page; ``html`` is HTML already, ``title`` and ``about`` are plain text.

    In the HTML, ``<a href="#" data-actor="12">`` opens the details of actor 12, and tables have the class "rows".
    """

    id: str
    title: str
    html: str
    about: str = ""


def page(
    plan: Plan,
    forecast: TimelineView | None = None,
    measured: TimelineView | None = None,
    sections: Sequence[Section] = (),
    tiles: Sequence[tuple[str, str]] = (),
    memory: int | None = None,
    pages: Sequence[str] = (),
    folded: FoldedRanks | None = None,
) -> str:
    """The page of a whole plan, with the forecast and measured timelines that are given.

    ``sections`` come first; ``tiles`` are pairs (figure, its label); ``memory`` is a rank's memory in bytes; ``pages``
    are the addresses of the pages of ``plan.considered``, empty where there is none.  ``folded`` is given where
    the plan lists one rank of each class.
    """
    timelines = [t for t in (forecast, measured) if t is not None]
    drawn = forecast or measured
    listed: Mapping[int, Sequence[int]] = {r: (r,) for r in plan.ranks or range(plan.world)}
    if forecast is not None and forecast.rank_classes:
        listed = forecast.rank_classes
    first: dict[int, float] = {}
    durations: dict[int, float] = {}
    for s in drawn.spans if drawn is not None else ():
        first.setdefault(s.actor, s.start)
        durations[s.actor] = s.end - s.start
    data = details(plan, {*listed, *(s.rank for t in timelines for s in t.spans)}, durations)
    charts = _charts(plan, forecast, measured, memory)
    both = forecast is not None and measured is not None
    if folded is not None:
        data["ranks"] = folded.data()
    symmetry = [] if folded is None else _symmetry(folded)
    found = [
        *sections,
        *symmetry,
        *_compared(plan, pages),
        *_chart_sections(charts, both, critical=forecast is not None),
    ]
    if plan.origins.parts:
        levels = fold_levels(plan.origins)
        data["parts"] = part_details(plan, levels)
        found.append(_logical(plan, levels))
    found.append(
        Section(
            "actors",
            "Actors",
            _canvas(actor_graph(plan, first, dict(listed))),
            "Each box is an actor, in the lane of its rank and queue; ×n: its firings in an iteration. Below it are "
            "the registers that it fills, with their slots; lines go to their readers. A full or an empty register is "
            "the only thing that makes anybody wait. Dashed: order only (variables that are updated in place).",
        )
    )
    found.append(
        Section(
            "communication",
            "Communication",
            communication_table(plan, set(data["actors"]), None if folded is None else sent_by_all(folded.plan)),
            "What passes between ranks in an iteration, the most bytes first; those of alike groups of ranks together.",
        )
    )
    if plan.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
        found.append(Section("notes", "Notes", f'<ul class="notes">{notes}</ul>'))
    pieces = f", {plan.pieces} micro-batches in an iteration" if plan.pieces > 1 else ""
    classes = "" if folded is None else f" of {len(folded.ranks)} class{'es' if len(folded.ranks) > 1 else ''}"
    return _render(
        title=plan.name,
        subtitle=f"{plan.world:,} rank{'s' if plan.world > 1 else ''}{classes}{pieces}",
        sections=found,
        tiles=[*tiles, *_summary(plan, folded)],
        data=_json(data),
        charts=_json({"axis": time_axis(timelines), "charts": charts}),
    )


def _compared(plan: Plan, pages: Sequence[str]) -> list[Section]:
    """The plans that this one was chosen among, if there are any."""
    if not any(one.seconds for one in plan.considered):
        return []
    pages = pages or [""] * len(plan.considered)
    drawn = considered_chart(plan.considered, pages) + considered_table(plan.considered, pages)
    said = (
        "Each dot is a plan that was compiled and forecast; the large one was chosen. A dot opens its plan's page. "
        "Hollow ones were only estimated."
    )
    return [Section("plans", "Plans compared", drawn, said)]


def _symmetry(folded: FoldedRanks) -> list[Section]:
    """The classes of ranks, and what passes between them."""
    return [
        Section(
            "ranks",
            "Ranks",
            folded.table(),
            "Ranks of a class do the same at the same times. The rest of the page shows the first rank of each class, "
            "which stands for all of them.",
        ),
        Section(
            "links",
            "Links",
            folded.links(),
            "What the ranks of a class (row) send to those of a class (column) in an iteration, all together.",
        ),
    ]


def _summary(plan: Plan, folded: FoldedRanks | None) -> list[tuple[str, str]]:
    found = plan.summary
    tiles = []
    if found.moved or plan.world > 1:
        moved = sum(n for _, n in found.moved) if folded is None else moved_by_all(folded.plan)
        tiles.append((bytes_text(moved), "moved in an iteration"))
    if found.flops:
        tiles.append((flop_text(found.flops), "useful in an iteration"))
    return tiles


def _charts(
    plan: Plan, forecast: TimelineView | None, measured: TimelineView | None, memory: int | None
) -> list[dict[str, Any]]:
    """The data of the charts: of each timeline the firings, and the memory of ranks where it is known."""
    given = [(name, t) for name, t in (("forecast", forecast), ("measured", measured)) if t is not None]
    return [
        *(timeline_chart(plan, t, name) for name, t in given if t.spans),
        *(memory_chart(t, memory, f"{name}-memory") for name, t in given if t.memory),
    ]


def _chart_sections(charts: Sequence[Mapping[str, Any]], both: bool, critical: bool) -> list[Section]:
    def html(kind: str) -> str:
        found = [chart["name"] for chart in charts if chart["kind"] == kind]
        heading = {name: f"<h3>{name.removesuffix('-memory')}</h3>" if both else "" for name in found}
        parts = "".join(f'<div class="chart" data-chart="{name}">{heading[name]}</div>' for name in found)
        return f'<div class="tools">{TIME}</div>{parts}' if parts else ""

    found = []
    if timelines := html("timeline"):
        about = (
            "What every queue of every rank does; numbers are micro-batches, grey is where a compute queue waits "
            f"(bubble){', framed is the critical cycle, which sets the pace' if critical else ''}. Drag to "
            "move, Ctrl and wheel to zoom, Shift and drag to choose a stretch; click a firing for its actor, or a kind "
            "to hide it."
        )
        found.append(Section("timeline", "Timeline", timelines, about))
    if memory := html("memory"):
        about = "What each rank holds: variables, live registers and what actors need while they fire."
        found.append(Section("memory", "Memory", memory, about))
    return found


def _logical(plan: Plan, levels: Sequence[FoldedGraph]) -> Section:
    shown = first_shown(levels)
    drawings = module_graph(plan.origins, shown)
    for fold in levels:
        if fold is not shown:  # inserted into the page on a click, as large ones take time to render
            drawings += (
                f'<script type="image/svg+xml" data-level="{fold.level}">{module_graph(plan.origins, fold)}</script>'
            )
    on = {id(shown): ' class="on"'}
    buttons = "".join(f'<button data-level="{f.level}"{on.get(id(f), "")}>{len(f.rows)} rows</button>' for f in levels)
    return Section(
        "logical",
        "Logical graph",
        _canvas(drawings, f"<span>folded to</span>{buttons}" if len(levels) > 1 else ""),
        "The captured step, folded by module: a row is a module on its placement. Lines are tensors, as they are "
        "read: dtype, logical shape, SBP, bytes (of one micro-batch, where it is cut into those). Orange is boxing "
        "that communicates, blue what is sent to another placement, grey what moves nothing, or was moved for another "
        "reader; with it the bytes of an iteration.",
    )


def _canvas(drawing: str, buttons: str = "") -> str:
    return f'<div class="tools">{ZOOM}{buttons}</div><div class="canvas">{drawing}</div>'


# ---- the frame


def _json(value: object) -> str:
    """JSON for inside a <script> element: no string in it can end the script or begin a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")  # only strings have a <


def _render(**values: Any) -> str:
    from jinja2 import Environment

    files = resources.files("actorflow.show")
    css = (files / "page.css").read_text(encoding="utf-8").replace("{{ kinds }}", kinds_css())
    script = "".join((files / name).read_text(encoding="utf-8") for name in ("page.js", "charts.js", "ranks.js"))
    template = Environment(autoescape=True).from_string((files / "page.html").read_text(encoding="utf-8"))
    return template.render(**values, css=css, script=script)
