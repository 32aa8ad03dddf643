"""Draw a plan and its forecast as one still SVG picture: the timeline, the logical graph and the actors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources

from actorflow.show import svg
from actorflow.show.actors import actor_graph
from actorflow.show.modules import first_shown, fold_levels, module_graph
from actorflow.show.styles import BUBBLE, STYLES, kinds_css, queue_key, ranks_text
from actorflow.show.timeline import TimelineView
from actorflow_compiler.plan.plan import ActorKind, Plan
from actorflow_scheduler.notation import COMPUTING

LEFT, ROW, GAP, WIDE = 170.0, 22.0, 10.0, 1400.0
MARGIN = 28.0


def poster(plan: Plan, timeline: TimelineView) -> str:
    """The SVG, in light colours."""
    levels = fold_levels(plan.origins) if plan.origins.parts else []
    first: dict[int, float] = {}
    for s in timeline.spans:
        first.setdefault(s.actor, s.start)
    listed = timeline.rank_classes or {rank: (rank,) for rank in range(plan.world)}
    drawings = [("Timeline", still_timeline(timeline))]
    if levels:
        drawings.append(("Logical graph", module_graph(plan.origins, first_shown(levels))))
    drawings.append(("Actors", actor_graph(plan, first, listed)))
    parts, y, width = [], 86.0, 0.0
    for title, drawing in drawings:
        size = re.match(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"', drawing)
        assert size is not None
        parts.append(svg.text(MARGIN, y, title, class_="title"))
        parts.append(f'<svg x="{MARGIN:.0f}" y="{y + 14:.0f}"{drawing[4:]}')
        y += float(size[2]) + 60
        width = max(width, float(size[1]))
    head = svg.text(MARGIN, 42.0, plan.name, class_="head")
    pieces = f", {plan.pieces} micro-batches in an iteration" if plan.pieces > 1 else ""
    ranks = f"{plan.world} rank{'s' if plan.world > 1 else ''}{pieces}"
    head += svg.text(MARGIN + 14 + 13.5 * len(plan.name), 42.0, ranks, class_="queue")
    paper = svg.rect(0.0, 0.0, width + 2 * MARGIN, y, class_="paper")
    style = svg.element("style", {}, _style())
    return svg.drawing(style + paper + head + "".join(parts), width + 2 * MARGIN, y, class_="graph")


def still_timeline(timeline: TimelineView) -> str:
    """The rows of all queues in the iteration that is shown first."""
    length = max(timeline.end - timeline.begin, 1e-9)
    spans = [s for s in timeline.spans if s.end > timeline.begin and s.start < timeline.end]
    lanes = sorted({(s.rank, s.queue) for s in spans}, key=lambda lane: (lane[0], queue_key(lane[1])))
    shapes: list[str] = []
    y, before, tops = 34.0, lanes[0][0] if lanes else 0, {}
    for rank, queue in lanes:
        y += GAP if rank != before else 0
        before = rank
        tops[rank, queue] = y
        label = f"{ranks_text(timeline.ranks_of(rank))} · {queue}" if queue == COMPUTING else queue
        shapes.append(svg.text(LEFT - 12, y + ROW / 2 + 4, label, class_="queue", text_anchor="end"))
        if queue == COMPUTING:
            shapes.append(svg.rect(LEFT, y + 2, WIDE, ROW - 4, fill=BUBBLE, opacity=0.35))
        y += ROW

    def x(time: float) -> float:
        return LEFT + WIDE * (min(max(time, timeline.begin), timeline.end) - timeline.begin) / length

    for s in spans:
        look, top, wide = STYLES[s.kind], tops[s.rank, s.queue], x(s.end) - x(s.start)
        marked = (s.actor, s.firing) in timeline.critical
        edge: Mapping[str, object] = {"stroke": "#1b222c", "stroke-width": 1.5} if marked else {}
        shapes.append(svg.rect(x(s.start), top + 2, max(0.6, wide - 0.6), ROW - 4, fill=look.colour, **edge))
        if wide > 6 + 7 * len(str(s.piece)) and s.kind not in (ActorKind.SOURCE, ActorKind.SINK, ActorKind.OPTIMIZER):
            number = {"text_anchor": "middle", "fill": look.ink, "style": f"fill:{look.ink}", "class_": "small"}
            shapes.append(svg.text(x(s.start) + wide / 2, top + ROW / 2 + 4, str(s.piece), **number))
    at = LEFT
    for kind in dict.fromkeys(s.kind for s in spans):
        shapes.append(svg.rect(at, 6.0, 16.0, 12.0, rx=2, fill=STYLES[kind].colour))
        shapes.append(svg.text(at + 22, 16.0, STYLES[kind].label, class_="small"))
        at += 42 + 6.6 * len(STYLES[kind].label)
    shapes.append(svg.text(LEFT + WIDE, y + 20, f"{length * 1e3:.1f} ms", class_="small", text_anchor="end"))
    shapes.append(svg.text(LEFT, y + 20, "0", class_="small"))
    return svg.drawing("".join(shapes), LEFT + WIDE + 30, y + 30, class_="graph")


def _style() -> str:
    """The page's CSS of drawings with its light colours substituted, as few programs support variables in SVG."""
    css = (resources.files("actorflow.show") / "page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--[a-z]+): ([^;]+);", css[: css.index(':root[data-theme="dark"]')]))
    drawn = css[css.index("/* drawings */") : css.index("/* details of what")].replace("{{ kinds }}", kinds_css())
    drawn = re.sub(r"var\((--[a-z]+)\)", lambda m: colours[m[1]], drawn).replace("font-family: inherit;", "")
    return (
        f"{drawn} .graph {{ font-family: Helvetica, Arial, 'DejaVu Sans', sans-serif; }}"
        f" .paper {{ fill: {colours['--paper']}; }} .title {{ font-size: 17px; font-weight: 600; }}"
        f" .head {{ font-size: 22px; font-weight: 600; }}"
    )
