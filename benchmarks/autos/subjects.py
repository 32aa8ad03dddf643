"""The models whose plans are ranked: GPTs with narrow, wide and mixed inner layers, a wide classifier, and a CNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WORDS, CLASSES = 128, 512, 20_000


class Block(nn.Module):
    """A block of a GPT, whose inner layer is ``wider`` times as wide, or a mixture of ``experts`` of these."""

    def __init__(self, width: int, heads: int, wider: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner: nn.Module = (
            Experts(width, wider * width, experts)
            if experts
            else nn.Sequential(nn.Linear(width, wider * width), nn.GELU(), nn.Linear(wider * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of activations float32[batch, length, width]."""
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, length, width))
        inner: Tensor = self.inner(self.between(x))
        return x + inner


class Experts(nn.Module):
    """A mixture in which every token is given to all experts, and their results are weighted by a soft router."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Of activations float32[batch, length, width]."""
        tokens = x.flatten(0, 1)
        given = tokens.expand(self.up.shape[0], *tokens.shape)
        made = torch.bmm(F.gelu(torch.bmm(given, self.up)), self.down)
        weights = self.router(tokens).softmax(-1).t().unsqueeze(-1)
        return (made * weights).sum(0).view_as(x)


class Gpt(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, layers: int, width: int, wider: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, wider, experts) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits float32[batch, length, words] of tokens int64[batch, length]."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.positions)))
        return logits


def convolutions(narrower: int = 1) -> nn.Module:
    """A CNN for images of 32 × 32 with 3 channels."""
    layers: list[nn.Module] = []
    before = 3
    for channels in (32, 64, 64, 128):
        now = channels // narrower
        layers += [nn.Conv2d(before, now, 3, padding=1), nn.BatchNorm2d(now), nn.ReLU(), nn.MaxPool2d(2)]
        before = now
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * before, 10))


def classifier(classes: int = CLASSES) -> nn.Module:
    """A classifier of 256 numbers."""
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, classes))


def _words(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(WORDS, (16, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _numbers(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 256, generator=generator), torch.randint(CLASSES, (64,), generator=generator)


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 3, 32, 32, generator=generator), torch.randint(10, (64,), generator=generator)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its batches."""

    title: str
    make: Callable[[], Any]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


SUBJECTS = {
    "gpt": Subject("GPT, 5M parameters", lambda: Gpt(6, 256), _words),
    "mlp": Subject("inner layers 16 times as wide, 7M parameters", lambda: Gpt(3, 256, wider=16), _words),
    "wide": Subject("classifier 256 → 20,000", classifier, _numbers),
    "cnn": Subject("CNN, 0.13M parameters", convolutions, _images),
    "moe": Subject("mixture of 4 experts, 7M parameters", lambda: Gpt(3, 256, experts=4), _words),
}


def _few_classes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, targets = _numbers(generator)
    return inputs, targets % 20


TINY = {  # models of the same ops with next to no parameters: what a process has besides tensors
    "gpt": Subject("", lambda: Gpt(6, 8), _words),
    "mlp": Subject("", lambda: Gpt(3, 8), _words),
    "wide": Subject("", lambda: classifier(20), _few_classes),
    "cnn": Subject("", lambda: convolutions(8), _images),
    "moe": Subject("", lambda: Gpt(3, 8, experts=4), _words),
}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of logits float32[..., classes]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
