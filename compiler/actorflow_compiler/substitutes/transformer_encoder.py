"""Trace ``nn.TransformerEncoder`` with zeros at padded positions, where PyTorch's fast path leaves them out.

In eval mode and without gradients, PyTorch makes a nested tensor of the positions that ``src_key_padding_mask`` keeps,
and the layers' output is zero at all others.  A plan computes all positions, and then writes zeros to the padded ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["replaced_encoders"]


@contextlib.contextmanager
def replaced_encoders() -> Iterator[None]:
    """Let encoders return zeros where PyTorch's fast path does."""
    plain: Callable[..., Tensor] = nn.TransformerEncoder.forward

    def forward(
        self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        padding = src_key_padding_mask
        if padding is None or mask is not None or not _nests(self, src):
            return plain(self, src, mask, padding, is_causal)
        there = padding.logical_not()
        aligned = torch.ones((), dtype=torch.bool, device=there.device)
        if getattr(self, "mask_check", True):  # whether all sequences are aligned to the left
            aligned = (there[:, 1:] <= there[:, :-1]).all()
        if padding.is_floating_point():  # a nested tensor leaves padding out, even where the mask adds a finite number
            padding = padding.masked_fill(aligned & ~there, float("-inf"))
        norm = self.norm
        self._modules["norm"] = None
        try:
            out = plain(self, src, None, padding, is_causal)
        finally:
            self._modules["norm"] = norm
        out = out.masked_fill((aligned & ~there).unsqueeze(-1), 0.0)
        return out if norm is None else norm(out)

    encoder: Any = nn.TransformerEncoder
    encoder.forward = forward
    try:
        yield
    finally:
        encoder.forward = plain


def _nests(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether PyTorch would use a nested tensor, if all sequences are aligned to the left."""
    first: Any = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not getattr(encoder, "use_nested_tensor", False):
        return False
    if first.training or src.is_nested or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    given = (
        src, first.self_attn.in_proj_weight, first.self_attn.in_proj_bias, *first.self_attn.out_proj.parameters(),
        *first.norm1.parameters(), *first.norm2.parameters(), *first.linear1.parameters(), *first.linear2.parameters(),
    )  # fmt: skip
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
