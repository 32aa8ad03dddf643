"""Causal attention of some of a sequence's queries to all of its keys: what a device runs that has a part of the rows.

The keys that come before all of these queries are seen by each of them, and those that begin with the first query by a
causal mask; the two parts are joined by the logarithms of their sums, so that no mask is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CAUSAL = "actorflow.causal_attention"
CAUSAL_BACKWARD = "actorflow.causal_attention_backward"
Rows = Sequence[Sequence[int]]  # runs of rows one after another: (number of the first, how many)
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def causal_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float | None) -> tuple[Tensor, Tensor]:
    """These rows of causal attention, where row ``i`` sees the keys up to ``i``.

    q (batch, heads, rows, width), k (batch, heads, keys, width), v (batch, heads, keys, width of values) → values of
    the shape and dtype of ``q``, and the logarithm of each row's sum (batch, heads, rows), as torch's kernel gives it.
    """
    found = [_forward(q.narrow(2, at, count), k, v, first, scale) for at, first, count in _runs(rows)]
    if len(found) == 1:
        return found[0]
    return torch.cat([out for out, _ in found], 2), torch.cat([sums for _, sums in found], 2)


def causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, rows: Rows, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``causal_attention``'s queries, keys and values; those of keys and values are terms of a sum."""
    found = []
    for at, first, count in _runs(rows):
        grads, queries, outs, ends = (x.narrow(2, at, count) for x in (grad, q, out, sums))
        found.append(_backward(grads, queries, k, v, outs, ends, first, scale))
    if len(found) == 1:
        return found[0]
    dq, dk, dv = zip(*found, strict=True)
    return torch.cat(dq, 2), sum(dk[1:], dk[0]), sum(dv[1:], dv[0])


def rows_of(rows: Rows, spans: Rows) -> tuple[tuple[int, int], ...]:
    """The rows at these ``spans`` (first position, length) of a tensor that holds ``rows``."""
    found = []
    for begin, length in spans:
        for at, first, count in _runs(rows):
            low, high = max(begin, at), min(begin + length, at + count)
            if low < high:
                found.append((first + low - at, high - low))
    return tuple(found)


def _runs(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield the position at which each run of rows begins, its first row, and its length."""
    at = 0
    for first, count in rows:
        yield at, first, count
        at += count


def _forward(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """As ``causal_attention``, of consecutive rows from ``first`` on."""
    past = min(first, k.shape[2])
    here = min(k.shape[2] - past, q.shape[2])
    parts = [
        _attend(q, k.narrow(2, start, count), v.narrow(2, start, count), 0.0, causal, scale=scale)[:2]
        for start, count, causal in ((0, past, False), (past, here, True))
        if count
    ]
    if len(parts) == 1:
        return parts[0][0], parts[0][1]
    (before, sums_before), (after, sums_after) = parts
    sums = torch.logaddexp(sums_before, sums_after)
    out = before * (sums_before - sums).exp().unsqueeze(-1) + after * (sums_after - sums).exp().unsqueeze(-1)
    return torch.empty_like(before).copy_(out), sums  # in the dtype, and with the strides, of what the kernel returns


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, first: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    past = min(first, k.shape[2])
    here = min(k.shape[2] - past, q.shape[2])
    dq: Tensor | None = None
    dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    for start, count, causal in ((0, past, False), (past, here, True)):
        if count:
            keys, values = k.narrow(2, start, count), v.narrow(2, start, count)
            part, *parts = _attend_backward(grad, q, keys, values, out, sums, 0.0, causal, scale=scale)
            dq = part if dq is None else dq + part
            for whole, term in zip((dk, dv), parts, strict=True):
                whole.narrow(2, start, count).copy_(term)
    assert dq is not None
    return dq, dk, dv


OPS: dict[str, Callable[..., Any]] = {
    "causal_attention": causal_attention, "causal_attention_backward": causal_attention_backward,
}  # fmt: skip
