"""``torch.bincount`` with a ``minlength`` goes in, which has that many bins or more; the same with as many comes out.

``TABLE`` is a ``decomposition_table`` for the trace of what the user wrote.  The call raises for values without a bin:
PyTorch would make one for them, and a plan has fixed sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.substitutes.decomposed import Table, into

__all__ = ["TABLE"]

TABLE: Table = {}
EXACT = (torch.float32, torch.float64)  # dtypes of weights in which sums are made; others go to float64


@into(TABLE)(torch.ops.aten.bincount.default)
def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    if x.dim() != 1 or x.dtype not in (torch.int64, torch.int32) or not minlength:
        return NotImplemented
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype not in EXACT:
        weights = weights.to(torch.float64)
    return torch.zeros(minlength, dtype=weights.dtype, device=x.device).index_add(0, x, weights)
