"""Which of the plans of one step is wanted: how its backward pass is cut, and what is kept for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the ways to cut a step with micro-batches into actors; the mathematics is the same for all of them.

    Without micro-batches ``weights`` and ``recompute`` change nothing.
    """

    weights: bool = False  # gradients of parameters are computed by actors of their own, W, that nothing hurries
    recompute: bool = False  # a stage keeps its inputs for the backward pass, and computes the rest once more
    joined: bool = False  # forward and backward ops between which nothing else happens are one actor; of whole batches


PLAIN = Variant()
