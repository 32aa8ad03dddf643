"""The variants of a step's plan: how its backward pass is cut, what is kept for it, how far gathers run ahead."""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 2  # chunks of gathered parameters that may always be in memory at a time: one is used, one is on its way


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the ways to cut a step into actors; all compute the same.

    Without micro-batches ``weights`` and ``recompute`` change nothing.
    """

    weights: bool = False  # gradients of parameters have actors of their own (W), which may run later
    recompute: bool = False  # a stage keeps only its inputs for the backward pass and recomputes the rest
    joined: bool = False  # whole batches only: forward and backward ops with nothing in between are one actor
    ahead: int | None = AHEAD  # gathered chunks of a pass of a stage in memory at a time; None: any number
    shared: bool = False  # ``ahead`` is for both passes together, which then take turns; only with a single stage


PLAIN = Variant()
