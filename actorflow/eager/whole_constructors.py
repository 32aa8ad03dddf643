"""Create global tensors from values that every rank computes whole, as torch does, and keeps its part of.

Without ``placement=`` each function here is torch's function of that name, exactly.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow.eager import convert
from actorflow.eager.constructors import COMMON_OPTIONS, cut_out, placed_options, plain_options
from actorflow.eager.current import current
from actorflow.eager.global_mode import placed
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.random import check_alike, numbers_of
from actorflow_compiler.core.tensor_bytes import contents

__all__ = [
    "as_tensor", "bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window", "linspace",
    "logspace", "randperm", "tril_indices", "triu_indices",
]  # fmt: skip


def _of_torch(name: str) -> Callable[..., Tensor]:
    """Torch's function ``name``, which also takes a placement and an sbp."""
    function = getattr(torch, name)

    def made(*args: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
        if placement is None:
            plain: Tensor = function(*args, **plain_options(name, sbp, options))
            return plain
        common = {key: options.pop(key) for key in COMMON_OPTIONS & options.keys()}
        dtype, requires_grad = placed_options(name, common)
        whole = function(*args, **options, **({} if dtype is None else {"dtype": dtype}))
        return cut_out(name, (*args, *options.values()), whole, placement, sbp, requires_grad)

    made.__name__ = made.__qualname__ = name
    made.__doc__ = f"``torch.{name}``; with a placement a global tensor of the same values."
    return placed(made)


linspace = _of_torch("linspace")
logspace = _of_torch("logspace")
tril_indices = _of_torch("tril_indices")
triu_indices = _of_torch("triu_indices")
bartlett_window = _of_torch("bartlett_window")
blackman_window = _of_torch("blackman_window")
hamming_window = _of_torch("hamming_window")
hann_window = _of_torch("hann_window")
kaiser_window = _of_torch("kaiser_window")


@placed
def randperm(n: int, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.randperm``; with a placement a global tensor, the permutation that torch draws from the same seed."""
    if placement is None:
        return torch.randperm(n, **plain_options("randperm", sbp, options))
    given = options.pop("generator", None)
    dtype, requires_grad = placed_options("randperm", options)
    comm = current()
    generator = numbers_of(comm, given)
    drawn = torch.randperm(n, generator=generator, dtype=dtype or torch.int64, device=generator.device).cpu()
    check_alike(comm, zlib.crc32(contents(drawn)))
    return cut_out("randperm", (n,), drawn, placement, sbp, requires_grad)


@placed
def as_tensor(data: Any, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.as_tensor``; with a placement the global tensor whose logical value is ``data`` (equal on every rank).

    A global tensor is moved to the placement and sbp, where it is not there already.  Collective with a placement:
    raises CallError where ranks give different data.
    """
    if isinstance(data, GlobalTensor):
        dtype, _ = placed_options("as_tensor", options)
        moved = convert.to_global(data, placement, sbp)
        return moved if dtype is None else moved.to(dtype)
    if placement is None:
        return torch.as_tensor(data, **plain_options("as_tensor", sbp, options))
    dtype, requires_grad = placed_options("as_tensor", options)
    return cut_out("as_tensor", (), torch.as_tensor(data, dtype=dtype), placement, sbp, requires_grad, compare=True)
