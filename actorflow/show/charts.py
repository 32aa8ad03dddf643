"""Timelines enter; Bokeh figures leave: what the queues do, with bubbles and the critical cycle, and memory over time.

All figures of a page have one time axis: 0 is where the iteration that is looked at first begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from actorflow.show.timeline import Span, Timeline
from actorflow.show.words import BUBBLE, DARK, LINES, LOOKS, queue_key, ranks_text
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.notation import COMPUTING

ROW, SIDE, GAP = 1.0, 0.62, 0.45  # heights of a compute queue, of another one, and of the space between ranks
PIXELS = 25  # of a compute queue
FULL = ("forward", "backward", "weight")  # kept apart by thin lines; others are often too short to be seen without
OPENS = "actorflow.open(cb_data.source.data.actor[cb_data.source.selected.indices[0]])"  # what a click does
SHOWS = """
const room = figure.inner_width / (range.end - range.start);
const {label, shown, width} = source.data;
for (let i = 0; i < label.length; i++) shown[i] = width[i] * room > 5 + 7 * label[i].length ? label[i] : '';
source.change.emit();
"""  # a firing's micro-batch is written where there is room


def timeline_figure(plan: Plan, timeline: Timeline, name: str, longest: float, x_range: Any = None) -> Any:
    """The firings of every queue, a row each; ``x_range`` is another figure's, to move together.

    ``longest`` is how many seconds are to be seen at first: those of the longest iteration of the figures.
    """
    from bokeh.models import CustomJS, FixedTicker, HoverTool, TapTool

    rows = _rows(timeline.spans)
    bottom = max((y + tall(queue) for (_, queue), y in rows.items()), default=ROW)
    length = max(longest, 1e-9) * 1e3
    first = min((s.start for s in timeline.spans), default=0.0)
    last = max((s.end for s in timeline.spans), default=0.0)
    view = x_range or _range(-0.02 * length, 1.02 * length)
    low, high = _around(timeline, first, last)
    known = view.bounds or (low, high)  # of all figures that move together
    view.bounds = (min(low, known[0], -0.02 * length), max(high, known[1], 1.02 * length))
    figure = _figure(name, view, _range(bottom, -GAP), round(PIXELS * bottom) + 90)
    figure.yaxis.ticker = FixedTicker(ticks=[y + tall(queue) / 2 for (_, queue), y in rows.items()])
    figure.yaxis.major_label_overrides = {
        y + tall(queue) / 2: f"{ranks_text(timeline.ranks_of(rank))} · {queue}" if queue == COMPUTING else queue
        for (rank, queue), y in rows.items()
    }
    figure.xaxis.axis_label = "milliseconds"
    _bubbles(figure, timeline, rows)
    rates = {a.id: (a.name, a.rate) for a in plan.actors}
    drawn = []
    for kind, look in LOOKS.items():
        spans = [s for s in timeline.spans if s.kind == kind]
        if spans:
            more: dict[str, Any] = {
                "name": [rates[s.actor][0] for s in spans],
                "piece": [s.piece for s in spans],
                "iteration": [s.firing // rates[s.actor][1] for s in spans],
                "lasts": [_duration(s.end - s.start) for s in spans],
                "at": [f"{(s.start - timeline.begin) * 1e3:.3f}" for s in spans],
            }
            source = _source(timeline, spans, rows, more)
            drawn.append(
                figure.quad(
                    left="left", right="right", top="top", bottom="bottom", source=source, legend_label=look.label,
                    fill_color=look.colour, line_color="#ffffff" if kind in FULL else look.colour,
                    line_alpha=0.55 if kind in FULL else 1.0, line_width=0.8 if kind in FULL else 1.0,
                    hover_fill_alpha=0.8, nonselection_fill_alpha=0.75, selection_line_color=look.colour,
                    selection_line_width=3,
                )
            )  # fmt: skip
    tooltip = "<b>@name</b> · micro-batch @piece · iteration @iteration<br>@lasts, from @at ms"
    figure.add_tools(HoverTool(renderers=drawn, tooltips=tooltip, point_policy="follow_mouse"))
    figure.add_tools(TapTool(renderers=drawn, callback=CustomJS(code=OPENS)))
    marked = [s for s in timeline.spans if (s.actor, s.firing) in timeline.critical]
    if marked:
        figure.quad(
            left="left", right="right", top="top", bottom="bottom", source=_source(timeline, marked, rows),
            legend_label="critical cycle", fill_color=None, line_color=DARK, line_width=2, tags=["ink"],
        )  # fmt: skip
    _numbers(figure, timeline, rows, view)
    for edge in (0.0, length):
        _rule(figure, "height", edge, BUBBLE, line_dash="dotted", line_width=1.5)
    _finish(figure)
    return figure


def memory_figure(timeline: Timeline, limit: int | None, name: str, x_range: Any = None) -> Any:
    """The bytes that each rank holds, over time; ``limit`` is what a rank has."""
    from bokeh.models import ColumnDataSource, HoverTool

    most = max((max(held, default=0) for _, held in timeline.memory.values()), default=0)
    unit, word = next(((1 << k, w) for k, w in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if most >> k), (1, "bytes"))
    length = max(timeline.end - timeline.begin, 1e-9) * 1e3
    high = 1.08 * most / unit or 1.0
    figure = _figure(name, x_range or _range(-0.02 * length, 1.02 * length), _range(0, high), 280)
    figure.xaxis.axis_label, figure.yaxis.axis_label = "milliseconds", word
    drawn = []
    equal: dict[tuple[tuple[float, ...], tuple[int, ...]], list[int]] = {}
    for rank, (instants, sizes) in sorted(timeline.memory.items()):
        equal.setdefault((tuple(instants), tuple(sizes)), []).extend(timeline.ranks_of(rank))
    for i, ((when, held), ranks) in enumerate(equal.items()):
        who = ranks_text(ranks)
        data = {
            "x": [(t - timeline.begin) * 1e3 for t in when],
            "y": [n / unit for n in held],
            "who": [who] * len(when),
        }
        style: dict[str, Any] = {"line_dash": "solid" if i < len(LINES) else "dashed"}
        source = ColumnDataSource(data)
        colour = LINES[i % len(LINES)]
        drawn.append(
            figure.step("x", "y", source=source, mode="after", line_width=1.8, color=colour, legend_label=who, **style)
        )
    figure.add_tools(
        HoverTool(renderers=drawn, tooltips=f"<b>@who</b><br>@y{{0,0.0}} {word} at @x{{0.000}} ms", line_policy="prev")
    )
    if limit is not None and limit <= 1.5 * most:
        _rule(figure, "width", limit / unit, LOOKS["boxing"].colour, line_width=2)
        figure.y_range.end = max(high, 1.08 * limit / unit)
    _finish(figure)
    return figure


def _range(start: float, end: float, **more: Any) -> Any:
    from bokeh.models import Range1d

    return Range1d(start=start, end=end, **more)


def _rule(figure: Any, dimension: Literal["width", "height"], location: float, colour: str, **more: Any) -> None:
    """A line across the whole figure."""
    from bokeh.models.annotations import Span as Line

    figure.add_layout(Line(location=location, dimension=dimension, line_color=colour, **more))


def _figure(name: str, x_range: Any, y_range: Any, height: int) -> Any:
    from bokeh.models import WheelZoomTool
    from bokeh.plotting import figure

    found = figure(
        name=name, x_range=x_range, y_range=y_range, height=height, sizing_mode="stretch_width", tools="xpan,reset",
        active_drag="xpan", output_backend="canvas", toolbar_location="right", background_fill_alpha=0,
        border_fill_alpha=0, outline_line_color=None, lod_threshold=None,
    )  # fmt: skip
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    found.add_tools(wheel, "xbox_zoom", "xzoom_in", "xzoom_out", "save")
    found.toolbar.active_scroll = wheel
    found.toolbar.logo = None
    found.toolbar.autohide = True
    found.ygrid.visible = False
    return found


def _finish(figure: Any) -> None:
    """What is the same everywhere; colours of text and lines are the page's."""
    if figure.legend:
        legend = figure.legend[0]
        figure.add_layout(legend, "above")
        legend.orientation, legend.click_policy = "horizontal", "hide"
        legend.border_line_color, legend.background_fill_alpha = None, 0
        legend.label_text_font_size, legend.glyph_width, legend.glyph_height = "12px", 16, 12
        legend.margin, legend.padding, legend.spacing, legend.ncols = 0, 4, 14, "auto"
    for axis in figure.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"


def tall(queue: str) -> float:
    """The height of a queue's row."""
    return ROW if queue == COMPUTING else SIDE


def _rows(spans: Sequence[Span]) -> dict[tuple[int, str], float]:
    """(Rank, queue) → how far down its row begins."""
    lanes = sorted({(s.rank, s.queue) for s in spans}, key=lambda lane: (lane[0], queue_key(lane[1])))
    rows: dict[tuple[int, str], float] = {}
    y, before = 0.0, None
    for rank, queue in lanes:
        y += GAP if before not in (None, rank) else 0
        rows[rank, queue], before = y, rank
        y += tall(queue)
    return rows


def _source(
    timeline: Timeline,
    spans: Sequence[Span],
    rows: Mapping[tuple[int, str], float],
    more: Mapping[str, Any] = {},
) -> Any:
    """Where the areas of firings are, the actors, and ``more`` columns."""
    import numpy as np
    from bokeh.models import ColumnDataSource

    top = np.array([rows[s.rank, s.queue] for s in spans])
    height = np.array([tall(s.queue) for s in spans])
    return ColumnDataSource(
        {
            "left": (np.array([s.start for s in spans]) - timeline.begin) * 1e3,
            "right": (np.array([s.end for s in spans]) - timeline.begin) * 1e3,
            "top": top + 0.08 * height,
            "bottom": top + 0.92 * height,
            "actor": [s.actor for s in spans],
            **more,
        }
    )


def _bubbles(figure: Any, timeline: Timeline, rows: Mapping[tuple[int, str], float]) -> None:
    """Where a compute queue runs nothing, up to its last firing."""
    lanes: dict[int, list[Span]] = {}
    for s in timeline.spans:
        if s.queue == COMPUTING:
            lanes.setdefault(s.rank, []).append(s)
    if not lanes:
        return
    begin = min(s.start for spans in lanes.values() for s in spans)
    gaps: list[Span] = []
    for rank, spans in lanes.items():
        free = begin
        for s in sorted(spans, key=lambda s: s.start):
            if s.start > free:
                gaps.append(Span(rank, COMPUTING, -1, 0, 0, "", free, s.start))
            free = max(free, s.end)
    if gaps:
        figure.quad(
            left="left", right="right", top="top", bottom="bottom", source=_source(timeline, gaps, rows),
            fill_color=BUBBLE, fill_alpha=0.35, line_color=None, legend_label="bubble",
        )  # fmt: skip


def _numbers(figure: Any, timeline: Timeline, rows: Mapping[tuple[int, str], float], view: Any) -> None:
    """The number of the micro-batch on each firing that is wide enough."""
    from bokeh.models import ColumnDataSource, CustomJS

    spans = [s for s in timeline.spans if s.kind not in ("source", "sink", "optimizer")]
    source = ColumnDataSource(
        {
            "x": [((s.start + s.end) / 2 - timeline.begin) * 1e3 for s in spans],
            "y": [rows[s.rank, s.queue] + tall(s.queue) / 2 for s in spans],
            "label": [str(s.piece) for s in spans],
            "shown": [""] * len(spans),
            "width": [(s.end - s.start) * 1e3 for s in spans],
            "ink": [LOOKS[s.kind].ink for s in spans],
        }
    )
    figure.text(
        x="x", y="y", text="shown", source=source, text_color="ink", text_align="center", text_baseline="middle",
        text_font_size="11px",
    )  # fmt: skip
    again = CustomJS(args={"figure": figure, "range": view, "source": source}, code=SHOWS)
    view.js_on_change("start", again)
    view.js_on_change("end", again)
    figure.js_on_change("inner_width", again)


def _around(timeline: Timeline, first: float, last: float) -> tuple[float, float]:
    room = 0.05 * (last - first)
    return (first - room - timeline.begin) * 1e3, (last + room - timeline.begin) * 1e3


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"
