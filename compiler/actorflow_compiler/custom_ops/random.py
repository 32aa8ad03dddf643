"""Random numbers that depend on an element's index in the whole tensor, so that they are equal under every plan.

``actorflow.uniform`` hashes (seed of the call, number of the stream, index of the element).  Its arguments say which
elements of the whole tensor a part has, on a device or in a micro-batch.  A step is traced with
``torch.ops.actorflow.draw``, which becomes ``actorflow.uniform`` in its graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorflow_compiler.core.ops import Arg, Ref, Symbol
from actorflow_compiler.core.sbp import Parts, Split, spans

DRAW = "actorflow.draw.default"
UNIFORM = "actorflow.uniform"
SEED = "random.seed"  # the scalar that changes with every call
Ranges = tuple[tuple[int, int], ...]  # (start, length) of the elements of a dim, in order

# positions of the op's arguments
WHOLE, HAS, STREAM, SEED_AT, PIECE, STEP, DTYPE, DEVICE = range(8)

# the constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1
_CHUNK = 1 << 15  # elements per core at a time, so that their 64-bit numbers stay in its cache
_CHUNK_OF_DEVICE = 1 << 24  # elements at a time on an accelerator, to bound the memory

torch.library.define(
    "actorflow::draw", "(SymInt[] size, *, ScalarType dtype, Device device, int stream, int? seed) -> Tensor"
)


def _shape_of_draw(
    size: Sequence[int], *, dtype: torch.dtype, device: torch.device, stream: int, seed: int | None
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


torch.library.register_fake("actorflow::draw", _shape_of_draw)


def uniform_arguments(
    shape: Sequence[int], stream: int, seed: Ref | int, dtype: Symbol, device: Symbol
) -> tuple[Arg, ...]:
    """The arguments of ``actorflow.uniform`` for a whole tensor."""
    return (tuple(shape), tuple(((0, n),) for n in shape), stream, seed, None, None, dtype, device)


def uniform(
    whole: Sequence[int],
    has: Sequence[Ranges],
    stream: int,
    seed: float,
    piece: int | None,
    step: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Tensor:
    """Uniform numbers for the elements ``has`` (ranges in each dim) of a tensor of shape ``whole``.

    float32 and float64: in [0, 1), multiples of 2⁻²⁴ and 2⁻⁵³; int64: all of its values.  The same
    element of the same (seed, stream) has the same number; different streams or seeds are independent.
    ``step`` = (dim, length): micro-batch number ``piece`` begins at piece·length in that dim.
    """
    chunk = _CHUNK * torch.get_num_threads() if device is None or device.type == "cpu" else _CHUNK_OF_DEVICE
    rows, columns = _positions(whole, has, chunk, piece, step, device)
    rows = rows.mul_(_signed(_GAMMA)).add_(_signed(splitmix64(splitmix64(int(seed)) ^ stream)))
    columns = columns.mul_(_signed(_GAMMA))
    out = torch.empty((len(rows), len(columns)), dtype=dtype, device=device)
    height = max(1, chunk // max(1, len(columns)))
    for i in range(0, len(rows), height):
        some = rows[i : i + height].unsqueeze(1)
        for j in range(0, len(columns), chunk):
            bits = _splitmix64_(some + columns[j : j + chunk])
            part = out[i : i + len(some), j : j + chunk]
            if dtype == torch.int64:
                part.copy_(bits)
            else:
                digits = {torch.float32: 24, torch.float64: 53}[dtype]
                part.copy_((bits >> 64 - digits).bitwise_and_(2**digits - 1)).mul_(2.0**-digits)
    return out.view([sum(n for _, n in ranges) for ranges in has])


def _positions(
    whole: Sequence[int],
    has: Sequence[Ranges],
    chunk: int,
    piece: int | None,
    step: Sequence[int] | None,
    device: torch.device | None,
) -> tuple[Tensor, Tensor]:
    """Flat indices of the elements in the whole: (rows, columns), where element (i, j) has index rows[i] + columns[j].

    ``columns`` cover as many trailing dims as have at most ``chunk`` elements together, at least the last; ``rows`` the
    leading ones.
    """
    rows, columns = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    stride, trailing = 1, True
    for dim in range(len(whole) - 1, -1, -1):
        at = torch.cat([torch.arange(start, start + n, device=device) for start, n in has[dim]])
        if step is not None and step[0] == dim and piece is not None:
            at += piece * step[1]
        at.mul_(stride)
        trailing = trailing and (stride == 1 or len(at) * len(columns) <= chunk)
        if trailing:
            columns = (at.unsqueeze(1) + columns).view(-1)
        else:
            rows = (at.unsqueeze(1) + rows).view(-1)
        stride *= whole[dim]
    return rows, columns


def splitmix64(value: int) -> int:
    """Hash a 64-bit number: a one-to-one mapping in which every output bit depends on every bit of ``value``."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ value >> 30) * _MIX_1) & _MASK
    value = ((value ^ value >> 27) * _MIX_2) & _MASK
    return value ^ value >> 31


def _splitmix64_(bits: Tensor) -> Tensor:
    """``splitmix64`` of every element of an int64 tensor, in place (the caller has added ``_GAMMA``)."""
    bits.bitwise_xor_((bits >> 30).bitwise_and_(2**34 - 1)).mul_(_signed(_MIX_1))
    bits.bitwise_xor_((bits >> 27).bitwise_and_(2**37 - 1)).mul_(_signed(_MIX_2))
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(2**33 - 1))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def local_elements(has: Sequence[Ranges], size: int, layout: Split, parts: Parts, index: int) -> tuple[Ranges, ...]:
    """The ranges of one device, given those of the whole, when dim ``layout.dim`` of ``size`` elements is split."""
    out = list(has)
    out[layout.dim] = _part(out[layout.dim], spans(size, layout, parts, index))
    return tuple(out)


def in_pieces(args: tuple[Arg, ...], dim: int, length: int, piece: Ref) -> tuple[Arg, ...]:
    """The arguments of the op for one piece of ``length`` along ``dim``, given those for the first piece."""
    out = list(args)
    out[PIECE], out[STEP] = piece, (dim, length)
    return tuple(out)


def _part(ranges: Ranges, wanted: Sequence[tuple[int, int]]) -> Ranges:
    """The elements of a list of ranges at positions ``wanted``, (start, length) pairs that count listed elements."""
    found = []
    for lo, n in wanted:
        passed = 0
        for start, length in ranges:
            first, last = max(lo, passed), min(lo + n, passed + length)
            if first < last:
                found.append((start + first - passed, last - first))
            passed += length
    return tuple(found) or ((0, 0),)
