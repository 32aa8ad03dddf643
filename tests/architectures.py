"""Architectures written in plain PyTorch, small, each for what it does that others do not; cases for ``trained``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from models import CONTEXT, Batch, Case, Loss, cross_entropy, digit_batches, text_batches

WIDTH = 16
BYTES = 256


class Translator(nn.Module):
    """``nn.Transformer`` with a causal mask and learnt positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 50)
        self.body = nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True))
        return logits


class Padded(nn.Module):
    """``nn.TransformerEncoder`` with the sequence first, and padding that it does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = (tokens == ord(" ")) & (torch.arange(tokens.shape[1]) > 0)
        x = self.body(self.embed(tokens).transpose(0, 1), src_key_padding_mask=padding)
        logits: Tensor = self.head(x.transpose(0, 1))
        return logits


class Residual(nn.Module):
    """Two convolutions with batch norm beside a shortcut."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(out)
        self.conv_2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


def residual_net() -> nn.Module:
    """Pixels to logits through residual blocks."""
    blocks = Residual(1, 8, 1), Residual(8, WIDTH, 2)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)
    )


class UNet(nn.Module):
    """Down, up by a transposed convolution, and across, with group norm and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down_1, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down_2 = nn.Conv2d(8, WIDTH, 3, padding=1)
        self.up = nn.ConvTranspose2d(WIDTH, 8, 2, 2)
        self.out, self.last = nn.Conv2d(WIDTH, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        a = F.silu(self.norm(self.down_1(images.view(-1, 1, 8, 8))))
        b = F.silu(self.down_2(F.max_pool2d(a, 2)))
        c = self.out(torch.cat([self.up(b), a], 1))
        coarse = F.interpolate(F.avg_pool2d(c, 2), scale_factor=2, mode="bilinear", align_corners=False)
        image: Tensor = self.last(F.silu(c + coarse)).flatten(1)
        return image


def denoised(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    """The squared error of what is left of images that were brightened by their digit."""
    return F.mse_loss(model(0.9 * images + digits[:, None] / 100), images)


class Autoencoder(nn.Module):
    """A variational one: (images, means, log variances)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 32)
        self.mean, self.spread = nn.Linear(32, 8), nn.Linear(32, 8)
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.encode(images))
        mean, spread = self.mean(h), self.spread(h)
        return self.decode(mean + torch.randn_like(mean) * torch.exp(spread / 2)), mean, spread


def evidence(model: nn.Module, images: Tensor, _: Tensor) -> Tensor:
    """The negative lower bound of the evidence."""
    found, mean, spread = model(images)
    likelihood = F.binary_cross_entropy_with_logits(found, images, reduction="sum") / len(images)
    return likelihood - 0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()


class Attending(nn.Module):
    """A GRU that reads the rows of an image in both directions, and one that attends to what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(8, WIDTH, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(8, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.view(-1, 8, 8)
        seen, last = self.encoder(rows)
        said, _ = self.decoder(rows.flip(1), last[-1:].contiguous())
        weights = torch.softmax(said @ seen[..., :WIDTH].transpose(1, 2), -1)
        logits: Tensor = self.head(said + weights @ seen[..., WIDTH:])[:, -1]
        return logits


class Denoiser(nn.Module):
    """The noise of an image at a time of a diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(100, 32)
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        noise: Tensor = self.last(F.silu(self.first(images) + self.times(times)))
        return noise


def diffused(model: nn.Module, images: Tensor, _: Tensor) -> Tensor:
    """The squared error of the noise that was added, at a time drawn for each image."""
    times, noise = torch.randint(0, 100, (len(images),)), torch.randn_like(images)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)[times][:, None]
    return F.mse_loss(model(kept.sqrt() * images + (1 - kept).sqrt() * noise, times), noise)


class Neighbours(nn.Module):
    """A graph network: pixels pass messages to those beside and below them."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        at = torch.arange(64).view(8, 8)
        beside = torch.stack([at[:, :-1].flatten(), at[:, 1:].flatten()])
        below = torch.stack([at[:-1].flatten(), at[1:].flatten()])
        self.register_buffer("edges", torch.cat([beside, below], 1))

    def passed(self, x: Tensor) -> Tensor:
        source, target = self.edges
        return x + torch.zeros_like(x).index_add(1, target, x[:, source]) / 2

    def forward(self, images: Tensor) -> Tensor:
        x = self.passed(F.relu(self.first(images[..., None])))
        logits: Tensor = self.head(self.passed(F.relu(self.second(x))).mean(1))
        return logits


def contrasted(model: nn.Module, images: Tensor, _: Tensor) -> Tensor:
    """Two views of an image are to be alike, and unlike all others of the batch."""
    views = torch.cat([model(images), model(images + 0.1)])
    z = F.normalize(views, dim=-1)
    alike = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    partner = torch.arange(len(z)).roll(len(images))
    return F.cross_entropy(alike, partner)


def chosen(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    """The negative logarithm of each target's probability, picked row by row."""
    return -model(images).log_softmax(-1)[torch.arange(len(digits)), digits].mean()


def _case(
    make: Callable[[], nn.Module],
    loss: Loss = cross_entropy,
    batches: Callable[[Sequence[int]], list[Batch]] = digit_batches,
    batch_norm: bool = False,
) -> Case:
    return Case(make, lambda m: AdamW(m.parameters(), lr=1e-3), batches, ("", ""), batch_norm, loss=loss)


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


ARCHITECTURES = {
    "transformer": _case(Translator, batches=text_batches),
    "padded encoder": _case(Padded, batches=text_batches),
    "residual net": _case(residual_net, batch_norm=True),
    "u-net": _case(UNet, denoised),
    "recurrent with attention": _case(Attending),
    "graph network": _case(Neighbours),
    "contrastive": _case(_small, contrasted),
    "picked targets": _case(_small, chosen),
}
NOISY = {"variational autoencoder": _case(Autoencoder, evidence), "diffusion": _case(Denoiser, diffused)}
