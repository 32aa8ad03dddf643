"""A plan and its timelines enter; one self-contained HTML page leaves, which needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from importlib.util import find_spec
from typing import Any

from actorflow.show.actors import actor_graph
from actorflow.show.details import details, part_details
from actorflow.show.modules import Folded, first_shown, folds, module_graph
from actorflow.show.moves import moves_table
from actorflow.show.timeline import Timeline
from actorflow.show.words import kinds_css
from actorflow_compiler.core.errors import ShowError
from actorflow_compiler.core.units import bytes_text, flop_text
from actorflow_compiler.plan.plan import Plan

__all__ = ["Section", "check_library", "page"]

ZOOM = (
    '<button data-zoom="1.3" aria-label="Zoom in">+</button><button data-zoom="0.77" aria-label="Zoom out">−</button>'
    '<button data-zoom="fit">fit</button>'
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page; ``html`` is HTML already, ``title`` and ``about`` are text.

    In it ``<a href="#" data-actor="12">`` opens what is known of actor 12, and tables have the class "rows".
    """

    id: str
    title: str
    html: str
    about: str = ""


def page(
    plan: Plan,
    forecast: Timeline | None = None,
    measured: Timeline | None = None,
    sections: Sequence[Section] = (),
    tiles: Sequence[tuple[str, str]] = (),
    memory: int | None = None,
) -> str:
    """The page of a whole plan, with what was foretold of it and what was measured, as far as it is given.

    ``sections`` come first; ``tiles`` are (figure, what it is), for people; ``memory`` is what a rank has, in bytes.
    Raises ShowError where the libraries that draw are not installed.
    """
    library = _library()
    timelines = [t for t in (forecast, measured) if t is not None]
    drawn = forecast or measured
    listed: Mapping[int, Sequence[int]] = {r: (r,) for r in plan.ranks or range(plan.world)}
    if forecast is not None and forecast.alike:
        listed = forecast.alike
    first: dict[int, float] = {}
    lasts: dict[int, float] = {}
    for s in drawn.spans if drawn is not None else ():
        first.setdefault(s.actor, s.start)
        lasts[s.actor] = s.end - s.start
    told = details(plan, {*listed, *(s.rank for t in timelines for s in t.spans)}, lasts)
    figures = _figures(plan, forecast, measured, memory)
    charts, parts = _components({name: figure for name, _, figure in figures})
    found = [*sections, *_charts(forecast, figures, parts)]
    if plan.origins.parts:
        levels = folds(plan.origins)
        told["parts"] = part_details(plan, levels)
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
            moves_table(plan, set(told["actors"])),
            "What passes between ranks in an iteration, the most bytes first; those of alike groups of ranks together.",
        )
    )
    if plan.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
        found.append(Section("notes", "Notes", f'<ul class="notes">{notes}</ul>'))
    pieces = f", {plan.pieces} micro-batches in an iteration" if plan.pieces > 1 else ""
    return _render(
        title=plan.name,
        subtitle=f"{plan.world} rank{'s' if plan.world > 1 else ''}{pieces}",
        sections=found,
        tiles=[*tiles, *_summary(plan)],
        data=_json(told),
        library=library,
        charts=charts,
    )


def _summary(plan: Plan) -> list[tuple[str, str]]:
    found = plan.summary
    tiles = []
    if found.moved or plan.world > 1:
        tiles.append((bytes_text(sum(n for _, n in found.moved)), "moved in an iteration"))
    if found.flops:
        tiles.append((flop_text(found.flops), "useful in an iteration"))
    return tiles


def _figures(
    plan: Plan, forecast: Timeline | None, measured: Timeline | None, memory: int | None
) -> list[tuple[str, str, Any]]:
    """(Name, heading, figure) of the charts, which share one time axis."""
    from actorflow.show.charts import memory_figure, timeline_figure

    found: list[tuple[str, str, Any]] = []
    axis = None
    longest = max((t.end - t.begin for t in (forecast, measured) if t is not None), default=0.0)
    both = forecast is not None and measured is not None
    for name, timeline in (("forecast", forecast), ("measured", measured)):
        if timeline is not None and timeline.spans:
            figure = timeline_figure(plan, timeline, name, longest, axis)
            axis = figure.x_range
            found.append((name, name if both else "", figure))
    for name, timeline in (("forecast", forecast), ("measured", measured)):
        if timeline is not None and timeline.memory:
            found.append((f"{name}-memory", name if both else "", memory_figure(timeline, memory, name, axis)))
    return found


def _charts(
    forecast: Timeline | None, figures: Sequence[tuple[str, str, Any]], parts: Mapping[str, str]
) -> list[Section]:
    def html(memory: bool) -> str:
        return "".join(
            f'<div class="chart">{f"<h3>{heading}</h3>" if heading else ""}{parts[name]}</div>'
            for name, heading, _ in figures
            if name.endswith("-memory") == memory
        )

    found = []
    if html(memory=False):
        about = (
            "What every queue of every rank does; numbers are micro-batches, grey is where a compute queue waits "
            f"(bubble){', framed is the critical cycle, which sets the pace' if forecast is not None else ''}. Drag to "
            "move, Ctrl and wheel to zoom, click a firing for its actor, or a kind to hide it."
        )
        found.append(Section("timeline", "Timeline", html(memory=False), about))
    if html(memory=True):
        about = "What each rank holds: variables, live registers and what actors need while they fire."
        found.append(Section("memory", "Memory", html(memory=True), about))
    return found


def _logical(plan: Plan, levels: Sequence[Folded]) -> Section:
    shown = first_shown(levels)
    drawings = module_graph(plan.origins, shown)
    for fold in levels:
        if fold is not shown:  # drawn when it is asked for: large ones take their time
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


def check_library() -> None:
    """Raise ShowError where the library that draws pages is not installed."""
    if find_spec("bokeh") is None:
        raise ShowError(
            "a page of a plan is drawn with Bokeh, which is not installed here; run: pip install 'actorflow[show]', or "
            "choose a format that needs nothing: .svg, .dot, .json, .txt or .csv"
        )


def _library() -> str:
    """The charts' library, to stand in the page itself."""
    check_library()
    from bokeh.resources import Resources

    return str(Resources(mode="inline", components=["bokeh"]).render())


def _components(figures: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The script that draws the figures, and for each the element that it is drawn in."""
    if not figures:
        return "", {}
    from bokeh.embed import components

    script, parts = components(dict(figures), wrap_script=True)
    return script, dict(parts)


def _json(value: object) -> str:
    """JSON to stand in a <script>: no name in it can end the script or begin a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")  # only strings have a <


def _render(**values: Any) -> str:
    from jinja2 import Environment

    files = resources.files("actorflow.show")
    css = (files / "page.css").read_text(encoding="utf-8").replace("{{ kinds }}", kinds_css())
    script = (files / "page.js").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string((files / "page.html").read_text(encoding="utf-8"))
    return template.render(**values, css=css, script=script)
