"""A CTC loss of fixed sizes: intermediate results are as long as the padded labels, not as the longest label.

torch's op takes that size from the values of the lengths.  Here lengths are data, and the batch may be split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actorflow_compiler.core.torch_internals import is_fake

__all__ = ["OPS", "replaced_ctc_loss"]

MEAN, SUM = 1, 2  # torch's numbers for reductions


def ctc(
    log_probs: Tensor, labels: Tensor, times: Tensor, lengths: Tensor, blank: int, skip: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The negative logarithm of each label's probability, and the forward variables, which ``ctc_backward`` needs.

    log_probs (T, N, C), labels integers (N, S) or concatenated (all,), times and lengths int64 (N,) → (N,) and
    (N, T, 2 S + 1), or (N, T, 0) for concatenated labels.  ``skip``: see ``ctc_backward``.
    """
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(log_probs, labels, *_on_host(times, lengths), blank, skip)
    if labels.dim() == 1:
        return loss, alpha.new_empty((*alpha.shape[:2], 0))
    alpha = F.pad(alpha, (0, 2 * labels.shape[1] + 1 - alpha.shape[2]))
    time, state = (torch.arange(size, device=alpha.device) for size in alpha.shape[1:])
    written = (time[:, None] < times[:, None, None]) & (state <= 2 * lengths[:, None, None])
    return loss, torch.where(written, alpha, 0)


def ctc_backward(
    grad: Tensor, log_probs: Tensor, labels: Tensor, times: Tensor, lengths: Tensor, loss: Tensor, alpha: Tensor,
    blank: int, skip: bool,
) -> Tensor:  # fmt: skip
    """The gradient of ``log_probs``; with ``skip``, zeros where a loss is infinite."""
    times, lengths = _on_host(times, lengths)
    if labels.dim() == 1:
        _, alpha = torch.ops.aten._ctc_loss.Tensor(log_probs, labels, times, lengths, blank, skip)
    found: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        grad, log_probs, labels, times, lengths, loss, alpha.contiguous(), blank, skip
    )
    return found


def _on_host(*lengths: Tensor) -> tuple[Tensor, ...]:
    return tuple(length.to("cpu", torch.int64) for length in lengths)


OPS: dict[str, Callable[..., Any]] = {"ctc": ctc, "ctc_backward": ctc_backward}


def _known_to_torch() -> Any:
    """Register the ops and their gradient with torch, so that a trace can contain them."""

    def losses(log_probs: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        times, batch = log_probs.shape[:2]
        width = 0 if labels.dim() == 1 else 2 * labels.shape[1] + 1
        return log_probs.new_empty(batch), log_probs.new_empty((batch, times, width))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.blank, ctx.skip = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        found = None
        if grad is not None:
            found = torch.ops.actorflow.ctc_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.skip)
        return found, None, None, None, None, None

    def like(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)

    for name, shape in (("ctc", losses), ("ctc_backward", like)):
        torch.library.custom_op(f"actorflow::{name}", OPS[name], mutates_args=()).register_fake(shape)
    torch.library.register_autograd("actorflow::ctc", backward, setup_context=keep)
    return torch.ops.actorflow


TRACED = _known_to_torch()


@contextlib.contextmanager
def replaced_ctc_loss() -> Iterator[None]:
    """Replace ``torch.ctc_loss`` by the ops of this file."""
    plain = torch.ctc_loss

    def loss(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
        reduction: int = MEAN, zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        if not is_fake(log_probs):
            return plain(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        return _loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)

    torch.ctc_loss = loss
    try:
        yield
    finally:
        torch.ctc_loss = plain


def _loss(
    log_probs: Tensor, labels: Tensor, times: Any, lengths: Any, blank: int, reduction: int, skip: bool
) -> Tensor:  # fmt: skip
    """``torch.ctc_loss``; ``alone`` is a single sample without a batch dim, ``skip`` is zero_infinity."""
    if torch.is_autocast_enabled(log_probs.device.type) and log_probs.dtype in (torch.float16, torch.bfloat16):
        log_probs = log_probs.float()
    alone = log_probs.dim() == 2
    if alone:
        log_probs, labels = log_probs.unsqueeze(1), labels.unsqueeze(0) if labels.dim() == 1 else labels
    batch = log_probs.shape[1]
    times, lengths = (_counts(name, given, log_probs) for name, given in (("input", times), ("target", lengths)))
    for name, count in (("input_lengths", times), ("target_lengths", lengths)):
        if count.shape != (batch,):
            raise RuntimeError(f"{name} must be of size batch_size: {batch} were expected, found {list(count.shape)}")
    if not 0 <= blank < log_probs.shape[2]:
        raise RuntimeError("blank must be in label range")
    if labels.dim() == 2 and labels.shape[0] != batch:
        raise RuntimeError(f"targets must have {batch} rows, as log_probs has samples; found {list(labels.shape)}")
    loss, _ = TRACED.ctc(log_probs, labels, times, lengths, blank, skip)
    if skip:
        loss = torch.where(loss == float("inf"), 0, loss)
    found: Tensor = loss
    if reduction == MEAN:
        found = (found / lengths.clamp(min=1)).mean()
    elif reduction == SUM:
        found = found.sum()
    elif alone:
        found = found.squeeze(0)
    return found


def _counts(name: str, given: Tensor | Sequence[int], beside: Tensor) -> Tensor:
    """Lengths as an int64 tensor on the device of another tensor."""
    counts = given if isinstance(given, Tensor) else torch.tensor([*given], device=beside.device)
    if counts.is_floating_point():
        raise RuntimeError(f"{name}_lengths must be integral")
    return counts.to(beside.device, torch.int64).reshape(-1)
