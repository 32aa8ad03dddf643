"""Random numbers that depend on where an element lies in the whole tensor, not on who draws it: equal under every plan.

``actorflow.uniform`` hashes (seed of the call, number of the op, index of the element).  A part of
the tensor, on a device or in a micro-batch, knows which elements of the whole it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorflow_compiler.ops import Arg, Ref
from actorflow_compiler.sbp import Split, spans

UNIFORM = "actorflow.uniform"
SEED = "random.seed"  # the scalar that changes with every call
Ranges = tuple[tuple[int, int], ...]  # (start, length) of the elements of a dim, in order

# positions of the op's arguments
LIKE, WHOLE, HAS, STREAM, SEED_AT, PIECE, STEP = range(7)


def uniform_arguments(like: Arg, shape: Sequence[int], stream: int, seed: Ref) -> tuple[Arg, ...]:
    """The arguments of ``actorflow.uniform`` for a whole tensor."""
    return (like, tuple(shape), tuple(((0, n),) for n in shape), stream, seed, None, None)


def uniform(
    like: Tensor | None,
    whole: Sequence[int],
    has: Sequence[Ranges],
    stream: int,
    seed: float,
    piece: int | None,
    step: Sequence[int] | None,
) -> Tensor:
    """float32 numbers in [0, 1) for the elements ``has`` of a tensor of shape ``whole``.

    ``like`` gives the device.  ``step`` = (dim, length): micro-batch number ``piece`` begins at
    piece·length in that dim.  The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    device = None if like is None else like.device
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in range(len(whole) - 1, -1, -1):
        at = torch.cat([torch.arange(start, start + n, device=device) for start, n in has[dim]])
        if step is not None and step[0] == dim and piece is not None:
            at = at + piece * step[1]
        index = index + (at * stride).view(-1, *[1] * (len(whole) - 1 - dim))
        stride *= whole[dim]
    key = (int(seed) * 0x2545F4914F6CDD1D + (stream + 1) * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
    mixed = index * -0x61C8864680B583EB + key
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def local_elements(has: Sequence[Ranges], size: int, layout: Split, parts: int, index: int) -> tuple[Ranges, ...]:
    """Of the elements of each dim, those of one device when dim ``layout.dim``, of ``size`` elements, is split."""
    out = list(has)
    out[layout.dim] = _part(out[layout.dim], spans(size, layout, parts, index))
    return tuple(out)


def in_pieces(args: tuple[Arg, ...], dim: int, length: int, piece: Ref) -> tuple[Arg, ...]:
    """The arguments of the op for one piece of ``length`` along ``dim``, given those for the first."""
    out = list(args)
    out[PIECE], out[STEP] = piece, (dim, length)
    return tuple(out)


def _part(ranges: Ranges, wanted: Sequence[tuple[int, int]]) -> Ranges:
    """Those elements of a list of ranges whose positions are in ``wanted``."""
    found = []
    for lo, n in wanted:
        passed = 0
        for start, length in ranges:
            first, last = max(lo, passed), min(lo + n, passed + length)
            if first < last:
                found.append((start + first - passed, last - first))
            passed += length
    return tuple(found) or ((0, 0),)
