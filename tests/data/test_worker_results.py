"""What workers have read arrives as it was: tensors of all dtypes and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

import actorflow as flow

DTYPES = (torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


class Many:
    """Samples of small and large tensors of many dtypes, and of none at all."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        small = {str(dtype): (torch.arange(3) + index).to(dtype) for dtype in DTYPES}
        return {**small, "large": torch.full((5000,), float(index)), "empty": torch.empty(0), "number": index}


def turned(samples: list[Any]) -> Any:
    """A collate whose tensors are not contiguous."""
    batch = default_collate(samples)
    return {name: value.t().contiguous().t() if value.ndim > 1 else value for name, value in batch.items()}


def read(workers: int, **options: Any) -> list[dict[str, Tensor]]:
    loader = flow.data.loader(Many(), 4, workers=workers, **options)
    return [{name: value.clone() for name, value in batch.items()} for batch in loader]


@pytest.mark.parametrize("options", [{}, {"collate": turned}, {"whole": True}], ids=["default", "turned", "whole"])
def test_workers_give_what_the_scripts_process_would_read(options: dict[str, Any]) -> None:
    expected, found = read(0, **options), read(1, **options)
    assert len(found) == 3
    for ours, other in zip(found, expected, strict=True):
        assert list(ours) == list(other)
        for name, value in ours.items():
            assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
            assert torch.equal(value, other[name]), name
