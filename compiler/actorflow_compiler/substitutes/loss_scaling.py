"""Trace torch's dynamic loss scaling (``GradScaler``) without a decision on the host.

Whether a gradient has an infinity or a NaN is a value of the graph: 0 or NaN for each gradient.  These add up over
parts, micro-batches and stages like any partial sums.  The sum masks the optimizer's step.  The scale and its growth
tracker are variables of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.torch_internals import OpOverload

aten = torch.ops.aten


def finite(x: Tensor) -> Tensor:
    """0 if every element of ``x`` is finite, else NaN; a float32 scalar.  The sum over all parts is the whole's result.

    >>> finite(torch.tensor([1.0, 2.0]))
    tensor(0.)
    """
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"))
    return largest.to(torch.float32).mul_(0)


@torch.library.custom_op("actorflow::finite", mutates_args=())
def traced_finite(x: Tensor) -> Tensor:
    """``finite``, for the trace of a step."""
    return finite(x)


@traced_finite.register_fake
def _(x: Any) -> Any:
    return x.new_empty((), dtype=torch.float32)


def check_and_unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``_amp_foreach_non_finite_check_and_unscale_``: ``found_inf`` becomes 1 if a gradient is not finite."""
    checks = [torch.ops.actorflow.finite(grad) for grad in grads]
    bad = torch.isnan(torch.stack(checks).sum()).to(found_inf.dtype)
    found_inf.copy_(torch.maximum(found_inf, bad))
    for grad in grads:
        grad.mul_(inv_scale)


def update_scale(
    scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """``_amp_update_scale_``: back off where an infinity was found, else grow after ``interval`` steps without one."""
    bad = found_inf != 0
    steps = growth_tracker + 1
    full = steps == interval
    wide = scale.double()  # torch multiplies by a double
    larger = (wide * growth).to(scale.dtype)
    grown = torch.where(full & torch.isfinite(larger), larger, scale)
    kept = torch.where(full, torch.zeros_like(steps), steps)
    scale.copy_(torch.where(bad, (wide * backoff).to(scale.dtype), grown))
    growth_tracker.copy_(torch.where(bad, torch.zeros_like(steps), kept))
    return scale


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: check_and_unscale,
    aten._amp_update_scale_.default: update_scale,
}
OPS: dict[str, Callable[..., Any]] = {"finite": finite}


def masked_step(optimizer: torch.optim.Optimizer, found: Tensor, step: Callable[[], Any]) -> Any:
    """Run an optimizer's step, and undo its changes where ``found`` is not 0, without reading ``found`` on the host."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    held = [p for p in params if p.grad is not None] + state
    before = [t.detach().clone() for t in held]
    result = step()
    with torch.no_grad():
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(torch.where(found != 0, old, tensor))
    return result
