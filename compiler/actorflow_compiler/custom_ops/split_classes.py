"""Ops over tensors whose classes (a vocabulary, say) may be split: what each part contributes to the whole.

Arguments say where a part's classes begin in the whole.  The results of ``pick`` on all parts add up to its result on
the whole; the results of ``amax_blocks`` on all parts, concatenated, are its result on the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.sbp import numel, share


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


def amax_blocks(x: Tensor, dim: int, parts: Sequence[int]) -> Tensor:
    """The maxima of the blocks into which ``dim`` is cut, over ``parts[0]`` devices, each over ``parts[1]`` and so on.

    Blocks have the sizes of parts of a split.  The output has one element for each block along ``dim``.
    The maximum of an empty block is the smallest value of the dtype.
    """
    if not parts:
        if x.shape[dim]:
            return x.amax(dim, keepdim=True)
        least = -torch.inf if x.is_floating_point() else 0 if x.dtype == torch.bool else torch.iinfo(x.dtype).min
        return x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), least)
    ranges = [share(x.shape[dim], parts[0], i) for i in range(parts[0])]
    return torch.cat([amax_blocks(x.narrow(dim, lo, hi - lo), dim, parts[1:]) for lo, hi in ranges], dim)


OPS: dict[str, Callable[..., Any]] = {"pick": pick, "pick_backward": pick_backward, "amax_blocks": amax_blocks}


def _known_to_torch() -> Any:
    """Register the ops with torch, so that a trace can contain them."""

    def picked(x: Tensor, target: Tensor, *_: int) -> Tensor:
        return x.new_empty(target.shape)

    def spread(grad: Tensor, target: Tensor, size: int, dim: int, *_: int) -> Tensor:
        return grad.new_empty((*target.shape[:dim], size, *target.shape[dim:]))

    def maxima(x: Tensor, dim: int, parts: Sequence[int]) -> Tensor:
        return x.new_empty((*x.shape[:dim], numel(parts), *x.shape[dim + 1 :]))

    for name, shape in (("pick", picked), ("pick_backward", spread), ("amax_blocks", maxima)):
        torch.library.custom_op(f"actorflow::{name}", OPS[name], mutates_args=()).register_fake(shape)
    return torch.ops.actorflow


TRACED = _known_to_torch()  # the same ops for decompositions to call: TRACED.pick(...)
