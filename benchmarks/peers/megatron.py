"""A GPT as torch's tensor parallelism wants it: queries, keys and values apart, split over ranks as Megatron does."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


class Split(nn.Module):
    """A block of the GPT with the same weights, but three layers in place of ``qkv``; heads are those of this rank."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.head_width = block.qkv.in_features // block.heads
        self.norm_1, self.norm_2 = block.norm_1, block.norm_2
        self.q, self.k, self.v = (
            _linear(weight, bias)
            for weight, bias in zip(block.qkv.weight.chunk(3), block.qkv.bias.chunk(3), strict=True)
        )
        self.projection, self.up, self.down = block.projection, block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        """Of activations float32[batch, length, width]."""
        batch, length, _ = x.shape
        normed = self.norm_1(x)
        q, k, v = (
            layer(normed).view(batch, length, -1, self.head_width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def parts_to_split(model: Any) -> Any:
    """The GPT with blocks whose layers may be split."""
    model.blocks = nn.ModuleList(Split(block) for block in model.blocks)
    return model


def split_over(model: Any, mesh: DeviceMesh) -> Any:
    """Split the blocks of a GPT, or of a stage, over the ranks of a mesh; what is before and behind them is whole."""
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        plan |= dict.fromkeys(("projection", "down"), RowwiseParallel())
        parallelize_module(block, mesh, plan)
    return model


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    return layer


__all__ = ["Split", "parts_to_split", "split_over"]
