"""The variants of a step's plan: how its backward pass is cut into actors, and what is kept for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the ways to cut a step into actors; all compute the same.

    Without micro-batches ``weights`` and ``recompute`` change nothing.
    """

    weights: bool = False  # gradients of parameters have actors of their own (W), which may run later
    recompute: bool = False  # a stage keeps only its inputs for the backward pass and recomputes the rest
    joined: bool = False  # whole batches only: forward and backward ops with nothing in between are one actor


PLAIN = Variant()
