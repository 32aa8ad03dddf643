"""Train models whose kept tensors change places between calls and in the step, and print what differs from eager.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import actorflow as flow
from scripts.trainings import in_float64, main, off

CALLS = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {}, "data": {}, "tensor": {"parallel": "tensor"}, "micro-batches": {"micro_batches": 2},
    "zero 3": {},
}  # fmt: skip


class Model(nn.Module):
    """Keeps two tensors in attributes, buffers or a list."""

    def __init__(self, where: str, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where, self.step, self.layer = where, step, nn.Linear(4, 4)
        one, other = torch.zeros(4), torch.ones(4)
        if where == "buffers":
            self.register_buffer("one", one)
            self.register_buffer("other", other)
        elif where == "list":
            self.both = [one, other]
        else:
            self.one, self.other = one, other

    def get(self) -> tuple[Tensor, Tensor]:
        """The two."""
        return (self.both[0], self.both[1]) if self.where == "list" else (self.one, self.other)

    def put(self, one: Tensor, other: Tensor) -> None:
        """Others in their places."""
        if self.where == "list":
            self.both[0], self.both[1] = one, other
        else:
            self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        """Depends on which is where."""
        one, other = self.get()
        h = torch.tanh(self.layer(x) + one - 0.5 * other)
        with torch.no_grad():
            self.step(self, one, other, 0.5 * one + h.mean(0))
        return h


Step = Callable[[Model, Tensor, Tensor, Tensor], object]


def read(model: Model, one: Tensor, other: Tensor, new: Tensor) -> object:
    """Both are only read."""


def change(model: Model, one: Tensor, other: Tensor, new: Tensor) -> object:
    """One is changed in place."""
    return one.copy_(new)


def rebind(model: Model, one: Tensor, other: Tensor, new: Tensor) -> object:
    """Both places get new tensors."""
    return model.put(new.detach(), (0.9 * other).detach())


def rebind_one(model: Model, one: Tensor, other: Tensor, new: Tensor) -> object:
    """One place gets a new tensor; the other one is only read."""
    return model.put(new.detach(), other)


def rebind_and_change(model: Model, one: Tensor, other: Tensor, new: Tensor) -> object:
    """One place gets a new tensor; what is in the other one is changed in place."""
    other.mul_(0.9)
    return model.put(new.detach(), other)


def ping_pong(model: Model, one: Tensor, other: Tensor, new: Tensor) -> object:
    """The step itself has them change places, one of them renewed."""
    return model.put(other, new.detach())


def swap(model: Model, one: Tensor, other: Tensor, new: Tensor) -> object:
    """The step has them change places."""
    return model.put(other, one)


STEPS: tuple[Step, ...] = (read, change, rebind, rebind_one, rebind_and_change, ping_pong, swap)
WHERE = ("attributes", "buffers", "list")


def run(where: str, step: Step, every: int, layout: str | None) -> tuple[list[float], int]:
    """Losses, what is kept at the end, and how many plans; the two change places after every so many calls."""
    model = Model(where, step)
    if layout == "zero 3":
        flow.zero(model, stage=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    job: Any = train if layout is None else flow.global_function(**LAYOUTS[layout])(train)
    found, held = [], model.get()[0]
    for call in range(CALLS):
        found.append(float(job(torch.randn(8, 4, generator=torch.Generator().manual_seed(call)))))
        if call % every == every - 1:
            model.put(*reversed(model.get()))
        if call == CALLS // 2:
            found += [v for tensor in (held, *model.get()) for v in tensor.detach().tolist()]
            held = model.get()[0]
    kept = [held, *model.get(), model.layer.weight]
    return [*found, *(v for tensor in kept for v in tensor.detach().flatten().tolist())], (
        0 if layout is None else len(job.plans)
    )


def difference(where: str, step: Step, every: int, layout: str) -> tuple[float, int]:
    """How far it is from eager, and how many plans it takes."""
    with in_float64():
        wanted, _ = run(where, step, every, None)
        found, plans = run(where, step, every, layout)
        return max(abs(a - b) for a, b in zip(wanted, found, strict=True)), plans


def cases(layout: str) -> tuple[Step, ...]:
    """Those for a layout."""
    return STEPS


def wrong(layout: str, step: Step) -> str:
    """What is wrong of a step on several devices."""
    far, plans = difference(WHERE[STEPS.index(step) % 3], step, 3, layout)
    return off(far) or (f"{plans} plans" if plans > 2 else "")


if __name__ == "__main__":
    main(cases, wrong, lambda step: step.__name__)
