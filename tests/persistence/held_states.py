"""Save and load plain states, as tests of what befalls a save do it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import actorflow as flow

__all__ = ["NEW", "OLD", "equal", "load", "save"]

OLD, NEW = (
    {
        "a": torch.full((1500, 1000), value),
        "b": {"c": torch.full((7,), value + 0.5, dtype=torch.float64), "d": value},
        "e": [torch.full((3, 5), value + number) for number in range(16)],
    }
    for value in (1.0, 2.0)
)


def save(folder: Path, value: dict[str, object], step: int | None) -> None:
    flow.checkpoint.save(folder, state=value, step=step, random=False, wait=True)


def load(folder: Path) -> dict[str, object]:
    class Holder:
        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.state = state

    holder = Holder()
    flow.checkpoint.load(folder, state=holder, random=False)
    return holder.state


def equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        real = torch.empty(one.shape, dtype=one.dtype).copy_(one)  # it is read when it is needed
        return isinstance(other, Tensor) and real.equal(other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    return one == other
