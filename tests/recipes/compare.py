"""Compare two runs of a recipe: where they differ most, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Worst", "tensors", "worst"]

SMALLEST = 1e-3  # what tensors whose elements are all smaller are measured by


@dataclasses.dataclass(frozen=True)
class Worst:
    """The tensor that differs most, in relation to its largest element; ``why`` where no number says it."""

    distance: float
    name: str = ""
    why: str = ""


def tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nest of containers, by where they are; numbers count as tensors."""
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
    elif isinstance(value, bool | int | float | complex):
        yield name, torch.tensor(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(f"{name}[{key!r}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from tensors(f"{name}.{part.name}", getattr(value, part.name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors(f"{name}[{number}]", item)


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtypes: bool = True) -> Worst:
    """Where ``found`` is furthest from ``wanted``; infinitely far where one has a tensor that the other has not.

    ``dtypes`` is whether another dtype counts as such a difference.
    """
    if missing := [*(wanted.keys() - found.keys())]:
        return Worst(float("inf"), min(missing), "it is missing")
    if more := [*(found.keys() - wanted.keys())]:
        return Worst(float("inf"), min(more), "eager PyTorch has none")
    return max((_gap(name, found[name], wanted[name], dtypes) for name in wanted), key=lambda w: w.distance)


def _gap(name: str, found: Tensor, wanted: Tensor, dtypes: bool) -> Worst:
    if found.shape != wanted.shape or (dtypes and found.dtype != wanted.dtype):
        said = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found, wanted)]
        return Worst(float("inf"), name, f"{said[0]} is not {said[1]}")
    if wanted.numel() == 0:
        return Worst(0.0, name)
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = found.to(wide), wanted.to(wide)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()).max().item()
    scale = b.nan_to_num(posinf=0, neginf=0).abs().max() if not b.is_complex() else b.abs().max()
    if gap != gap:
        return Worst(float("inf"), name, "one of both is no number")
    return Worst(gap / max(scale.item(), SMALLEST), name)
