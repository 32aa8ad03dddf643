"""Replace ``torch.linalg.lstsq`` and ``torch.bincount``, whose output sizes depend on values, by ops of fixed sizes.

``TABLE`` is a ``decomposition_table`` for the first trace of a step, below autograd: the gradients are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.substitutes.decomposition_table import Table, registering_into

__all__ = ["OPS", "TABLE"]

aten = torch.ops.aten
TABLE: Table = {}
RANKED = ("gelsy", "gelsd", "gelss")  # drivers that find ranks …
DECOMPOSING = ("gelsd", "gelss")  # … and singular values
EXACT = (torch.float32, torch.float64)  # dtypes of weights in which bincount adds up; it converts others to float64


def lstsq(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> tuple[Tensor, Tensor, Tensor]:
    """Solve least squares problems: the solution, the rank and the singular values.

    a (*, m, n), b (*, m, k) → (*, n, k), int64 (*), (*, min(m, n)); outputs that the driver does not compute are zeros.
    """
    # gelsy starts from pivots that torch leaves uninitialized: replicas would differ in their last bits
    found_by = "gelsd" if driver == "gelsy" else driver
    solution, _, rank, values = torch.linalg.lstsq(a, b, rcond=rcond, driver=found_by)
    batch = a.shape[:-2]
    if driver not in RANKED:
        rank = torch.zeros(batch, dtype=torch.int64, device=a.device)
    if driver not in DECOMPOSING:
        values = torch.zeros((*batch, min(a.shape[-2:])), dtype=a.real.dtype, device=a.device)
    return solution, rank, values


OPS: dict[str, Callable[..., Any]] = {"lstsq": lstsq}


def _known_to_torch() -> Any:
    """Register the op with torch, so that a trace can contain it."""

    def found(a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        *batch, rows, columns = a.shape
        values = a.new_empty((*batch, min(rows, columns)), dtype=a.real.dtype)
        return a.new_empty((*batch, columns, b.shape[-1])), a.new_empty(batch, dtype=torch.int64), values

    torch.library.custom_op("actorflow::lstsq", lstsq, mutates_args=()).register_fake(found)
    return torch.ops.actorflow


TRACED = _known_to_torch()


@registering_into(TABLE)(aten.linalg_lstsq.default)
def _lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As in torch, but where a rank is too low and torch leaves the residuals of gelsd or gelss out, they are NaN."""
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    right = b.unsqueeze(-1) if vector else b
    batch = torch.broadcast_shapes(a.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    a, right = a.expand(*batch, *a.shape[-2:]), right.expand(*batch, *right.shape[-2:])
    rows, columns = a.shape[-2:]
    solution, rank, values = TRACED.lstsq(a, right, rcond, driver)
    residuals = a.new_empty(0, dtype=a.real.dtype)
    if rows > columns and driver != "gelsy":
        residuals = (a @ solution - right).abs().square().sum(-2)
        if driver in DECOMPOSING:
            residuals = torch.where((rank == columns).all(), residuals, float("nan"))
    if driver not in RANKED:
        rank = rank.new_empty(0)
    if driver not in DECOMPOSING:
        values = values.new_empty(0)
    return solution.squeeze(-1) if vector else solution, residuals, rank, values


@registering_into(TABLE)(aten.bincount.default)
def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """``bincount`` with exactly ``minlength`` bins; the call raises for values that have no bin.

    Does not apply without ``minlength``.
    """
    if x.dim() != 1 or x.dtype not in (torch.int64, torch.int32) or not minlength:
        return NotImplemented
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype not in EXACT:
        weights = weights.to(torch.float64)
    return torch.zeros(minlength, dtype=weights.dtype, device=x.device).index_add(0, x, weights)
