"""Train small models with numbers that differ from call to call, as jobs and eagerly, and print what differs.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import actorflow as flow
from scripts.kept_gradients import Trained, batches, difference
from scripts.trainings import main, off

STEPS = 9


def finish(t: Trained, loss: Tensor) -> Tensor:
    """The rest of a step."""
    t.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    t.optimizer.step()
    return loss.detach()


def factors(t: Trained, **how: Any) -> list[float]:
    """Factors, terms, divisors and powers of batches."""

    def train(x: Tensor, y: Tensor, kl: float, k: int) -> Tensor:
        p = t.model(x)
        loss = F.cross_entropy(p / (1 + kl), y) + kl * p.pow(2).mean() + (p - kl).abs().mean() + (kl - p).sin().mean()
        return finish(t, loss + (kl / (2 + p * p)).mean() + (x * k).mean() + p.mean() * 0.5**k + kl**2 * p.mean())

    return [t.call(train, x, y, 0.1 * (i + 1), i, **how) for i, x, y in batches()]


def chosen(t: Trained, **how: Any) -> list[float]:
    """Bounds, and what tensors are filled with."""

    def train(x: Tensor, y: Tensor, low: float, high: float) -> Tensor:
        p = t.model(x)
        loss = F.cross_entropy(p.clamp(-high, high), y) + torch.where(p > low, p, low * p).mean()
        loss = loss + p.clamp(min=low).mean() + p.masked_fill(p > high, high).mean() + (p < low).double().mean()
        loss = loss + (torch.full_like(p, low) * p).mean() + (torch.full((3,), high) * p).mean()
        return finish(t, loss + torch.tensor(low) * p.mean() + torch.zeros(3).fill_(high).mul(p).mean())

    return [t.call(train, x, y, 0.01 * i - 0.02, 0.1 + 0.1 * i, **how) for i, x, y in batches()]


def scaled(t: Trained, **how: Any) -> list[float]:
    """What torch scales inside of an op."""

    def train(x: Tensor, y: Tensor, a: float) -> Tensor:
        p = t.model(x)
        loss = F.cross_entropy(torch.add(p, p * p, alpha=a), y) + torch.lerp(p, p * p, a).mean()
        loss = loss + torch.addcmul(p, p, p, value=a).mean() + torch.addcdiv(p, p, 2 + p * p, value=a).mean()
        loss = finish(t, loss + torch.sub(p, p * p, alpha=a).mean())
        with torch.no_grad():
            for q in t.model.parameters():
                q.mul_(1 - a / 100).add_(torch.ones_like(q), alpha=a / 100).lerp_(torch.zeros_like(q), a / 100)
        return loss

    return [t.call(train, x, y, 0.05 * (i + 1), **how) for i, x, y in batches()]


def schedules(t: Trained, **how: Any) -> list[float]:
    """What a step computes of its number by functions of math, and by what is smaller."""

    def train(x: Tensor, y: Tensor, i: int) -> Tensor:
        warm = min(1.0, (i + 1) / 4)
        weight = 0.5 * (1 + math.cos(math.pi * i / STEPS)) * warm
        p = t.model(x)
        return finish(t, F.cross_entropy(p, y) + weight * p.square().mean() + math.exp(-i / 3) * p.mean())

    return [t.call(train, x, y, i, **how) for i, x, y in batches()]


def branches(t: Trained, **how: Any) -> list[float]:
    """What a number decides."""

    def train(x: Tensor, y: Tensor, i: int, weight: float) -> Tensor:
        p = t.model(x)
        loss = F.cross_entropy(p, y)
        if i >= 4:
            loss = loss + weight * p.square().mean()
        if weight:
            loss = loss - p.mean() * 0.1
        for k in range(i % 2):
            loss = loss + p[:, k].mean()
        return finish(t, loss * {0: 1.0, 1: 2.0, 2: 3.0}[i % 3])

    return [t.call(train, x, y, i, 0.1 * (i % 2), **how) for i, x, y in batches()]


@dataclass
class Weights:
    """What people pass as one thing."""

    kl: float = 0.1
    scale: tuple[float, ...] = (1.0, 2.0)


def nested(t: Trained, **how: Any) -> list[float]:
    """Numbers in dictionaries and tuples, returned and left behind."""
    seen = {"last": 0.0}

    def train(x: Tensor, y: Tensor, *, weights: dict[str, Any]) -> dict[str, Any]:
        p = t.model(x)
        loss = F.cross_entropy(p, y) * weights["scale"][1] + weights["kl"] * p.square().mean()
        seen["last"] = weights["kl"]
        return {"loss": finish(t, loss), "kl": weights["kl"], "twice": 2 * weights["kl"]}

    job: Any = train if t.layout is None else flow.global_function(**how)(train)
    out = []
    for i, x, y in batches():
        kl = 0.1 * (i // 5)
        found = job(x, y, weights={"kl": kl, "scale": (1.0, 1.0 + i)})
        out += [float(found["loss"]), found["kl"], found["twice"], seen["last"]]
    return out


def of_numpy(t: Trained, **how: Any) -> list[float]:
    """Numbers as NumPy draws and computes them: what mixup weights losses with."""

    def train(x: Tensor, y: Tensor, lam: Any, flipped: Tensor, i: int) -> Tensor:
        assert isinstance(lam, np.float64)
        p = t.model(x)
        loss = lam * F.cross_entropy(p, y) + (1 - lam) * F.cross_entropy(p, flipped) + math.sqrt(lam) * p.mean()
        if lam > 0.5:
            loss = loss + (p / (1 + lam)).square().mean() + max(lam, 0.6) * p.mean() * float(lam)
        warm = np.maximum(0.5 * (1 + np.cos(np.pi * i / STEPS)) * np.exp(-0.1 * i), 0.2)
        return finish(t, loss + (p - lam**2).abs().mean() + warm * np.sqrt(i + 1) * p.square().mean())

    lams = np.random.default_rng(0).beta(1.0, 1.0, STEPS)
    return [t.call(train, x, y, lams[i], y.flip(0), i, **how) for i, x, y in batches()]


def rates(t: Trained, **how: Any) -> list[float]:
    """A schedule of the learning rate, and settings that change."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.9)

    def train(x: Tensor, y: Tensor) -> Tensor:
        return finish(t, F.cross_entropy(t.model(x), y))

    out = []
    for i, x, y in batches():
        out.append(t.call(train, x, y, **how))
        schedule.step()
        for group in t.optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.01 * (i + 1)
            if "betas" in group:
                group["betas"] = (0.9 - i / 100, group["betas"][1])
    return out


CASES = [factors, chosen, scaled, schedules, branches, nested, of_numpy, rates]
OPEN = {"factors": 1, "scaled": 1, "schedules": 2, "of_numpy": 3, "rates": 2}  # how many plans are made at most
KINDS = ["Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


def plans(t: Trained) -> int:
    """How many plans its job has."""
    return sum(len(job.plans) for job in t.jobs.values())


def cases(layout: str) -> list[tuple[Callable[..., list[float]], str]]:
    """Those for a layout, each with an optimizer."""
    return [(case, "RMSprop") for case in CASES] + [(rates, kind) for kind in KINDS]


if __name__ == "__main__":
    main(cases, lambda layout, of: off(difference(of[0], layout, of[1])), lambda of: f"{of[0].__name__}, {of[1]}")
