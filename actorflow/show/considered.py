"""The plans that were compared, as a chart of step time against memory: one dot a plan, which opens its page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from actorflow_compiler.core.units import bytes_text, seconds_text
from actorflow_compiler.plan.plan import ConsideredPlan
from actorflow_compiler.plan.text import considered_figures

__all__ = ["considered_chart", "considered_table"]

WIDTH, HEIGHT = 760, 300  # of the drawing, in CSS pixels
LEFT, BELOW, ROOM = 80, 36, 28  # pixels for the labels of the axes, and around the dots


def considered_chart(plans: Sequence[ConsideredPlan], pages: Sequence[str]) -> str:
    """The chart as SVG; ``pages`` has an address for each plan, empty where there is none."""
    drawn = [(plan, page) for plan, page in zip(plans, pages, strict=True) if plan.seconds]
    times, sizes = [plan.seconds for plan, _ in drawn], [float(plan.nbytes) for plan, _ in drawn]
    dots = []
    for plan, page in reversed(drawn):  # the chosen one is drawn last, on top
        x = LEFT + ROOM + _place(plan.nbytes, sizes) * (WIDTH - LEFT - 2 * ROOM)
        y = HEIGHT - BELOW - ROOM - _place(plan.seconds, times) * (HEIGHT - BELOW - 2 * ROOM)
        chosen = "" if plan.why else " chosen"
        kind = " estimated" if plan.estimated else chosen
        step, memory, _ = considered_figures(plan)
        said = f"{plan.text}: {step} a step, {memory} on a device"
        label = f"<title>{escape(said + (f'; {plan.why}' if plan.why else '; chosen'))}</title>"
        dot = f'<circle class="plan{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{8 if chosen else 6}">{label}</circle>'
        dots.append(f'<a href="{escape(page)}">{dot}</a>' if page else dot)
    axes = (
        f'<path class="axis" d="M{LEFT} 8V{HEIGHT - BELOW}H{WIDTH - 8}"/>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">memory of a device: '
        f"{bytes_text(int(min(sizes)))} to {bytes_text(int(max(sizes)))}</text>"
        f'<text x="{LEFT - 8}" y="{ROOM}" text-anchor="end">{seconds_text(max(times))}</text>'
        f'<text x="{LEFT - 8}" y="{HEIGHT - BELOW - ROOM}" text-anchor="end">{seconds_text(min(times))}</text>'
        f'<text x="{LEFT - 8}" y="{HEIGHT // 2}" text-anchor="end">a step</text>'
    )
    return f'<svg class="plans" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{axes}{"".join(dots)}</svg>'


def considered_table(plans: Sequence[ConsideredPlan], pages: Sequence[str]) -> str:
    """The same plans as a table, the best first."""
    rows = []
    for plan, page in zip(plans, pages, strict=True):
        name = f'<a href="{escape(page)}">{escape(plan.text)}</a>' if page else escape(plan.text)
        cells = "".join(f"<td>{cell}</td>" for cell in (name, *considered_figures(plan), escape(plan.why or "chosen")))
        rows.append(f"<tr>{cells}</tr>")
    heads = "".join(f"<th>{head}</th>" for head in ("plan", "step", "memory", "moved", "why not"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _place(value: float, among: Sequence[float]) -> float:
    """Where a value is between the least and the largest, from 0 to 1."""
    low, high = min(among), max(among)
    return (value - low) / (high - low) if high > low else 0.5
