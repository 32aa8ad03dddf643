"""Train by several jobs or with several parameter groups: eagerly where imported, by plans as a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import actorflow as flow
from actorflow.jobs.job import Job
from actorflow_compiler.core.sbp import show
from models import Mlp, digit_batches

STEPS, SIZE, NOISE = 12, 16, 8

Decorate = Callable[..., Any]  # as ``flow.global_function``, or what leaves a function alone
Ended = dict[str, Any]  # losses, and everything that a checkpoint would hold


class Generator(nn.Module):
    """Noise float32[n, 8] to pixels float32[n, 64] in 0 … 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(NOISE, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 64)

    def forward(self, noise: Tensor) -> Tensor:
        return torch.sigmoid(self.second(F.relu(self.norm(self.first(noise)))))


class Discriminator(nn.Module):
    """Pixels float32[n, 64] to a logit float32[n]: whether they are real."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(images), 0.2)
        logits: Tensor = self.head(F.leaky_relu(self.second(x), 0.2))
        return logits.squeeze(1)


def judged(logits: Tensor, real: float) -> Tensor:
    """How wrong the discriminator is about images that are all real (1) or all made (0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def adversaries() -> tuple[Generator, Discriminator, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two models and their optimizers."""
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-6)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-6)
    return generator, discriminator, g_optimizer, d_optimizer


def gan(decorate: Decorate) -> Ended:
    """Two jobs in turn, as a GAN's training loop is usually written; the noise is drawn between them."""
    generator, discriminator, g_optimizer, d_optimizer = adversaries()

    @decorate
    def d_step(images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        discriminator.zero_grad()
        of_real = judged(discriminator(images), 1.0)
        of_real.backward()
        of_made = judged(discriminator(generator(noise).detach()), 0.0)
        of_made.backward()
        d_optimizer.step()
        return of_real, of_made

    @decorate
    def g_step(noise: Tensor) -> Tensor:
        generator.zero_grad()
        loss = judged(discriminator(generator(noise)), 1.0)
        loss.backward()
        g_optimizer.step()
        return loss

    draws = torch.Generator().manual_seed(1)
    losses: list[Tensor] = []
    for images, _ in digit_batches([SIZE] * STEPS):
        losses += d_step(images, torch.randn(SIZE, NOISE, generator=draws))
        losses.append(g_step(torch.randn(SIZE, NOISE, generator=draws)))
    before = discriminator.state_dict()
    losses.append(g_step(torch.randn(SIZE, NOISE, generator=draws)))
    assert all(torch.equal(value, before[name]) for name, value in discriminator.state_dict().items())
    return ended(losses, [generator, discriminator], [g_optimizer, d_optimizer], [d_step, g_step])


def noisy_gan(decorate: Decorate) -> Ended:
    """The same with noise that the jobs draw, and a discriminator that is frozen while the generator learns."""
    generator, discriminator, g_optimizer, d_optimizer = adversaries()

    @decorate
    def d_step(images: Tensor) -> Tensor:
        with torch.no_grad():
            made = generator(torch.randn(len(images), NOISE))
        loss = judged(discriminator(images), 1.0) + judged(discriminator(F.dropout(made, 0.2)), 0.0)
        loss.backward()
        d_optimizer.step()
        d_optimizer.zero_grad()
        return loss

    @decorate
    def g_step() -> Tensor:
        discriminator.requires_grad_(False)
        loss = judged(discriminator(generator(torch.randn(SIZE, NOISE))), 1.0)
        loss.backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
        discriminator.requires_grad_(True)
        return loss

    flow.manual_seed(3)
    losses: list[Tensor] = []
    for images, _ in digit_batches([SIZE] * STEPS):
        losses += [d_step(images), g_step()]
    return ended(losses, [generator, discriminator], [g_optimizer, d_optimizer], [d_step, g_step])


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay; biases and the head do not, and learn faster."""
    slow = [p for n, p in model.named_parameters() if n.endswith("weight") and not n.startswith("head")]
    fast = [p for n, p in model.named_parameters() if not (n.endswith("weight") and not n.startswith("head"))]
    return [{"params": slow, "lr": 1e-2, "weight_decay": 0.1}, {"params": fast, "lr": 3e-2, "weight_decay": 0.0}]


def groups(decorate: Decorate, make: Callable[[Any], torch.optim.Optimizer], schedule: Any, clip: Any) -> Ended:
    """Two parameter groups, clipped gradients, and a learning rate that changes with every step."""
    torch.manual_seed(0)
    model = Mlp()
    optimizer = make(parameter_groups(model))
    scheduler = schedule(optimizer)

    @decorate
    def step(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        norm = clip(model.parameters())
        optimizer.step()
        return loss, norm

    losses: list[Tensor] = []
    for images, targets in digit_batches([SIZE] * STEPS):
        losses += step(images, targets)
        scheduler.step()
    return ended(losses, [model], [optimizer], [step])


def by_norm(parameters: Iterator[nn.Parameter]) -> Tensor:
    """Clip the norm of all gradients; returns it as it was."""
    return nn.utils.clip_grad_norm_(parameters, 0.5)


def by_value(parameters: Iterator[nn.Parameter]) -> Tensor:
    """Clip each element; returns the largest that is left."""
    tensors = list(parameters)
    nn.utils.clip_grad_value_(tensors, 0.02)
    return torch.stack([p.grad.abs().max() for p in tensors if p.grad is not None]).max()


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Another rate at each step, in each group another way."""
    return LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    """Up and down, and the momentum down and up."""
    return OneCycleLR(optimizer, max_lr=[2e-2, 5e-2], total_steps=STEPS + 1)


def halved_once(optimizer: torch.optim.Optimizer) -> StepLR:
    """The rates are halved after half of the steps."""
    return StepLR(optimizer, STEPS // 2, gamma=0.5)


def ended(
    losses: list[Tensor], models: list[nn.Module], optimizers: list[torch.optim.Optimizer], jobs: list[Any]
) -> Ended:
    """What a training is compared by, and of its plans how many there are and what they do."""
    plans = [list(job.plans) for job in jobs if isinstance(job, Job)]
    return {
        "plans": [len(of_job) for of_job in plans],
        "redundant": max((c.plan.summary.redundant_flops for of_job in plans for c in of_job), default=0.0),
        "split": sorted({v.name for of_job in plans for c in of_job for v in c.plan.variables if "S" in show(v.sbp)}),
        "losses": [loss.item() for loss in losses],
        "models": [model.state_dict() for model in models],
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }


TRAININGS: dict[str, Callable[[Decorate], Ended]] = {
    "gan": gan,
    "noisy gan": noisy_gan,
    "adamw": lambda d: groups(d, lambda g: torch.optim.AdamW(g, eps=1e-6), one_cycle, by_norm),
    "sgd": lambda d: groups(d, lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True), falling, by_norm),
    "sgd in one cycle": lambda d: groups(d, lambda g: torch.optim.SGD(g, momentum=0.9), one_cycle, by_norm),
    "rmsprop": lambda d: groups(d, lambda g: torch.optim.RMSprop(g, eps=1e-4, momentum=0.5), halved_once, by_value),
    "nadam": lambda d: groups(d, lambda g: torch.optim.NAdam(g, eps=1e-4), halved_once, by_value),
}

if __name__ == "__main__":
    path, *wanted = sys.argv[1:]  # where to write; "training, parallel=…" or "training, memory_budget=…" each
    found = {}
    for title in wanted:
        training, layout = title.split(", ")
        key, value = layout.split("=")
        found[title] = TRAININGS[training](flow.global_function(**{key: value}))
    if flow.env.is_master():
        torch.save(found, path)
