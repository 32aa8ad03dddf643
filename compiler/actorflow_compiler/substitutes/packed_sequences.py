"""Trace packed sequences (``nn.utils.rnn``) of known lengths as plain ops over their parts.

The number of sequences that are left at each time step decides sizes.  So lengths must be known during capture: lists,
constants, and tensors of the script, whose values become conditions of the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.core.torch_internals import is_fake, only_dispatch, plain_tensor, real_tensors, replaced_in_vf

__all__ = ["replaced_sequence_packing"]

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class KnownSizes(Tensor):
    """A tensor of integers whose values are known during capture, as are results of ops on ``KnownSizes`` alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, Tensor) and is_fake(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map_only(
                KnownSizes, lambda s: torch.tensor(plain_sizes(s).tolist()), (args, kwargs)
            )
            return func(*args, **kwargs)
        with real_tensors():
            args, kwargs = pytree.tree_map_only(KnownSizes, plain_sizes, (args, kwargs))
            return pytree.tree_map_only(Tensor, known_sizes, func(*args, **kwargs))


def known_sizes(tensor: Tensor) -> Tensor:
    """A tensor with values in host memory as ``KnownSizes``."""
    with only_dispatch():
        return tensor.as_subclass(KnownSizes)


def plain_sizes(tensor: Tensor) -> Tensor:
    """``KnownSizes`` as a plain tensor."""
    return plain_tensor(tensor)


@contextlib.contextmanager
def replaced_sequence_packing() -> Iterator[None]:
    """Pack and pad sequences with plain ops, and let recurrent layers run over packed sequences."""

    def over(layer: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return layer(*(plain_sizes(a) if isinstance(a, KnownSizes) else a for a in args))

        return run

    with replaced_in_vf({"_pack_padded_sequence": _pack, "_pad_packed_sequence": _pad}, LAYERS, over):
        yield


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The op ``_pack_padded_sequence``: the rows in order of time, and the number of rows at each time step."""
    x = x.transpose(0, 1) if batch_first else x
    of: list[int] = lengths.tolist()
    if len(of) != x.shape[1]:
        raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {len(of)}, not {x.shape[1]}")
    if sorted(of, reverse=True) != of:
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to sidestep this requirement"
        )
    if not of or of[-1] <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0, but found an element that is not")
    if of[0] > x.shape[0]:
        raise RuntimeError(f"Expected lengths of at most {x.shape[0]}, as the sequences are, but got {of[0]}")
    rows = [sum(length > t for length in of) for t in range(of[0])]
    parts = [x[t : t + times, :count].flatten(0, 1) for t, _, times, count in _runs(rows)]
    with real_tensors():
        batch_sizes = torch.tensor(rows)
    return torch.cat(parts), known_sizes(batch_sizes)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total_length: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op ``_pad_packed_sequence``: the padded sequences, and their lengths."""
    rows: list[int] = batch_sizes.tolist()
    batch = rows[0]
    parts = []
    for _, first, times, count in _runs(rows):
        part = data[first : first + times * count].reshape(times, count, *data.shape[1:])
        parts.append(F.pad(part, (0, 0) * (part.dim() - 2) + (0, batch - count), value=value))
    padded = torch.cat(parts)
    if total_length > len(rows):
        padded = F.pad(padded, (0, 0) * (padded.dim() - 1) + (0, total_length - len(rows)), value=value)
    lengths = torch.tensor([sum(count > row for count in rows) for row in range(batch)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Runs of time steps with equally many rows: (first step, first packed row, number of steps, rows at each)."""
    time = first = 0
    for count, group in groupby(rows):
        times = len([*group])
        yield time, first, times, count
        time, first = time + times, first + times * count
