"""The layouts that recipes are trained under, as a user asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import actorflow as flow

__all__ = ["LAYOUTS", "MICRO_BATCHES", "Layout"]

MICRO_BATCHES = 2
Models = Mapping[str, nn.Module]


def _stages(models: Models) -> None:
    """Cut one model into two stages; of several models, every second one has the second device."""
    if len(models) == 1:
        (model,) = models.values()
        flow.place(model, stages=2)
        return
    for number, model in enumerate(models.values()):
        flow.place(model, {"": flow.placement("cpu", [number % 2])})


def _zero(models: Models) -> None:
    """Split what there are parameters of."""
    for model in models.values():
        if next(model.parameters(), None) is not None:
            flow.zero(model, stage=3)


@dataclass(frozen=True)
class Layout:
    """Devices, options of ``global_function``, and hints that are given before the first call."""

    devices: int
    options: Mapping[str, Any] = field(default_factory=dict)
    hints: Callable[[Models], None] = lambda _: None


LAYOUTS = {
    "one device": Layout(1),
    "data 2": Layout(2),
    "tensor 2": Layout(2, {"parallel": "tensor"}),
    "pipeline 2": Layout(2, {"micro_batches": MICRO_BATCHES}, _stages),
    "ZeRO 3": Layout(2, hints=_zero),
}
