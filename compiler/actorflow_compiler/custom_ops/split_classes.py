"""Ops over tensors whose classes (a vocabulary, say) may be split: what each part contributes to the whole.

Arguments say where a part's classes begin in the whole.  The results of ``pick`` on all parts add up to its result on
the whole; the results of ``amax_blocks`` on all parts, concatenated, are its result on the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.sbp import Parts, device_count, even_shares, share


def pick(x: Tensor, target: Tensor, dim: int, ignore: int, first: int, classes: int) -> Tensor:
    """The element of its target class for each sample: ``out[n] = x[n, target[n]]`` for ``dim`` 1.

    ``x`` holds ``x.shape[dim]`` of ``classes`` classes, from class ``first`` on; ``target`` (integers) has
    its shape without ``dim``.  0 where the target is ``ignore`` or a class of another part.  Raises what
    ``torch.gather`` raises for a target that is no class at all.
    """
    if not x.shape[dim]:
        return x.new_zeros(target.shape)
    at, here = _places(target, x.shape[dim], ignore, first, classes)
    return torch.where(here, x.gather(dim, at.unsqueeze(dim)).squeeze(dim), 0)


def pick_backward(grad: Tensor, target: Tensor, size: int, dim: int, ignore: int, first: int, classes: int) -> Tensor:
    """The gradient of ``pick``'s ``x``, which has ``size`` classes along ``dim``: zero except where ``pick`` reads."""
    out = grad.new_zeros((*target.shape[:dim], size, *target.shape[dim:]))
    if not size:
        return out
    at, here = _places(target, size, ignore, first, classes)
    return out.scatter_(dim, at.unsqueeze(dim), torch.where(here, grad, 0).unsqueeze(dim))


def _places(target: Tensor, size: int, ignore: int, first: int, classes: int) -> tuple[Tensor, Tensor]:
    """The index of each target in a part of ``size`` classes, and whether it is in it.

    Targets of other parts get index 0.  A target that is no class stays out of bounds, so that an index op raises.
    """
    target = target.long()
    at = target - first
    counts = target != ignore
    here = counts & (at >= 0) & (at < size)
    elsewhere = ~counts | (~here & (target >= 0) & (target < classes))
    return torch.where(elsewhere, 0, at), here


def listed(axes: Iterable[Parts]) -> tuple[int, ...]:
    """Mesh axes as one list, as an argument of an op is: devices of each, or minus their number, then their weights."""
    return tuple(itertools.chain.from_iterable((n,) if isinstance(n, int) else (-len(n), *n) for n in axes))


def first_axis(parts: Sequence[int]) -> tuple[int, Parts, tuple[int, ...]]:
    """How often ``amax_blocks`` repeats each maximum, the first axis of its list (1 if none is left), and the rest."""
    times, left = (parts[1], tuple(parts[2:])) if parts and not parts[0] else (1, tuple(parts))
    if not left:
        return times, 1, ()
    if left[0] > 0:
        return times, left[0], left[1:]
    return times, left[1 : 1 - left[0]], left[1 - left[0] :]


def parts_on(parts: Sequence[int], index: int) -> tuple[int, ...]:
    """The list of ``amax_blocks`` for one device of the first axis, which has a block of it.

    It begins with 0 and a number where each maximum is repeated: as often as the device's weight says, so that a split
    of the maxima by weights gives it its own.
    """
    times, axis, rest = first_axis(parts)
    times *= 1 if isinstance(axis, int) else axis[index]
    return (0, times, *rest) if times > 1 else rest


def amax_blocks(x: Tensor, dim: int, parts: Sequence[int]) -> Tensor:
    """The maxima of the blocks into which ``dim`` is cut, over the devices of one axis after the other.

    ``parts`` lists the axes as ``listed`` does.  Blocks have the sizes of parts of a split.  The output has one element
    for each block along ``dim``, or as many as the weights of its devices multiply to.
    The maximum of an empty block is the smallest value of the dtype.
    """
    times, axis, _ = first_axis(parts)
    if times > 1:
        return amax_blocks(x, dim, parts[2:]).repeat_interleave(times, dim)
    if not parts:
        if x.shape[dim]:
            return x.amax(dim, keepdim=True)
        least = -torch.inf if x.is_floating_point() else 0 if x.dtype == torch.bool else torch.iinfo(x.dtype).min
        return x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), least)
    ranges = [share(x.shape[dim], axis, i) for i in range(device_count(axis))]
    blocks = [x.narrow(dim, lo, hi - lo) for lo, hi in ranges]
    return torch.cat([amax_blocks(block, dim, parts_on(parts, i)) for i, block in enumerate(blocks)], dim)


OPS: dict[str, Callable[..., Any]] = {"pick": pick, "pick_backward": pick_backward, "amax_blocks": amax_blocks}


def _known_to_torch() -> Any:
    """Register the ops with torch, so that a trace can contain them."""

    def picked(x: Tensor, target: Tensor, *_: int) -> Tensor:
        return x.new_empty(target.shape)

    def spread(grad: Tensor, target: Tensor, size: int, dim: int, *_: int) -> Tensor:
        return grad.new_empty((*target.shape[:dim], size, *target.shape[dim:]))

    def maxima(x: Tensor, dim: int, parts: Sequence[int]) -> Tensor:
        count, axis, rest = first_axis(parts)
        while axis != 1 or rest:
            count *= even_shares(axis)
            _, axis, rest = first_axis(rest)
        return x.new_empty((*x.shape[:dim], count, *x.shape[dim + 1 :]))

    for name, shape in (("pick", picked), ("pick_backward", spread), ("amax_blocks", maxima)):
        torch.library.custom_op(f"actorflow::{name}", OPS[name], mutates_args=()).register_fake(shape)
    return torch.ops.actorflow


TRACED = _known_to_torch()  # the same ops for decompositions to call: TRACED.pick(...)
