"""Train small models whose gradients are kept between calls, as jobs and eagerly, and print what differs.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from scripts.trainings import apart, in_float64, main, off

EVERY, CALLS = 3, 9
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {}, "micro-batches": {"micro_batches": 2}, "tensor": {"parallel": "tensor"},
    "pipeline": {"micro_batches": 2}, "zero 1": {}, "zero 3": {},
}  # fmt: skip


class Trained:
    """A model, its optimizer, and jobs for them; eagerly, with functions in place of jobs."""

    def __init__(self, layout: str | None, kind: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=0.01)
        self.layout, self.jobs = layout, dict[str, Any]()
        if layout == "pipeline":
            flow.place(self.model, stages=2)
        elif layout is not None and layout.startswith("zero"):
            flow.zero(self.model, stage=int(layout[-1]))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward, of a part of the batch that counts for a step."""
        loss = F.cross_entropy(self.model(x), y)
        (loss / EVERY).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def call(self, step: Callable[..., Any], *args: Any, **options: Any) -> float:
        """What a step that is a job returns."""
        if self.layout is not None:
            known = self.jobs.setdefault(step.__name__, flow.global_function(**options)(step))
            return float(known(*args))
        return float(step(*args))

    def parameters(self) -> list[Tensor]:
        """Their values."""
        return [p.detach().clone() for p in self.model.parameters()]


def batches() -> list[tuple[int, Tensor, Tensor]]:
    """Numbered batches."""
    torch.manual_seed(1)
    return [(i, torch.randn(8, 4), torch.randint(0, 3, (8,))) for i in range(CALLS)]


def inside(t: Trained, **how: Any) -> list[float]:
    """Every so many calls, the job steps and clears."""

    def train(x: Tensor, y: Tensor, last: bool) -> Tensor:
        loss = t.loss(x, y)
        if last:
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
            t.optimizer.step()
            t.optimizer.zero_grad()
        return loss

    return [t.call(train, x, y, i % EVERY == EVERY - 1, **how) for i, x, y in batches()]


def cleared_first(t: Trained, **how: Any) -> list[float]:
    """The job clears before the first of some calls, and steps in the last one."""

    def train(x: Tensor, y: Tensor, first: bool, last: bool) -> Tensor:
        if first:
            t.optimizer.zero_grad()
        loss = t.loss(x, y)
        if last:
            t.optimizer.step()
        return loss

    return [t.call(train, x, y, i % EVERY == 0, i % EVERY == EVERY - 1, **how) for i, x, y in batches()]


def two_jobs(t: Trained, **how: Any) -> list[float]:
    """One job computes gradients, and another steps."""

    def compute(x: Tensor, y: Tensor) -> Tensor:
        return t.loss(x, y)

    def update() -> Tensor:
        norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()
        t.optimizer.zero_grad(set_to_none=False)
        return norm

    out = []
    for i, x, y in batches():
        out.append(t.call(compute, x, y, **how))
        if i % EVERY == EVERY - 1:
            out.append(t.call(update))
    return out


def outside(t: Trained, **how: Any) -> list[float]:
    """A job computes gradients; the script looks at them, changes them, clips, steps, schedules and clears."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.5)

    def compute(x: Tensor, y: Tensor) -> Tensor:
        return t.loss(x, y)

    out = []
    for i, x, y in batches():
        out.append(t.call(compute, x, y, **how))
        first = t.model[0]
        assert first.weight.grad is not None
        out.append(float(first.weight.grad.norm()))
        if i == 4:
            first.bias.grad = None
        if i == 7:
            first.weight.grad *= 2
            first.bias.grad = torch.ones(8)
        if i % EVERY == EVERY - 1:
            out.append(float(nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)))
            t.optimizer.step()
            schedule.step()
            t.optimizer.zero_grad()
            assert first.weight.grad is None
    return out


def never_cleared(t: Trained, **how: Any) -> list[float]:
    """Nobody clears, and the sum grows."""

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = t.loss(x, y)
        t.optimizer.step()
        return loss

    return [t.call(train, x, y, **how) for _, x, y in batches()]


def to_zeros(t: Trained, **how: Any) -> list[float]:
    """Gradients are cleared to zeros, by hand, and looked at first."""

    def train(x: Tensor, y: Tensor) -> Tensor:
        before = sum(p.grad.norm() for p in t.model.parameters() if p.grad is not None)
        for p in t.model.parameters():
            if p.grad is not None and p.ndim == 2:
                p.grad.zero_()
        loss = t.loss(x, y)
        t.optimizer.step()
        return loss + before

    return [t.call(train, x, y, **how) for _, x, y in batches()]


def adversaries(t: Trained, **how: Any) -> list[float]:
    """Two jobs, each of which leaves gradients of the other's parameters."""
    torch.manual_seed(2)
    other = nn.Linear(3, 1)
    stepping = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    def one(x: Tensor) -> Tensor:
        t.optimizer.zero_grad()
        loss: Tensor = other(t.model(x)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        t.optimizer.step()
        return loss

    def two(x: Tensor) -> Tensor:
        stepping.zero_grad()
        loss: Tensor = (1 - other(t.model(x))).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        stepping.step()
        return loss

    return [t.call(step, x, **how) for _, x, _ in batches() for step in (one, two)]


def of_the_script(t: Trained, **how: Any) -> list[float]:
    """The script has computed gradients before the first call, and the job adds to them."""
    for _, x, y in batches()[:2]:
        t.loss(x, y)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = t.loss(x, y)
        t.optimizer.step()
        t.optimizer.zero_grad()
        return loss

    return [t.call(train, x, y, **how) for _, x, y in batches()]


def of_a_tensor(t: Trained, **how: Any) -> list[float]:
    """A tensor that is no module's parameter, and is differentiated twice."""
    weight = torch.ones(3, requires_grad=True)
    stepping = torch.optim.SGD([weight], lr=0.1)

    def train(x: Tensor, last: bool) -> Tensor:
        loss = (t.model(x) * weight).square().mean()
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        (loss + slope.square().sum()).backward()  # type: ignore[no-untyped-call]
        (weight.sum() * 0.1).backward()  # type: ignore[no-untyped-call]
        if last:
            stepping.step()
            stepping.zero_grad()
            t.model.zero_grad()
        return loss.detach()

    out = [t.call(train, x, i % EVERY == 1, **how) for i, x, _ in batches()]
    assert weight.grad is not None
    return [*out, float(weight.grad.sum()), float(weight.detach().sum())]


def frozen(t: Trained, **how: Any) -> list[float]:
    """A layer is frozen while it has a gradient, by which it is stepped once more."""

    def train(x: Tensor, y: Tensor, last: bool) -> Tensor:
        loss = t.loss(x, y)
        if last:
            t.optimizer.step()
            t.optimizer.zero_grad()
        return loss

    out = []
    for i, x, y in batches():
        t.model[0].requires_grad_(not 4 <= i < 7)
        out.append(t.call(train, x, y, i % EVERY == EVERY - 1, **how))
    return out


def set_by_hand(t: Trained, **how: Any) -> list[float]:
    """The step computes gradients without a backward pass, and adds them where there are some."""

    def train(x: Tensor, y: Tensor, last: bool) -> Tensor:
        grads = torch.autograd.grad(F.cross_entropy(t.model(x), y), list(t.model.parameters()))
        for p, grad in zip(t.model.parameters(), grads, strict=True):
            p.grad = grad if p.grad is None else p.grad + grad
        if last:
            t.optimizer.step()
            t.optimizer.zero_grad()
        return grads[0].sum()

    return [t.call(train, x, y, i % EVERY == EVERY - 1, **how) for i, x, y in batches()]


def evaluated(t: Trained, **how: Any) -> list[float]:
    """A job that has nothing to do with gradients is called whether there are some or not."""

    def train(x: Tensor, y: Tensor, last: bool) -> Tensor:
        loss = t.loss(x, y)
        if last:
            t.optimizer.step()
            t.optimizer.zero_grad()
        return loss

    def look(x: Tensor) -> Tensor:
        return t.model(x).detach().sum()

    out = []
    for i, x, y in batches():
        out.append(t.call(train, x, y, i % EVERY == EVERY - 1, **how))
        out.append(t.call(look, x))
    return out


def two_heads(t: Trained, **how: Any) -> list[float]:
    """What one job has left of a part that another does not use counts in the norm by which that one clips."""

    def first(x: Tensor) -> Tensor:
        t.model[0](x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()
        t.model[0].zero_grad()
        return norm

    def second(x: Tensor) -> Tensor:
        loss: Tensor = t.model[2](t.model[0](x).detach()).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    out = []
    for i, x, _ in batches():
        out.append(t.call(first, x, **how))
        if i % EVERY == 1:
            out.append(t.call(second, x, **how))
        if i == 6:
            t.optimizer.zero_grad()
    return out


CASES = [
    inside, cleared_first, two_jobs, outside, never_cleared, to_zeros, adversaries, of_the_script, of_a_tensor, frozen,
    set_by_hand, evaluated, two_heads,
]  # fmt: skip


def difference(case: Callable[..., list[float]], layout: str, kind: str = "AdamW") -> float:
    """The largest difference between a case as jobs and eagerly, in losses and parameters."""
    with in_float64():
        eager, planned = Trained(None, kind), Trained(layout, kind)
        wanted, found = torch.tensor(case(eager)), torch.tensor(case(planned, **LAYOUTS[layout]))
        return apart([wanted, *eager.parameters()], [found, *planned.parameters()])


def cases(layout: str) -> list[Callable[..., list[float]]]:
    """Those for a layout: a job that calls one layer is no pipeline of two stages."""
    return [case for case in CASES if layout != "pipeline" or case is not two_heads]


if __name__ == "__main__":
    main(cases, lambda layout, case: off(difference(case, layout)), lambda case: case.__name__)
