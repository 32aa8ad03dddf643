"""The model, its stages and its batches, made from the command line's figures: the same on every side."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, draw_batch, stdlib_bytes

BATCHES = 8  # different ones; then they come again
COMPILED = ", compiled"  # how names of contenders end whose models torch's inductor compiles


@dataclass(frozen=True, slots=True)
class Setting:
    """What every side of one run has in common."""

    processes: int
    micro_batches: int
    layers: int
    steps: int = 4  # in a turn
    width: int = 256
    heads: int = 8
    context: int = 128
    batch: int = 16
    lr: float = 1e-4
    fused: bool = True  # whether PyTorch's own side steps with AdamW(fused=True)
    bind: bool = False  # whether its processes are bound to cores of their own, as ranks of actorflow compute
    compiled: bool = False  # whether torch's inductor compiles the model

    def to_json(self) -> str:
        """For the command line of a side's processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """What ``to_json`` wrote."""
        return cls(**json.loads(text))

    def of(self, name: str) -> tuple[str, Self]:
        """A contender's name without what it says of compiling, and its setting."""
        return name.removesuffix(COMPILED), replace(self, compiled=name.endswith(COMPILED))

    def model(self) -> GPT:
        """The whole model with the weights that every side starts from."""
        torch.manual_seed(0)
        return GPT(self.layers, self.width, self.heads, self.context)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets, int64[batch, context] each."""
        generator, text = torch.Generator().manual_seed(0), stdlib_bytes()
        return [draw_batch(text, self.batch, self.context, generator) for _ in range(BATCHES)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy: float32[..., vocabulary], int64[...] → float32[]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ranks_of(processes: int, each: int, bent: bool) -> list[int]:
    """The rank of each stage, ``each`` to a rank, going round the ranks, or there and back where ``bent``.

    >>> ranks_of(2, 2, bent=False), ranks_of(2, 2, bent=True)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    around = list(range(processes))
    return [r for k in range(each) for r in (around[::-1] if bent and k % 2 else around)]


def cut(layers: int, ranks: Sequence[int]) -> list[range]:
    """The layers of each stage: sizes that differ by one at most, and ranks as evenly loaded as that allows.

    >>> cut(6, [0, 1, 1, 0])
    [range(0, 1), range(1, 2), range(2, 4), range(4, 6)]
    """
    few = layers // len(ranks)
    if not few:
        raise ValueError(f"{layers} layers were found for {len(ranks)} stages; at least one each was expected")

    def most(sizes: Sequence[int]) -> int:
        return max(sum(n for n, r in zip(sizes, ranks, strict=True) if r == rank) for rank in ranks)

    options = itertools.product((few, few + 1), repeat=len(ranks))
    sizes = min((s for s in options if sum(s) == layers), key=most)
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class Part(nn.Module):
    """A stage of a GPT that is cut by hand: tokens or activations to activations or logits."""

    def __init__(self, model: GPT, layers: range) -> None:
        super().__init__()
        blocks = list(model.blocks)
        first, last = layers.start == 0, layers.stop == len(blocks)
        self.embed: nn.Embedding | None = model.embed if first else None
        self.positions: nn.Embedding | None = model.positions if first else None
        self.blocks = nn.ModuleList(blocks[layers.start : layers.stop])
        self.norm: nn.LayerNorm | None = model.norm if last else None
        self.head: nn.Linear | None = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens int64[batch, length], or of activations float32[batch, length, width]."""
        if self.embed is not None and self.positions is not None:
            x = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


__all__ = ["BATCHES", "GPT", "Part", "Setting", "cut", "loss_of", "ranks_of"]
