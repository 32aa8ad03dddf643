"""What each op of a plan does more than once enters; the lines that name the ops behind most of it leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHOWN = 4  # ops in the line
NEGLIGIBLE = 0.001  # a fraction of all FLOPs


@dataclass(frozen=True, slots=True)
class Work:
    """An op in a place of the model."""

    op: str
    where: str
    splits: bool  # whether it could have been split


def tell_repeated(repeated: Mapping[Work, float], done: float) -> tuple[str, ...]:
    """``repeated`` are FLOPs beyond those of one device, ``done`` all FLOPs of all devices.

    ``6.2% of all FLOPs are done more than once: 5.9% by aten.bmm.default (layers.0), …``
    """
    total = sum(repeated.values())
    if not done or total < NEGLIGIBLE * done:
        return ()
    most = sorted(repeated.items(), key=lambda item: -item[1])
    parts = [
        f"{flops / done:.1%} by {work.op}{f' ({work.where})' if work.where else ''}"
        f"{'' if work.splits else ', which nothing splits'}"
        for work, flops in most[:SHOWN]
        if flops >= NEGLIGIBLE * done
    ]
    more = f"; and {len(most) - len(parts)} more" if len(most) > len(parts) else ""
    return (f"{total / done:.1%} of all FLOPs are done more than once: {'; '.join(parts)}{more}",)
