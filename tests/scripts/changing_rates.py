"""Train small models whose steps change rates themselves, as jobs and eagerly, and print what differs.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import Optimizer

from scripts.changing_numbers import finish
from scripts.kept_gradients import Trained, batches, difference
from scripts.trainings import main, off

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5], 0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda k: min(1.0, (k + 1) / 4)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.95),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.3, 1.0, 4),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6, 2.0),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=10),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.05, step_size_up=3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.3, 1.0, 3), schedulers.CosineAnnealingLR(o, 5)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.3, 3), schedulers.ExponentialLR(o, 0.9)]
    ),
}
WARM = 4


def loss_of(t: Trained, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(t.model(x), y)


def settings(t: Trained) -> list[float]:
    """What the optimizer's groups are left with."""
    found = []
    for group in t.optimizer.param_groups:
        found += [group["lr"], group["weight_decay"], group.get("momentum", 0.0), *group.get("betas", ())]
    return [float(value) for value in found]


def scheduled(name: str) -> Callable[..., list[float]]:
    """A scheduler that steps in the step."""

    def case(t: Trained, **how: Any) -> list[float]:
        scheduler = SCHEDULES[name](t.optimizer)

        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = finish(t, loss_of(t, x, y))
            scheduler.step()
            return loss

        out = []
        for _, x, y in batches():
            out += [t.call(train, x, y, **how), *settings(t), *map(float, scheduler.get_last_lr())]
        return [*out, float(scheduler.state_dict().get("last_epoch", 0))]

    case.__name__ = name
    return case


def warmed_up(t: Trained, **how: Any) -> list[float]:
    """The rate of each step, of a number that is passed."""

    def train(x: Tensor, y: Tensor, i: int) -> Tensor:
        for group in t.optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (i + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * i / 20))
        return finish(t, loss_of(t, x, y))

    out = []
    for i, x, y in batches():
        out += [t.call(train, x, y, i, **how), *settings(t)]
    return out


class Noam:
    """Counts, and sets rates, as in the paper on transformers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        """Set the rate, and step."""
        self.count += 1
        rate = 0.1 * min(self.count**-0.5, self.count * WARM**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


def noam(t: Trained, **how: Any) -> list[float]:
    """An object around the optimizer that counts."""
    wrapper = Noam(t.optimizer)

    def train(x: Tensor, y: Tensor) -> Tensor:
        t.optimizer.zero_grad()
        loss = loss_of(t, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        wrapper.step()
        return loss.detach()

    out = []
    for _, x, y in batches():
        out += [t.call(train, x, y, **how), *settings(t), wrapper.count]
    return out


def twice(t: Trained, **how: Any) -> list[float]:
    """Two steps of an optimizer with two rates, of which one is a constant."""

    def train(x: Tensor, y: Tensor, rate: float) -> Tensor:
        for group in t.optimizer.param_groups:
            group["lr"] = 0.25
        first = finish(t, loss_of(t, x, y))
        for group in t.optimizer.param_groups:
            group["lr"] = rate
        return first + finish(t, loss_of(t, x, y))

    return [t.call(train, x, y, 0.1 / (i + 1), **how) for i, x, y in batches()]


def read(t: Trained, **how: Any) -> list[float]:
    """What the step reads of rates that change outside of it."""
    scheduler = schedulers.ExponentialLR(t.optimizer, 0.9)

    def train(x: Tensor, y: Tensor) -> Tensor:
        rate = scheduler.get_last_lr()[0]
        penalty = sum(p.pow(2).sum() for p in t.model.parameters()) * t.optimizer.param_groups[0]["lr"]
        return finish(t, loss_of(t, x, y) + penalty) + rate + scheduler.last_epoch

    out = []
    for _, x, y in batches():
        out.append(t.call(train, x, y, **how))
        scheduler.step()
    return out


class Halved(schedulers.LRScheduler):
    """A schedule of one's own."""

    every = 3

    def get_lr(self) -> list[Any]:
        """Half the rate every few steps."""
        if self.last_epoch and self.last_epoch % self.every == 0:
            return [group["lr"] / 2 for group in self.optimizer.param_groups]
        return [group["lr"] for group in self.optimizer.param_groups]


def own(t: Trained, **how: Any) -> list[float]:
    """A schedule of one's own, whose class changes."""
    scheduler = Halved(t.optimizer)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = finish(t, loss_of(t, x, y))
        scheduler.step()
        return loss

    out = []
    for i, x, y in batches():
        Halved.every = 3 if i < 5 else 1
        out += [t.call(train, x, y, **how), *settings(t)]
    Halved.every = 3
    return out


def accumulated(t: Trained, **how: Any) -> list[float]:
    """A schedule that steps with every third call."""
    scheduler = schedulers.CosineAnnealingLR(t.optimizer, 3)

    def train(x: Tensor, y: Tensor, last: bool) -> Tensor:
        loss = t.loss(x, y)
        if last:
            t.optimizer.step()
            scheduler.step()
            t.optimizer.zero_grad()
        return loss

    return [t.call(train, x, y, i % 3 == 2, **how) + settings(t)[0] for i, x, y in batches()]


def changed_between(t: Trained, **how: Any) -> list[float]:
    """A scheduler and rates that the script changes, too."""
    scheduler = schedulers.StepLR(t.optimizer, 2, 0.5)
    saved = {}

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = finish(t, loss_of(t, x, y))
        scheduler.step()
        return loss

    out = []
    for i, x, y in batches():
        if i == 2:
            saved = scheduler.state_dict()
        if i == 4:
            scheduler.gamma = 0.8
        if i == 5:
            t.optimizer.param_groups[0]["lr"] = 0.1
        if i == 7:
            scheduler.load_state_dict(saved)
        out += [t.call(train, x, y, **how), *settings(t)]
    return out


def hooked(t: Trained, **how: Any) -> list[float]:
    """A hook that sets the rate before each step of the optimizer."""
    count = {"calls": 0}

    def halve(optimizer: Optimizer, *_: Any) -> None:
        count["calls"] += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / count["calls"]

    t.optimizer.register_step_pre_hook(halve)

    def train(x: Tensor, y: Tensor) -> Tensor:
        return finish(t, loss_of(t, x, y))

    return [t.call(train, x, y, **how) + count["calls"] for _, x, y in batches()]


def in_a_tensor(t: Trained, **how: Any) -> list[float]:
    """A rate in a tensor, which the script holds as well."""
    rate = torch.tensor(0.05)
    for group in t.optimizer.param_groups:
        group["lr"] = rate
    scheduler = schedulers.ExponentialLR(t.optimizer, 0.8)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = finish(t, loss_of(t, x, y))
        scheduler.step()
        return loss

    return [t.call(train, x, y, **how) + float(rate) for _, x, y in batches()]


def of_numpy(t: Trained, **how: Any) -> list[float]:
    """Settings that are NumPy's numbers: a schedule in an array, which the loop goes through."""
    schedule = np.linspace(0.05, 0.01, 9)

    def train(x: Tensor, y: Tensor) -> Tensor:
        return finish(t, loss_of(t, x, y))

    out = []
    for i, x, y in batches():
        for group in t.optimizer.param_groups:
            group["lr"], group["weight_decay"] = schedule[i], schedule[-1 - i] / 2
            if "betas" in group:
                group["betas"] = (1 - schedule[i], group["betas"][1])
        out.append(t.call(train, x, y, **how))
    return [*out, *settings(t)]


def of_numpy_in_the_step(t: Trained, **how: Any) -> list[float]:
    """A step that sets them, and goes on from what it set."""
    for group in t.optimizer.param_groups:
        group["lr"] = np.float64(0.05)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = finish(t, loss_of(t, x, y))
        for group in t.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9 + 0.001
        return loss

    return [value for _, x, y in batches() for value in (t.call(train, x, y, **how), *settings(t))]


CASES = [
    warmed_up, noam, twice, read, own, accumulated, changed_between, hooked, in_a_tensor, of_numpy,
    of_numpy_in_the_step,
]  # fmt: skip
OPEN = {  # plans, at most
    "warmed_up": 2, "noam": 2, "accumulated": 4, "read": 1, "ExponentialLR": 2, "CosineAnnealingLR": 4, "LambdaLR": 3,
    "of_numpy": 1, "of_numpy_in_the_step": 1,
}  # fmt: skip
EVERYWHERE = [*CASES, *(scheduled(name) for name in ("LambdaLR", "OneCycleLR"))]


def cases(layout: str) -> list[tuple[Callable[..., list[float]], str]]:
    """Those for a layout, each with an optimizer."""
    return [(case, kind) for case in EVERYWHERE for kind in ("AdamW", "RMSprop")]


if __name__ == "__main__":
    main(cases, lambda layout, of: off(difference(of[0], layout, of[1])), lambda of: f"{of[0].__name__}, {of[1]}")
