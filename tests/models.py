"""Small models, real data for them, and the eager training on one device that every plan must equal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gpt import GPT, draw_batch, stdlib_bytes

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]  # of the model and the tensors of a batch

CONTEXT = 32  # bytes of text that the small GPT sees


class Mlp(nn.Module):
    """Pixels float32[n, 64] to the logits of ten digits."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.second(F.relu(self.first(images)))))
        return logits


class Cnn(nn.Module):
    """The same with convolutions, batch norm and pooling."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(1, channels, 3, padding=1)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm_2 = nn.BatchNorm2d(2 * channels)
        self.head = nn.Linear(2 * channels * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm_1(self.conv_1(images.view(-1, 1, 8, 8)))), 2)
        x = F.max_pool2d(F.relu(self.norm_2(self.conv_2(x))), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def small_gpt(layers: int = 2) -> nn.Module:
    """The GPT of the example."""
    return GPT(layers=layers, width=32, heads=4, context=CONTEXT)


@functools.cache
def _digits() -> Batch:
    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def digit_batches(sizes: Sequence[int]) -> list[Batch]:
    """Batches of these sizes of scikit-learn's digits: images float32[n, 64] in 0 … 1 and digits int64[n]."""
    images, targets = (t.clone() for t in _digits())
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [(images[end - size : end], targets[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def text_batches(sizes: Sequence[int]) -> list[Batch]:
    """Batches of these sizes of the standard library's source: bytes int64[n, CONTEXT] and those that follow."""
    text, generator = stdlib_bytes(), torch.Generator().manual_seed(0)
    return [draw_batch(text, size, CONTEXT, generator) for size in sizes]


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the batch (and, for text, over its bytes)."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True, slots=True)
class Case:
    """What to train, and how; ``model()`` is the same model each time."""

    make: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batches: Callable[[Sequence[int]], list[Batch]]
    stages: tuple[str, str]  # names of the modules of two pipeline stages, as regular expressions
    batch_norm: bool = False
    clip: float | None = None  # of the norm of all gradients
    loss: Loss = cross_entropy
    names: tuple[str, ...] = ("x", "y")  # of the tensors of a batch
    scaler: Callable[[], torch.amp.GradScaler] | None = None  # of the loss

    def model(self) -> nn.Module:
        """A new model that starts from the same parameters."""
        torch.manual_seed(0)
        return self.make()


class Narrow(nn.Module):
    """A model whose matrix products are in bfloat16, so that gradients are cast after their reduction."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        """What the model makes of a batch, in float32."""
        with torch.autocast("cpu", torch.bfloat16):
            made: Tensor = self.model(*batch)
        return made.float()


def narrow(case: Case) -> Case:
    """A case under autocast."""
    stages = tuple(rf"model\.({stage})" for stage in case.stages)
    return replace(case, make=lambda: Narrow(case.make()), stages=(stages[0], stages[1]))


class Lstm(nn.Module):
    """Pixels float32[n, 64], row by row, to the logits of ten digits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.rows = nn.LSTM(8, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        seen, _ = self.rows(images.view(-1, 8, 8))
        logits: Tensor = self.head(seen[:, -1])
        return logits


CASES = {
    "lstm": Case(Lstm, lambda m: AdamW(m.parameters(), lr=1e-3), digit_batches, ("rows", "head")),
    "mlp": Case(Mlp, lambda m: AdamW(m.parameters(), lr=1e-3), digit_batches, ("first", "second|head")),
    "cnn": Case(
        Cnn,
        lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
        digit_batches,
        (r".*_1", r".*_2|head"),
        batch_norm=True,
    ),
    "gpt": Case(
        small_gpt,
        # its attention has biases whose gradients are zero but for rounding, which a smaller eps would amplify
        lambda m: AdamW(m.parameters(), lr=1e-3, eps=1e-6),
        text_batches,
        (r"embed|positions|blocks\.0", r"blocks\.1|norm|head"),
    ),
}

# for plans of many stages; twice the ops of the other
DEEP_GPT = replace(
    CASES["gpt"],
    make=lambda: small_gpt(4),
    stages=(r"embed|positions|blocks\.[01]", r"blocks\.[23]|norm|head"),
)
CASES["clipped gpt"] = replace(CASES["gpt"], clip=0.5)
DROPOUT = Case(
    lambda: nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 10)
    ),
    lambda m: AdamW(m.parameters(), lr=1e-3),
    digit_batches,
    ("[0-2]", "[3-5]"),
)


class Noisy(nn.Module):
    """Pixels to logits with all kinds of noise: dropout (of attention, too), normal, whole and chosen numbers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.2, batch_first=True)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.view(-1, 8, 8))
        x = self.block(x + 0.1 * torch.randn_like(x))
        x = x * F.gumbel_softmax(x, hard=True) + torch.randint(0, 3, (x.shape[-1],))
        row = torch.multinomial(x.square().mean(-1) + 0.1, 1)
        x = x.gather(1, row.unsqueeze(-1).expand(-1, 1, x.shape[-1])).squeeze(1)
        logits: Tensor = self.head(F.alpha_dropout(F.rrelu(self.mix(x), training=True), 0.1, True))
        return logits + torch.empty(len(images), 1).exponential_(4.0)


NOISY = Case(Noisy, lambda m: SGD(m.parameters(), lr=0.05), digit_batches, ("embed|block", "mix|head"))


def reference(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batches: Sequence[Batch],
    micro_batches: int = 1,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train eagerly: the loss of every step, and the state that the model ends with.

    With ``micro_batches`` gradients are accumulated over the pieces of a batch, each with its share of the
    mean: what batch norm, which sees one piece at a time, is compared to.  Other models: the full batch.
    """
    losses = []
    for batch in batches:
        total = 0.0
        for piece in zip(*(t.tensor_split(micro_batches) for t in batch), strict=True):
            part = loss(model, *piece) * (len(piece[0]) / len(batch[0]))
            (part if scaler is None else scaler.scale(part)).backward()  # type: ignore[no-untyped-call]
            total += part.item()
        step(model, optimizer, clip, scaler)
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def setting(group: Mapping[str, Any], key: str) -> float:
    """What an argument of a fused optimizer that is read at each call is in a parameter group."""
    return float(group["betas"][key == "beta2"] if key in ("beta1", "beta2") else group[key])


def step(
    model: nn.Module, optimizer: Optimizer, clip: float | None, scaler: torch.amp.GradScaler | None = None
) -> None:
    """What follows the backward pass, as PyTorch's documentation has it."""
    if scaler is None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    else:
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
