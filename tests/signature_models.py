"""Small models whose training steps hold the ops of people's models; sizes are uneven on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from actorflow_compiler.substitutes.decompositions import BATCH_NORM, TABLE


def step_graph(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, batch_norm_in_sums: bool = False
) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The decomposed graph of one forward and backward pass with clipping and SGD, and its inputs."""
    model.double()
    names = [n for n, _ in model.named_parameters()]
    buffers = dict(model.named_buffers())

    def step(parameters: list[Tensor], state: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        leaves = [p.detach().requires_grad_() for p in parameters]
        given = dict(zip(names, leaves, strict=True)) | dict(zip(buffers, state, strict=True))
        value = loss(torch.func.functional_call(model, given, (x,)), y)
        grads = list(torch.autograd.grad(value, leaves))
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        return [value.detach(), *(p.detach() - 0.1 * g * scale for p, g in zip(parameters, grads, strict=True)), *state]

    inputs = (list(model.parameters()), [b.clone() for b in buffers.values()], x, y)
    flat = [p.detach() for p in inputs[0]] + inputs[1] + [x, y]
    a, b = len(inputs[0]), len(inputs[0]) + len(inputs[1])

    def run(*tensors: Tensor) -> list[Tensor]:
        return step(list(tensors[:a]), list(tensors[a:b]), tensors[-2], tensors[-1])

    raw = _Functional(make_fx(run)(*flat))
    table = TABLE | BATCH_NORM if batch_norm_in_sums else TABLE
    return make_fx(functionalize(lambda *v: raw.run(*v), remove="mutations"), decomposition_table=table)(*flat), flat


class _Functional(torch.fx.Interpreter):
    """Writes out what batch norm does to its statistics."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not torch.ops.aten.native_batch_norm.default:
            return super().call_function(target, args, kwargs)
        *out, mean, var = torch.ops.aten._native_batch_norm_legit_functional(*args)
        args[3].copy_(mean)
        args[4].copy_(var)
        return tuple(out)


class Mlp(nn.Module):
    """Every activation once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.last = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(
            self.layers, (F.relu, F.gelu, torch.tanh, F.silu, torch.sigmoid, F.leaky_relu), strict=True
        ):
            x = act(layer(x))
        out: Tensor = self.last(x)
        return out


class Cnn(nn.Module):
    """Convolutions, batch norm, three ways to pool, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)
        self.na, self.nb = nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=0.3)
        self.group = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6 * 2 * 2, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.na(self.a(x))), 2)
        x = F.avg_pool2d(F.relu(self.nb(self.b(x)) + x, inplace=True), 2)
        x = self.group(F.interpolate(x, scale_factor=2.0))
        x = F.adaptive_avg_pool2d(x, 2)
        out: Tensor = self.head(x.flatten(1)) + x.mean((2, 3))[:, :1]
        return out


class Gpt(nn.Module):
    """GPT-2 as people write it: fused QKV, tied embedding; attention fused, or with an explicit mask."""

    def __init__(self, kind: str, heads: int = 3, width: int = 12, vocabulary: int = 11, length: int = 6) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[2]
        if self.kind == "fused":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "masked":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:, :, :s, :s].bool())
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if self.kind == "where":
            scores = torch.where(self.mask[:, :, :s, :s] == 0, torch.finfo(q.dtype).min, scores)
        else:
            scores = scores.masked_fill(self.mask[:, :, :s, :s] == 0, float("-inf"))
        return scores.softmax(-1) @ v

    def forward(self, tokens: Tensor) -> Tensor:
        b, s = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(s))
        fused = self.qkv(self.norms[0](x))
        if self.kind == "where":
            q, k, v = fused.view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = fused.split(x.shape[-1], dim=2) if self.kind != "fused" else fused.chunk(3, -1)
            q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in parts)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, s, -1))
        x = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return F.linear(self.norms[2](x), self.tokens.weight)


class Llama(nn.Module):
    """RMS norm, rotary positions, grouped query heads, gated MLP, an additive mask."""

    def __init__(self, heads: int = 4, groups: int = 2, width: int = 16, vocabulary: int = 11) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, width, bias=False)

    def norm(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(self, x: Tensor) -> Tensor:
        half = self.each // 2
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.exp(-torch.arange(half, dtype=x.dtype))[None]
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, tokens: Tensor) -> Tensor:
        b, s = tokens.shape
        x = self.tokens(tokens)
        y = self.norm(x)
        q, k, v = (t.view(b, s, -1, self.each).transpose(1, 2) for t in (self.q(y), self.k(y), self.v(y)))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (
            t[:, :, None]
            .expand(b, self.groups, self.heads // self.groups, s, self.each)
            .reshape(b, self.heads, s, self.each)
            for t in (k, v)
        )
        mask = torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        scores = (q @ k.transpose(2, 3)) * self.each**-0.5 + mask
        x = x + self.o((F.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(b, s, -1))
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        out: Tensor = self.head(self.norm(x))
        return out


def classes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), label_smoothing=0.0)


def smoothed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), label_smoothing=0.1)


def squares(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, (y[:, None] == torch.arange(out.shape[-1])).to(out.dtype))


def models(batch: int = 5) -> dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]]:
    """Name → model, loss, inputs, targets."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (batch, 6))
    labels = torch.randint(0, 7, (batch,))
    following = torch.randint(0, 11, (batch, 6))
    following[0, :2] = -100
    return {
        "mlp": (Mlp(), classes, torch.randn(batch, 6, dtype=torch.float64), labels),
        "mlp squares": (Mlp(), squares, torch.randn(batch, 6, dtype=torch.float64), labels),
        "cnn": (Cnn(), classes, torch.randn(batch, 3, 8, 8, dtype=torch.float64), labels),
        "gpt fused": (Gpt("fused"), classes, tokens, following),
        "gpt masked": (Gpt("masked"), classes, tokens, following),
        "gpt where": (Gpt("where"), classes, tokens, following),
        "gpt filled": (Gpt("filled", heads=4), smoothed, tokens, following),
        "llama": (Llama(), classes, tokens, following),
    }
