"""Attention around a ring of devices: each keeps its block of queries, and blocks of keys and values are passed on.

A sequence lies in equal *blocks*, one for each device of the ring.  In step 0 each device attends to its own block of
keys and values, and in each later one to that which the device before it had in the step before.  What the steps give
is joined by the logarithms of the rows' sums, so that no device ever has all keys.  ``blocks`` says, for one device
after the other, how many of the keys that it has are of the sequence (the rest only fills the block), whether row
``i`` of its queries sees the keys up to ``i`` (1) or all of them (0), and the number of the first key.  A device
without keys computes nothing in that step.

A mask has all columns, of which a step takes those of its keys.  Keys that a mask hides have -inf there, or a number
so low that what is added to it is lost in rounding.  Where a row sees no other keys, its sum is lost, too, and the mean
of the values is taken, as the whole attention does: such rows count their keys instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

RING = "actorflow.ring_attention"
RING_BACKWARD = "actorflow.ring_attention_backward"
PASS_ON = "actorflow.pass_on"
EVEN_OUT = "actorflow.even_out"
CUT_BACK = "actorflow.cut_back"
POSITIONS = 2  # the dim of all operands along which the sequence lies
EACH = 3  # numbers that ``blocks`` has for each device
LOST = -1e30  # numbers of a mask below it leave nothing of what they are added to
NARROW = (torch.bfloat16, torch.float16)
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the steps' results are added up."""
    return torch.float32 if dtype in NARROW else dtype


def pass_on(x: Tensor, after: Tensor, devices: int) -> Tensor:
    """Each device's block of ``x`` as the next device's, and the last one's as the first's.

    It is sent once ``after``, of which nothing else is known, has been computed.
    """
    return x.roll(x.shape[POSITIONS] // devices, POSITIONS)


def even_out(x: Tensor, rows: Sequence[int], most: int) -> Tensor:
    """Devices' parts of ``x``, which have so many ``rows``, as blocks of ``most`` rows, filled up with zeros."""
    out = x.new_zeros((*x.shape[:POSITIONS], most * len(rows), *x.shape[POSITIONS + 1 :]))
    for block, part in zip(torch.split(out, most, POSITIONS), torch.split(x, list(rows), POSITIONS), strict=True):
        block.narrow(POSITIONS, 0, part.shape[POSITIONS]).copy_(part)
    return out


def cut_back(x: Tensor, rows: Sequence[int], most: int) -> Tensor:
    """What ``even_out`` was made of."""
    parts = zip(torch.split(x, most, POSITIONS), rows, strict=True)
    return torch.cat([block.narrow(POSITIONS, 0, count) for block, count in parts], POSITIONS)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, sums: Tensor | None, mask: Tensor | None, top: Tensor | None,
    blocks: Sequence[int], scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step: attention to the keys that are here, joined with ``out`` and ``sums`` of the steps before.

    q (batch, heads, n·rows, width), k (batch, heads, n·keys, width), v likewise, for n devices → values
    (batch, heads, n·rows, width of values) and the logarithm of each row's sum (batch, heads, n·rows), both in float32
    for operands of 16 bits, else in their dtype.  ``mask`` (batch, heads, n·rows, all keys), each of the first three
    possibly 1, is added to the scores; ``top`` has the largest number of each of its rows.
    """
    made = []
    seen = [None] * (len(blocks) // EACH) if mask is None or top is None else list(_masks(blocks, mask, top))
    for (keys, causal, _), masked, (queries, k_, v_, *known) in zip(
        _blocks(blocks), seen, _each(blocks, q, k, v, out, sums), strict=True
    ):
        if not keys:
            made.append(_nothing(queries, v_) if out is None else tuple(x.clone() for x in known))
            continue
        here = None if masked is None else masked[0]
        used = (x.narrow(POSITIONS, 0, keys) for x in (k_, v_))
        found, ends = _attend(queries, *used, 0.0, bool(causal), attn_mask=here, scale=scale)[:2]
        found = found.to(wide(q.dtype))
        if masked is not None:
            ends = _ends(ends, *masked)
        if out is not None:
            before, until = known
            whole = torch.logaddexp(until, ends)
            found = before * _share(until, whole, masked) + found * _share(ends, whole, masked)
            ends = whole
        made.append((found, ends))
    outs, ends = zip(*made, strict=True)
    return _joined(outs), _joined(ends)


def ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dq: Tensor | None, mask: Tensor | None,
    blocks: Sequence[int], scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The terms that the keys that are here give: of the gradient of queries with those of the steps before (``dq``).

    The gradients of keys and values are only this step's, in the dtype of the operands; that of queries is as wide as
    ``ring_attention``'s values.  ``out`` and ``sums`` are those of the whole attention.
    """
    made = []
    seen = [None] * (len(blocks) // EACH) if mask is None else [m for m, _ in _masks(blocks, mask, mask[..., 0])]
    for (keys, causal, _), masked, (up, queries, k_, v_, outs, ends, *known) in zip(
        _blocks(blocks), seen, _each(blocks, grad, q, k, v, out, sums, dq), strict=True
    ):
        if not keys:
            first = queries.new_zeros(queries.shape, dtype=wide(q.dtype)) if dq is None else known[0].clone()
            made.append((first, k_.new_zeros(k_.shape), v_.new_zeros(v_.shape)))
            continue
        used = (x.narrow(POSITIONS, 0, keys) for x in (k_, v_))
        first, *others = _attend_backward(
            up, queries, *used, outs, ends, 0.0, bool(causal), attn_mask=masked, scale=scale
        )
        first = first.to(wide(q.dtype)) if dq is None else known[0] + first
        fill = (0, 0, 0, k_.shape[POSITIONS] - keys)
        made.append((first, *(torch.nn.functional.pad(x, fill) if fill[-1] else x for x in others)))
    firsts, dk, dv = zip(*made, strict=True)
    return _joined(firsts), _joined(dk), _joined(dv)


def own_blocks(blocks: Sequence[int], index: int) -> tuple[int, ...]:
    """What ``blocks`` says of one device."""
    return tuple(blocks[EACH * index : EACH * (index + 1)])


def all_alike(blocks: object) -> bool:
    """Whether ``blocks`` lets all devices compute equally much."""
    return isinstance(blocks, Sequence) and len(set(blocks[::EACH])) == len(set(blocks[1::EACH])) == 1


def _blocks(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """What ``blocks`` says of each device."""
    yield from zip(blocks[::EACH], blocks[1::EACH], blocks[2::EACH], strict=True)


def _each(blocks: Sequence[int], *tensors: Tensor | None) -> Iterator[list[Any]]:
    """For each device its blocks of all tensors that are there."""
    n = len(blocks) // EACH
    held = [x.chunk(n, POSITIONS) for x in tensors if x is not None]
    for i in range(n):
        yield [x[i] for x in held]


def _masks(blocks: Sequence[int], mask: Tensor, top: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each device the mask of the keys that it has, and the largest numbers of the mask's rows."""
    n = len(blocks) // EACH
    rows, tops = ([x] * n if x.shape[POSITIONS] == 1 else x.chunk(n, POSITIONS) for x in (mask, top))
    for (keys, _, first), own, largest in zip(_blocks(blocks), rows, tops, strict=True):
        yield own.narrow(-1, first, keys), largest


def _ends(ends: Tensor, mask: Tensor, top: Tensor) -> Tensor:
    """The logarithms of rows' sums, but where a row sees no key at all, that of the number of its keys.

    The kernel gives 0, or a number in which the sum is lost, where it sees none of the keys that are here.
    """
    hidden = mask == -torch.inf
    counted = ((mask == top.unsqueeze(-1)) & ~hidden).sum(-1).to(ends.dtype).log()
    return torch.where(top < LOST, counted, torch.where(hidden.all(-1), -torch.inf, ends))


def _share(ends: Tensor, whole: Tensor, masked: object) -> Tensor:
    """The weight of a step's values among all; 0 where no key has been seen so far."""
    share = (ends - whole).exp()
    return (share if masked is None else torch.where(whole == -torch.inf, 0.0, share)).unsqueeze(-1)


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide(q.dtype)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return out, q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The blocks of all devices."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), POSITIONS)


OPS: dict[str, Callable[..., Any]] = {
    "ring_attention": ring_attention, "ring_attention_backward": ring_attention_backward, "pass_on": pass_on,
    "even_out": even_out, "cut_back": cut_back,
}  # fmt: skip


@functools.cache
def traced() -> Any:
    """The ops as torch knows them, so that a trace can contain them: ``traced().pass_on(...)``."""

    def attended(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, sums: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor]:
        dtype = wide(q.dtype)
        return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), q.new_empty(q.shape[:-1], dtype=dtype)

    def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape, dtype=wide(q.dtype)), k.new_empty(k.shape), v.new_empty(v.shape)

    def passed(x: Tensor, after: Tensor, devices: int) -> Tensor:
        return x.new_empty(x.shape)

    def evened(x: Tensor, rows: Sequence[int], most: int) -> Tensor:
        return x.new_empty((*x.shape[:POSITIONS], most * len(rows), *x.shape[POSITIONS + 1 :]))

    def shortened(x: Tensor, rows: Sequence[int], most: int) -> Tensor:
        return x.new_empty((*x.shape[:POSITIONS], sum(rows), *x.shape[POSITIONS + 1 :]))

    shapes: dict[str, Callable[..., Any]] = {
        "ring_attention": attended, "ring_attention_backward": gradients, "pass_on": passed, "even_out": evened,
        "cut_back": shortened,
    }  # fmt: skip
    for name, shape in shapes.items():
        torch.library.custom_op(f"actorflow::{name}", OPS[name], mutates_args=()).register_fake(shape)
    return torch.ops.actorflow
