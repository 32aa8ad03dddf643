"""Extrapolate a forecast along the lines through those of two shorter plans."""

from __future__ import annotations

from dataclasses import replace

from actorflow_scheduler.forecast import Forecast, RankForecast


def extrapolated(few: Forecast, more: Forecast, in_time: float, in_bytes: float) -> Forecast:
    """The forecast of a longer plan than two that differ in how much a step does.

    ``in_time`` and ``in_bytes`` say how far beyond the second one it is, in steps from the first to the second.
    """
    period = on_line(few.period, more.period, in_time)
    before = {what: share * few.period for what, share in few.spent}
    spent = {what: on_line(before.get(what, 0.0), share * more.period, in_time) / period for what, share in more.spent}
    idle = on_line(few.bubble * few.period, more.bubble * more.period, in_time)
    return replace(
        more,
        period=period,
        first=on_line(few.first, more.first, in_time),
        bubble=min(1.0, idle / period),
        spent=tuple(sorted(spent.items(), key=lambda item: -item[1])),
        ranks=tuple(_rank(few, rank, in_bytes) for rank in more.ranks),
        drafted=True,
    )


def steps_beyond(few: float, more: float, at: float, otherwise: float = 0.0) -> float:
    """How far a place is beyond the second of two, in steps from the first to the second."""
    return (at - more) / (more - few) if more > few else otherwise


def on_line(few: float, more: float, beyond: float) -> float:
    """The value that far beyond the second of two; not below that one, as what does more never takes less."""
    return more + max(0.0, more - few) * beyond


def _rank(few: Forecast, rank: RankForecast, beyond: float) -> RankForecast:
    """The forecast of a class of ranks; the shortest plan may divide them into other classes."""
    before = max((r for r in few.ranks if r.ranks[0] <= rank.ranks[0]), key=lambda r: r.ranks[0])
    return replace(
        rank,
        registers=round(on_line(before.registers, rank.registers, beyond)),
        workspace=round(on_line(before.workspace, rank.workspace, beyond)),
        variables=round(on_line(before.variables, rank.variables, beyond)),
        shared=round(on_line(before.shared, rank.shared, beyond)),
    )
