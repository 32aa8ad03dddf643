"""Trace batch norms with ``momentum=None``, whose statistics average over all calls, in plain ops.

The weight of a batch depends on a count in a tensor, which the trace must not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.modules.batchnorm
from torch import Tensor

from actorflow_compiler.numbers.unbacked import UnbackedNumber, is_unbacked

__all__ = ["replaced_batch_norm"]


@contextlib.contextmanager
def replaced_batch_norm() -> Iterator[None]:
    """Let ``momentum`` of a batch norm be an unbacked number."""
    layers: Any = torch.nn.modules.batchnorm
    functional: Any = F
    plain = functional.batch_norm

    def norm(
        x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None,
        training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if not is_unbacked(momentum):
            made: Tensor = plain(x, mean, var, weight, bias, training, momentum, eps)
        elif not training or mean is None or var is None:  # momentum is not used
            made = plain(x, mean, var, weight, bias, training, 0.0, eps)
        else:
            made = _averaged(plain, x, mean, var, weight, bias, momentum, eps)
        return made

    layers.float, functional.batch_norm = _as_float, norm
    try:
        yield
    finally:
        del layers.float
        functional.batch_norm = plain


def _as_float(count: Any) -> Any:
    """``float(count)`` that keeps a count in a tensor unbacked."""
    value = count.item() if isinstance(count, Tensor) else count
    return value if is_unbacked(value) else float(value)


def _averaged(
    plain: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, share: UnbackedNumber,
    eps: float,
) -> Tensor:  # fmt: skip
    """A batch norm that moves its statistics by ``share`` towards those of the whole batch."""
    made: Tensor = plain(x, None, None, weight, bias, True, 0.0, eps)
    with torch.no_grad():
        others = [dim for dim in range(x.dim()) if dim != 1]
        values, part = x.detach().to(mean.dtype), share.tensor.to(mean.dtype)
        for statistic, now in ((mean, values.mean(others)), (var, values.var(others))):
            statistic.copy_(part * now + (1 - part) * statistic)
    return made
