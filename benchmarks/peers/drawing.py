"""Draw the ratios of the suite as bars, an SVG that follows the reader's light or dark scheme.  Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from results import Figures

WIDTH, LEFT, RIGHT = 940, 290, 240
ROW, TOP, BOTTOM = 26, 34, 30
MOST = 1.4  # where the axis ends; what is longer is cut, and its figure says so
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; } .quiet { fill: #59636e; } line { stroke: #59636e; }
.grid { stroke: #d1d9e0; } .one { stroke: #1f2328; } .kept { fill: #2da44e; } .missed { fill: #bf8700; }
.target { stroke: #cf222e; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .quiet { fill: #9198a1; } line { stroke: #9198a1; } .grid { stroke: #3d444d; }
.one { stroke: #e6edf3; } .target { stroke: #ff7b72; } }
"""


def chart(rows: Sequence[Figures]) -> str:
    """Bars for the time of a step of ours, where theirs is 1, with the rounds' least and most and the target."""
    rows = [row for row in rows if row.workload.kind != "idle"]
    height = TOP + ROW * len(rows) + BOTTOM

    def x(ratio: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(ratio, MOST) / MOST, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>Time of a step, actorflow : the other</title><style>{STYLE}</style>'
    ]
    for tick in range(0, int(MOST * 10) + 1, 2):
        at = x(tick / 10)
        kind = "one" if tick == 10 else "grid"
        parts.append(f'<line class="{kind}" x1="{at}" x2="{at}" y1="{TOP - 6}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text class="quiet" x="{at}" y="{TOP - 12}" text-anchor="middle">{tick / 10:g}</text>')
    for number, row in enumerate(rows):
        y, middle = TOP + ROW * number + 4, TOP + ROW * number + ROW / 2
        title = row.workload.title.replace("`", "")
        parts.append(f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(_short(title))}</text>')
        kind, width = "kept" if row.kept else "missed", round(x(row.time) - x(0), 1)
        parts.append(f'<rect class="{kind}" x="{x(0)}" y="{y}" width="{width}" height="{ROW - 8}"/>')
        parts.append(f'<line x1="{x(row.low)}" x2="{x(row.high)}" y1="{middle}" y2="{middle}"/>')
        target = x(row.workload.target)
        parts.append(f'<line class="target" x1="{target}" x2="{target}" y1="{y - 2}" y2="{y + ROW - 6}"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 4}">{row.time:.2f} of {escape(_short(row.theirs))}</text>'
        )
    parts.append(
        f'<text class="quiet" x="{LEFT}" y="{height - 8}">time of a step, the other&#8217;s = 1; red: what it is '
        "to be at most; thin: least and most of the rounds</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _short(text: str) -> str:
    return text if len(text) <= 42 else text[:41] + "…"


__all__ = ["chart"]
