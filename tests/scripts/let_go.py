"""Run trainings one after the other, drop each, and count what is left of them on every rank."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.session.process import started

STEPS = 3
SOON = 30  # calls after which what is dropped is gone
LAYOUT = sys.argv[1] if __name__ == "__main__" and sys.argv[1:] else "data"
OPTIONS: Any = {
    "data": {},
    "tensor": {"parallel": "tensor"},
    "zero 3": {},
    "micro-batches": {"micro_batches": 2},
}[LAYOUT]
Step = Callable[[Tensor], Tensor]
Made = tuple[Step, nn.Module]


class Scaled(nn.Module):
    """A layer with a tensor that is neither a parameter nor a buffer, and that jobs only read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.scale = torch.full((8,), 0.5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x)) * self.scale
        return out


def pair(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Scaled().double()
    if LAYOUT == "zero 3":
        flow.zero(model, stage=3)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batch(number: int) -> Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def of_functions(seed: int) -> Made:
    model, optimizer = pair(seed)
    return flow.global_function(lambda x: trained(model, optimizer, x), **OPTIONS), model


class Trainer:
    """As people write it: the job is a method."""

    def __init__(self, seed: int) -> None:
        self.model, self.optimizer = pair(seed)

    @flow.global_function(**OPTIONS)
    def step(self, x: Tensor) -> Tensor:
        return trained(self.model, self.optimizer, x)


def of_methods(seed: int) -> Made:
    trainer = Trainer(seed)
    return trainer.step, trainer.model


class Slotted:
    """The same, of a class whose objects take no attributes."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self, seed: int) -> None:
        self.parts = [pair(seed)]

    @flow.global_function(**OPTIONS)
    def step(self, x: Tensor) -> Tensor:
        return trained(*self.parts[0], x)


def of_slots(seed: int) -> Made:
    trainer = Slotted(seed)
    return trainer.step, trainer.parts[0][0]


class Itself(nn.Module):
    """A module that trains itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.optimizer = pair(seed)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    @flow.global_function(**OPTIONS)
    def step(self, x: Tensor) -> Tensor:
        return trained(self, self.optimizer, x)


def of_modules(seed: int) -> Made:
    module = Itself(seed)
    return module.step, module.inner


def of_steps_outside(seed: int) -> Made:
    model, optimizer = pair(seed)

    @flow.global_function(**OPTIONS)
    def backward(x: Tensor) -> Tensor:
        loss: Tensor = (model(x) - x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(x: Tensor) -> Tensor:
        loss = backward(x)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


class Now:
    """What one job works on, which is exchanged between its calls."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


now = Now()


@flow.global_function(**OPTIONS)
def train_now(x: Tensor) -> Tensor:
    return trained(now.model, now.optimizer, x)


def of_one_job(seed: int) -> Made:
    now.model, now.optimizer = pair(seed)
    return train_now, now.model


train_passed = flow.global_function(trained, **OPTIONS)


def of_arguments(seed: int) -> Made:
    model, optimizer = pair(seed)
    return functools.partial(train_passed, model, optimizer), model


class Both(nn.Module):
    """Two models, of which every second call leaves one alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second, self.calls = pair(seed)[0], pair(seed)[0], 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + 0 * self.second(x) if self.calls % 2 else out


def of_every_second(seed: int) -> Made:
    both = Both(seed)
    optimizer = torch.optim.Adam(both.first.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        both.calls += 1
        return train_passed(both, optimizer, x)

    return step, both.second


KINDS = (
    of_functions, of_methods, of_slots, of_modules, of_steps_outside, of_one_job, of_arguments, of_every_second,
)  # fmt: skip
SOME = (of_functions, of_one_job)


def left() -> tuple[int, int, int]:
    """Plans, variables and stand-ins that this rank has."""
    session = started()
    assert session is not None
    assert session.worker is not None
    assert session.runtime is not None
    return len(session.worker.plans), len(session.worker.variables), len(session.runtime.variables.layouts)


def trials(make: Callable[[int], Made], count: int) -> Iterator[tuple[tuple[int, int, int], int, float]]:
    """After each trial: what is left, how many models there are, and how far it is from eager PyTorch."""
    models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    for seed in range(count):
        step, model = make(seed)
        models.add(model)
        eager, optimizer = pair(seed)
        wrong = 0.0
        for number in range(STEPS):
            wrong = max(wrong, abs(float(step(batch(number))) - trained(eager, optimizer, batch(number)).item()))
        del step, model, eager, optimizer
        gc.collect()
        yield left(), len(models), wrong


def kept(count: int) -> float:
    """How far models that are kept are from eager ones when their jobs are gone, and others have come and gone."""
    found = []
    for seed in range(count):
        _, model = made = of_methods(seed)
        for number in range(STEPS):
            made[0](batch(number))
        found.append(model)
        del made, model
        gc.collect()
    wrong = 0.0
    for seed, model in enumerate(found):
        eager, optimizer = pair(seed)
        for number in range(STEPS):
            trained(eager, optimizer, batch(number))
        ours = model.state_dict()
        wrong = max(wrong, *(float((ours[key] - value).abs().max()) for key, value in eager.state_dict().items()))
    return wrong


def in_turn(count: int) -> tuple[float, int]:
    """How far models that one job trains in turn are from eager ones, and how many plans that takes."""
    ours, eager = [pair(seed) for seed in range(count)], [pair(seed) for seed in range(count)]
    wrong, job = 0.0, flow.global_function(lambda x: trained(now.model, now.optimizer, x), **OPTIONS)
    for number in range(4 * count):
        now.model, now.optimizer = ours[number % count]
        loss = trained(*eager[number % count], batch(number))
        wrong = max(wrong, abs(float(job(batch(number))) - loss.item()))
    return wrong, len(job.plans)


def on_the_master_alone() -> float:
    """How far a model that only the master keeps is from an eager one, when it reads it."""
    best: Any = None
    for seed in range(3):
        step, model = of_functions(seed)
        step(batch(0))
        if seed == 0 and flow.env.rank() == 0:
            best = model
        del step, model
        gc.collect()
    if best is None:
        return 0.0
    eager, optimizer = pair(0)
    trained(eager, optimizer, batch(0))
    ours = best.state_dict()
    return max(float((ours[key] - value).abs().max()) for key, value in eager.state_dict().items())


def held_bytes() -> int:
    """What the worker of this rank has for variables."""
    session = started()
    assert session is not None
    assert session.worker is not None
    return sum(tensor.nbytes for tensor in session.worker.variables.values())


def trained_for_nothing(make: Callable[[int], Made]) -> None:
    """A training of which nothing is kept."""
    step = make(1)[0]
    for number in range(STEPS):
        step(batch(number))


def without_compiling(make: Callable[[int], Made], late: int = -1) -> tuple[int, int]:
    """Plans, and bytes of variables, that are left of trainings dropped while another one goes on, which has its plan.

    Rank ``late`` collects its garbage later than the others.
    """
    other, _ = of_functions(0)
    other(batch(0))
    gc.collect()
    for _ in range(SOON):
        other(batch(0))
    plans, held = left()[0], held_bytes()
    trained_for_nothing(make)
    if make is of_one_job:
        del now.model, now.optimizer
    gc.disable()
    try:
        for number in range(2 * SOON):
            if number == SOON or flow.env.rank() != late:
                gc.collect()
            other(batch(number))
    finally:
        gc.enable()
    return left()[0] - plans, held_bytes() - held


def a_reader_of_lent_tensors() -> float:
    """How far a job is from eager that reads a tensor which another job, dropped a few calls before, has only read."""
    scale = torch.full((8,), 0.5, dtype=torch.float64)
    other, _ = of_functions(0)
    wrong = 0.0
    for calls in range(0, 12, 2):
        first = flow.global_function(lambda x: (x * scale).sum(), **OPTIONS)
        first(batch(0))
        del first
        gc.collect()
        for _ in range(calls):
            other(batch(0))
        second = flow.global_function(lambda x: (x * scale).mean(), **OPTIONS)
        for number in range(SOON):
            scale.add_(0.125)
            wrong = max(wrong, abs(float(second(batch(number))) - (batch(number) * scale).mean().item()))
    return wrong


def tell(title: str, wrong: object) -> None:
    """Print whether all is as it should be on this rank."""
    print(f"rank {flow.env.rank()}, {title}: {f'WRONG {wrong}' if wrong else 'right'}", flush=True)


def main() -> None:
    if LAYOUT == "data":
        for make, late in ((of_steps_outside, -1), (of_modules, 0), (of_methods, 1)):
            more = without_compiling(make, late)
            tell(f"{make.__name__}, soon", more if any(more) else "")
        far = a_reader_of_lent_tensors()
        tell("lent", far if far > 1e-9 else "")
        return
    for make in KINDS if "every" in sys.argv else SOME:
        found = list(trials(make, 3))
        counts = [count for count, _, _ in found]
        models = [there for _, there, _ in found]
        far = max(wrong for _, _, wrong in found)
        right = counts[-1] == counts[-2] and models[-1] <= 2 and far < 1e-9
        tell(make.__name__, "" if right else (counts, models, far))
    wrong, plans = in_turn(2)
    there = {"kept": kept(3), "in turn": wrong + (plans != 2), "on the master": on_the_master_alone()}
    for title, far in there.items():
        tell(title, far if far > 1e-9 else "")


if __name__ == "__main__":
    main()
