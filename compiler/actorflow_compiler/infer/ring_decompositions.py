"""Decompositions of attention whose sequence stays split: around a ring of devices, forward and backward.

In each step a device attends to the block of keys and values that it has; the next block is on its way meanwhile.  A
block is passed on once the step before last is done, so that no device has more than two blocks of others.  In the
backward pass the gradients of keys and values go around with them, and one step further, back to where these lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.op_call import OpCall
from actorflow_compiler.core.sbp import Parts, share
from actorflow_compiler.custom_ops.ring_attention import LOST, POSITIONS, traced, wide
from actorflow_compiler.signatures.ring_signatures import BACKWARD, DIMS, FORWARD

Cuts = tuple[tuple[int, tuple[Parts, ...]], ...]  # (dim, devices of each axis that splits it)


class _Ring:
    """The devices of a ring, and how a sequence of some length lies on them."""

    def __init__(self, cuts: Cuts, length: int) -> None:
        ((_, (devices,)),) = cuts
        assert isinstance(devices, int)
        self.devices = devices
        self.rows = [hi - lo for lo, hi in (share(length, devices, i) for i in range(devices))]
        self.even = len(set(self.rows)) == 1

    def blocks(self, step: int, causal: bool) -> list[int]:
        """What ``ring_attention`` is to know of each device's keys in a step."""
        found: list[int] = []
        for device in range(self.devices):
            of = (device - step) % self.devices  # whose keys it has
            keys = 0 if causal and of > device else self.rows[of]
            found += [keys, int(causal and of == device), sum(self.rows[:of])]
        return found

    def rows_of(self, mask: Tensor | None) -> Tensor | None:
        """A mask of all columns, with its rows in equal blocks where it has some for each query."""
        if mask is None:
            return None
        mask = mask if mask.dim() == DIMS else mask[None, None]
        return mask if mask.shape[POSITIONS] == 1 else self.spread(mask)

    def spread(self, x: Tensor) -> Tensor:
        """A tensor that lies as the sequence, in equal blocks."""
        return x if self.even else traced().even_out(x, self.rows, max(self.rows))

    def whole(self, x: Tensor) -> Tensor:
        """The opposite of ``spread``."""
        return x if self.even else traced().cut_back(x, self.rows, max(self.rows))

    def pass_on(self, tensors: Sequence[Tensor], after: Tensor) -> list[Tensor]:
        """Blocks of all tensors, each passed on to the next device."""
        return [traced().pass_on(x, after, self.devices) for x in tensors]


def _forward(
    cuts: Cuts, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries, keys = (_Ring(cuts, x.shape[POSITIONS]) for x in (q, k))
    mask = queries.rows_of(attn_mask)
    top = None if mask is None else mask.amax(-1)
    q, k, v = queries.spread(q), keys.spread(k), keys.spread(v)
    out: Tensor | None = None
    sums: Tensor | None = None
    done = q  # when this is computed, the next block may come
    for step in range(keys.devices):
        if step:
            k, v = keys.pass_on((k, v), done)
            assert sums is not None
            done = sums
        out, sums = traced().ring_attention(q, k, v, out, sums, mask, top, keys.blocks(step, is_causal), scale)
    assert out is not None
    assert sums is not None
    if top is not None:  # rows that see nothing: what the kernel says of them
        sums = torch.where(top < LOST, torch.where(top == -torch.inf, 0.0, top).to(sums.dtype), sums)
    return queries.whole(out), queries.whole(sums)


def _backward(
    cuts: Cuts, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dropout_p: float,
    is_causal: bool, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    queries, keys = (_Ring(cuts, x.shape[POSITIONS]) for x in (q, k))
    grad, q, out, sums = (queries.spread(x) for x in (grad, q, out, sums))
    k, v = keys.spread(k), keys.spread(v)
    mask = queries.rows_of(attn_mask)
    dq: Tensor | None = None
    found: list[Tensor] = []  # the gradients of the keys and values that are here
    done = grad
    for step in range(keys.devices):
        if step:
            k, v = keys.pass_on((k, v), done)
            assert dq is not None
            done = found[0]
            found = keys.pass_on(found, dq)
        dq, *terms = traced().ring_attention_backward(
            grad, q, k, v, out, sums, dq, mask, keys.blocks(step, is_causal), scale
        )
        found = [a + b for a, b in zip(found, terms, strict=True)] if step else terms
    assert dq is not None
    dk, dv = (keys.whole(x) for x in keys.pass_on(found, dq))
    return queries.whole(dq), dk, dv


@dataclass(frozen=True, slots=True)
class RingCost:
    """What attention around a ring needs beside its arithmetic."""

    moved: float  # bytes that all devices send together
    times: int  # communications, one after the other; what is passed on together is one
    hidden: float  # share of the bytes that move while a device computes
    joined: float  # bytes that a device reads and writes to join the results of the steps


def ring_cost(call: OpCall, devices: int) -> RingCost:
    """The cost of a call of attention, without decomposing it."""
    backward = call.op == BACKWARD
    tensors = call.ins[1:4] if backward else call.ins[:3]
    q, k, v = (m.nbytes for m in tensors)
    dtype = getattr(torch, tensors[0].dtype)
    wider, steps = wide(dtype).itemsize // dtype.itemsize, devices - 1
    if not backward:
        out = q // tensors[0].shape[-1] * tensors[2].shape[-1]
        return RingCost(steps * (k + v), steps, 1.0, 3 * wider * out * steps / devices)
    moved = (steps + devices) * (k + v)  # blocks, and their gradients once more than these
    hidden = 1 - 1 / (steps + devices)
    return RingCost(moved, steps + devices, hidden, 3 * (wider * q + k + v) * steps / devices)


RING_BODIES: dict[str, Callable[..., Any]] = {FORWARD: _forward, BACKWARD: _backward}
