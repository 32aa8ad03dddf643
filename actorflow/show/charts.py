"""The data of a page's charts (timeline, memory), for JSON; ``charts.js`` draws them.

All charts of a page have one time axis, in milliseconds; the iteration that is shown first begins at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorflow.show.styles import BUBBLE, LINES, STYLES, queue_key, ranks_text
from actorflow.show.timeline import TimelineSpan, TimelineView
from actorflow_compiler.plan.plan import ActorKind, Plan
from actorflow_scheduler.notation import COMPUTING

__all__ = ["memory_chart", "time_axis", "timeline_chart"]

ROW, SIDE, GAP = 1.0, 0.62, 0.45  # heights of a compute queue, of another one, and of the space between ranks
FULL = (
    ActorKind.FORWARD,
    ActorKind.BACKWARD,
    ActorKind.WEIGHT,
)  # drawn with gaps between firings; others would often be too short to be seen
UNNUMBERED = (
    ActorKind.SOURCE,
    ActorKind.SINK,
    ActorKind.OPTIMIZER,
)  # drawn without a number: they do not belong to one micro-batch
ROOM = 0.05  # margin before and after a timeline, as a fraction of its length


def time_axis(timelines: Sequence[TimelineView]) -> dict[str, list[float]]:
    """``first``: the range (milliseconds) shown at first, the longest iteration; ``bounds``: all that can be shown."""
    length = max(max((t.end - t.begin for t in timelines), default=0.0), 1e-9) * 1e3
    first = [-0.02 * length, 1.02 * length]
    low, high = first
    for t in timelines:
        instants = [x for s in t.spans for x in (s.start, s.end)] or [t.begin, t.end]
        room = ROOM * (max(instants) - min(instants))
        low = min(low, (min(instants) - room - t.begin) * 1e3)
        high = max(high, (max(instants) + room - t.begin) * 1e3)
    return {"first": first, "bounds": [low, high]}


def timeline_chart(plan: Plan, timeline: TimelineView, name: str) -> dict[str, Any]:
    """The chart of a timeline: its rows (queues) and spans (firings), the latter as sorted columns."""
    lanes = sorted({(s.rank, s.queue) for s in timeline.spans}, key=lambda lane: (lane[0], queue_key(lane[1])))
    number = {lane: k for k, lane in enumerate(lanes)}
    actors = {a.id: a for a in plan.actors}
    kinds = [kind for kind in STYLES if any(s.kind == kind for s in timeline.spans)]
    spans = sorted(timeline.spans, key=lambda s: (number[s.rank, s.queue], s.start, s.end))
    gaps = _bubbles(timeline.spans)
    return {
        "name": name,
        "kind": "timeline",
        "rows": _rows(lanes, timeline),
        "kinds": [
            {
                "label": STYLES[kind].label, "colour": STYLES[kind].colour, "ink": STYLES[kind].ink,
                "full": kind in FULL, "numbered": kind not in UNNUMBERED,
            }
            for kind in kinds
        ],
        "names": {s.actor: actors[s.actor].name for s in spans},
        "spans": {
            "row": [number[s.rank, s.queue] for s in spans],
            "kind": [kinds.index(s.kind) for s in spans],
            "start": [_ms(s.start, timeline) for s in spans],
            "end": [_ms(s.end, timeline) for s in spans],
            "actor": [s.actor for s in spans],
            "piece": [s.piece for s in spans],
            "iteration": [s.firing // actors[s.actor].rate for s in spans],
            "critical": [k for k, s in enumerate(spans) if (s.actor, s.firing) in timeline.critical],
        },
        "bubbles": {
            "colour": BUBBLE,
            "row": [number[rank, COMPUTING] for rank, _, _ in gaps],
            "start": [_ms(start, timeline) for _, start, _ in gaps],
            "end": [_ms(end, timeline) for _, _, end in gaps],
        },
    }  # fmt: skip


def memory_chart(timeline: TimelineView, limit: int | None, name: str) -> dict[str, Any]:
    """The chart of bytes that ranks hold, one line for equal ones; ``limit`` is a rank's memory in bytes."""
    most = max((max(held, default=0) for _, held in timeline.memory.values()), default=0)
    equal: dict[tuple[tuple[float, ...], tuple[int, ...]], list[int]] = {}
    for rank, (instants, sizes) in sorted(timeline.memory.items()):
        equal.setdefault((tuple(instants), tuple(sizes)), []).extend(timeline.ranks_of(rank))
    lines = [
        {
            "label": ranks_text(ranks),
            "colour": LINES[k % len(LINES)],
            "dashed": k >= len(LINES),
            "at": [_ms(t, timeline) for t in instants],
            "bytes": list(sizes),
        }
        for k, ((instants, sizes), ranks) in enumerate(equal.items())
    ]
    shown = limit if limit is not None and limit <= 1.5 * most else None  # not shown where it is far above all lines
    return {"name": name, "kind": "memory", "lines": lines, "most": most, "limit": shown}


def _ms(instant: float, timeline: TimelineView) -> float:
    """Milliseconds on the common axis, rounded to nanoseconds."""
    return round((instant - timeline.begin) * 1e3, 6)


def _rows(lanes: Sequence[tuple[int, str]], timeline: TimelineView) -> list[dict[str, Any]]:
    """For each queue the label, the top and the height of its row."""
    rows: list[dict[str, Any]] = []
    y, before = 0.0, None
    for rank, queue in lanes:
        y += GAP if before not in (None, rank) else 0
        tall = ROW if queue == COMPUTING else SIDE
        label = f"{ranks_text(timeline.ranks_of(rank))} · {queue}" if queue == COMPUTING else queue
        rows.append({"label": label, "top": round(y, 2), "tall": tall})
        y, before = y + tall, rank
    return rows


def _bubbles(spans: Sequence[TimelineSpan]) -> list[tuple[int, float, float]]:
    """(Rank, start, end) of the idle times of compute queues, from the first firing of any to the last one of each."""
    lanes: dict[int, list[TimelineSpan]] = {}
    for s in spans:
        if s.queue == COMPUTING:
            lanes.setdefault(s.rank, []).append(s)
    begin = min((s.start for of_rank in lanes.values() for s in of_rank), default=0.0)
    gaps: list[tuple[int, float, float]] = []
    for rank, of_rank in sorted(lanes.items()):
        free = begin
        for s in sorted(of_rank, key=lambda s: s.start):
            if s.start > free:
                gaps.append((rank, free, s.start))
            free = max(free, s.end)
    return gaps
