"""Pad samples of variable length to the size of a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorflow.data.lengths import RowLengths
from actorflow.data.structure import as_tensor, take_apart
from actorflow_compiler.core.errors import DataError

__all__ = ["PaddedPart", "SamplePadder", "row_sizes"]


@dataclass(frozen=True, slots=True)
class PaddedPart:
    """A tensor of a sample, dim 0 of which is as long as the sample."""

    path: str  # in the sample: "input_ids", "0"
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SamplePadder:
    """Pads tensors, arrays and lists of numbers in samples along dim 0."""

    buckets: tuple[int, ...]  # ascending
    lengths: RowLengths
    padding: float | Mapping[str, float]  # for all parts, or by path (0 for others)

    @property
    def used(self) -> tuple[int, ...]:
        """The buckets in which there are samples."""
        found = np.unique(np.searchsorted(np.array(self.buckets), self.lengths.values()))
        return tuple(self.buckets[at] for at in found.tolist())

    def extremes(self) -> tuple[int, int]:
        """Indices of the first of the shortest samples and of the first of the longest."""
        lengths = self.lengths.values()
        return int(lengths.argmin()), int(lengths.argmax())

    def parts(self, samples: Sequence[tuple[int, Any]]) -> tuple[PaddedPart, ...]:
        """What is padded, as these samples, given with their indices, have it: what is as long as each of them.

        Raises DataError where there is none, and for padding that does not fit.
        """
        found: dict[str, torch.dtype] = {}
        sizes: list[str] = []
        for number, (index, sample) in enumerate(samples):
            length = int(self.lengths.values()[index])
            leaves = {path: _as_tensor(leaf) for path, leaf in _leaves(sample)[1]}
            fits = {path: x.dtype for path, x in leaves.items() if x is not None and x.ndim and len(x) == length}
            found = {path: dtype for path, dtype in (found if number else fits).items() if path in fits}
            shown = [f"{path or 'it'}: {list(x.shape)}" for path, x in leaves.items() if x is not None]
            sizes.append(f"sample {index} is {length} long and has {', '.join(shown) or 'no tensors'}")
        if not found:
            raise DataError(
                f"no tensor of a sample is as long as the sample: {'; '.join(dict.fromkeys(sizes))}; with buckets=, "
                f"tensors, arrays or lists of numbers of shape [length, ...] were expected, and lengths= that fits"
            )
        values = self.padding if isinstance(self.padding, Mapping) else {}
        for path in values:
            if path not in found:
                raise DataError(
                    f"padding has {path!r}; expected: paths of what is padded, which are {', '.join(map(repr, found))}"
                )
        for path, dtype in found.items():
            value = self._value(path)
            if torch.tensor(value).to(dtype).item() != value and value == value:
                raise DataError(
                    f"padding of {path or 'samples'!r} with {value!r} was asked for, which {dtype} cannot hold; pass "
                    f"another number, or one for each path: padding={{{path!r}: ...}}"
                )
        return tuple(PaddedPart(path, dtype) for path, dtype in found.items())

    def padded(self, index: int, sample: Any, size: int, parts: Sequence[PaddedPart], tensors: bool) -> Any:
        """The sample, with its parts made as long as ``size``; those that are lists become tensors if ``tensors``.

        Raises DataError for a part that is not as long as the sample.
        """
        wanted = {part.path: part.dtype for part in parts}
        length = int(self.lengths.values()[index])
        structure, leaves = _leaves(sample)
        out: list[Any] = []
        missing = {*wanted}
        for path, leaf in leaves:
            if path not in wanted:
                out.append(leaf)
                continue
            missing.discard(path)
            tensor = _as_tensor(leaf)
            if tensor is None or not tensor.ndim or len(tensor) != length:
                what = f"a {type(leaf).__name__}" if tensor is None else f"of shape {list(tensor.shape)}"
                raise DataError(
                    f"{path or 'the whole'!r} of sample {index} is {what}; {length} along dim 0 was expected, which is "
                    f"the length of the sample"
                )
            out.append(_longer(leaf, tensor, size, self._value(path), wanted[path], tensors))
        if missing:
            raise DataError(
                f"sample {index} has no {', '.join(map(repr, sorted(missing)))}; it was expected, as the first samples "
                f"of the source have it"
            )
        return structure.put_together(out)

    def _value(self, path: str) -> float:
        return self.padding.get(path, 0) if isinstance(self.padding, Mapping) else self.padding


def row_sizes(index: int, sample: Any) -> dict[str, int]:
    """The size of dim 0 of each tensor, array and list of numbers of a sample that has one, by path.

    Raises DataError for a sample without any.
    """
    tensors = {path: _as_tensor(leaf) for path, leaf in _leaves(sample)[1]}
    found = {path: len(tensor) for path, tensor in tensors.items() if tensor is not None and tensor.ndim}
    if not found:
        raise DataError(
            f"sample {index} ({type(sample).__name__}) has no tensor, array or list of numbers of shape [length, ...]: "
            f"its length is not known; pass lengths=, and such samples for buckets="
        )
    return found


def _leaves(sample: Any) -> Any:
    return take_apart(sample, _is_numbers)


def _is_numbers(value: Any) -> bool:
    """Whether it is a list of numbers, which stands for a tensor of one dim."""
    return type(value) is list and all(isinstance(one, int | float) for one in value[:1])


def _as_tensor(leaf: Any) -> Tensor | None:
    """A leaf of a sample as tensor; None for what is none."""
    if _is_numbers(leaf):
        try:
            return torch.tensor(leaf)
        except (TypeError, ValueError, RuntimeError):  # numbers, and something else
            return None
    found = as_tensor(leaf)
    return found if isinstance(found, Tensor) else None


def _longer(leaf: Any, tensor: Tensor, size: int, value: float, dtype: torch.dtype, tensors: bool) -> Any:
    """A part of a sample, of the kind that it has."""
    if isinstance(leaf, list):
        if not tensors:
            return [*leaf, *[value] * (size - len(leaf))]
        tensor = tensor.to(dtype) if not len(leaf) else tensor  # an empty list does not say which numbers it holds
    made = tensor.new_full((size, *tensor.shape[1:]), value)
    made[: len(tensor)] = tensor
    return made.numpy() if isinstance(leaf, np.ndarray) else made
