"""Rows of tensors, NumPy arrays and memory maps: no Python runs for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from actorflow.data.batch_slots import Room
from actorflow.data.reading import BatchTemplate, Doing, LeafSpec, ReadRequest
from actorflow.data.structure import Structure, take_apart
from actorflow_compiler.core.errors import DataError

__all__ = ["ArrayReader", "arrays_of"]


class ArrayReader:
    """Reads rows of tensors and arrays in one tree of containers; row i is index i of dim 0 of each.

    Raises DataError for arrays of different lengths, and for values that are no numbers.
    """

    def __init__(self, structure: Structure, arrays: Sequence[tuple[str, Any]]) -> None:
        self.arrays = tuple(array for _, array in arrays)
        for path, array in arrays:
            at = f"{path!r} of the dataset" if path else "the dataset"
            if not array.shape:
                raise DataError(f"{at} is one number; a tensor or an array with a row for each sample was expected")
            if isinstance(array, np.ndarray) and array.dtype.kind not in "biufc":
                raise DataError(f"{at} is an array of {array.dtype}; numbers were expected, such as tokens or classes")
            if len(array) != len(self.arrays[0]):
                raise DataError(
                    f"{at} has {len(array)} rows, and the first tensor {len(self.arrays[0])}; as many were expected"
                )
        leaves = tuple(LeafSpec(path, tuple(array.shape[1:]), _dtype(array)) for path, array in arrays)
        self.template: BatchTemplate | None = BatchTemplate(structure, leaves)

    def __len__(self) -> int:
        return len(self.arrays[0])

    def read(self, request: ReadRequest, doing: Doing | None = None, room: Room | None = None) -> list[Tensor]:
        """The rows of each tensor."""
        indices = list(request.indices)
        return [_rows(array, indices) for array in self.arrays]


def arrays_of(dataset: Any) -> ArrayReader | None:
    """The reader of a dataset that is a tensor or an array, or a tuple or dictionary of them; None for any other."""
    if type(dataset) is TensorDataset:
        dataset = list(dataset.tensors)  # as torch's default_collate returns it
    elif not isinstance(dataset, Tensor | np.ndarray | tuple | dict):
        return None
    columns = dataset.values() if isinstance(dataset, dict) else dataset if isinstance(dataset, tuple | list) else ()
    if not all(isinstance(column, Tensor | np.ndarray) for column in columns) or len(columns) > _MOST:
        return None  # it is a collection of samples
    structure, leaves = take_apart(dataset)
    return ArrayReader(structure, leaves) if leaves else None


_MOST = 16  # columns


def _dtype(array: Any) -> torch.dtype:
    return array.dtype if isinstance(array, Tensor) else torch.from_numpy(np.empty(0, _native(array.dtype))).dtype


def _native(dtype: Any) -> Any:
    return dtype.newbyteorder("=")


def _rows(array: Any, indices: list[int]) -> Tensor:
    first, count = indices[0] if indices else 0, len(indices)
    run = indices == list(range(first, first + count))
    if isinstance(array, Tensor):
        return array[first : first + count].clone() if run else array[torch.tensor(indices)]
    found = array[first : first + count] if run else array[indices]
    return torch.from_numpy(np.array(found, dtype=_native(array.dtype)))  # its own memory: a map may be read-only
