"""The note of a plan about redundant computation: which ops several devices compute in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHOWN = 4  # ops in the note
NEGLIGIBLE = 0.001  # fraction of all FLOPs that is not worth a note


@dataclass(frozen=True, slots=True)
class RedundantOp:
    """An op of a module that several devices compute redundantly."""

    op: str
    where: str  # the module
    splits: bool  # whether the op can be split at all


def redundancy_notes(repeated: Mapping[RedundantOp, float], done: float) -> tuple[str, ...]:
    """The note, if there is anything to say.

    ``repeated`` are the FLOPs beyond those of one device, ``done`` all FLOPs of all devices.

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
