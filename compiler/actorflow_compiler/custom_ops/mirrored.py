"""Casts between logical values and each device's own values, for the mirrored view (``capture/mirrored.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.sbp import B, P, Sbp, Split

MINE, EACH, TERM = "actorflow.mine", "actorflow.each", "actorflow.term"

# op → the layouts of its operand and its output on several devices; it has no others
CASTS: dict[str, tuple[Sbp, Sbp]] = {MINE: (Split(0), B), EACH: (B, Split(0)), TERM: (B, P)}


def mine(x: Tensor) -> Tensor:
    """This device's item of a logical list: (1, …) → (…); a view."""
    return x.squeeze(0)


def each(x: Tensor, devices: int) -> Tensor:
    """This device's value as its item of a logical list of ``devices`` items: (…) → (1, …); a view."""
    return x.unsqueeze(0)


def term(x: Tensor, devices: int) -> Tensor:
    """This device's term of a mean over ``devices``."""
    return x / devices


OPS: dict[str, Callable[..., Any]] = {"mine": mine, "each": each, "term": term}


def _known_to_torch() -> Any:
    """Register the ops over logical values with torch, so that a trace can contain them."""

    def one(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[1:])

    def listed(x: Tensor, devices: int) -> Tensor:
        return x.new_empty((devices, *x.shape))

    def alike(x: Tensor, devices: int) -> Tensor:
        return torch.empty_like(x)

    for name, shape in (("mine", one), ("each", listed), ("term", alike)):
        torch.library.custom_op(f"actorflow::{name}", OPS[name], mutates_args=()).register_fake(shape)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.devices = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The mean's gradient differs between devices, too, so the operand gets the mean of the devices' gradients."""
        return torch.ops.actorflow.term(grad, ctx.devices), None

    torch.library.register_autograd("actorflow::term", backward, setup_context=keep)
    return torch.ops.actorflow


TRACED = _known_to_torch()  # the same ops for a step to call: TRACED.mine(...)
