"""Train small models whose Python state changes between calls and in the step, and print what differs from eager.

python tests/scripts/python_state.py [CASE …]
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import actorflow as flow

CALLS, CHANGE = 8, 3
Step = Callable[..., Tensor]


class Model(nn.Module):
    """Two layers, and what a case does between them."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.a, self.act, self.drop = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0)
        self.norm, self.b = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.before: Tensor | None = None
        self.loose, self.last = torch.zeros(8), torch.zeros(())
        self.hidden = (torch.zeros(8), torch.zeros(8))
        self.lstm = nn.LSTM(8, 2) if case == "state of a recurrent layer" else None
        self.recurrent: tuple[Tensor, ...] | None = None
        self.memories = deque([torch.zeros(8) for _ in range(3)], maxlen=3)
        self.seen: dict[str, Tensor] = {}
        self.ready, self.flips, self.calls = False, False, 0
        self.log: list[Tensor] = []
        self.numbers, self.items = np.random.default_rng(0), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.act(self.a(x)))
        middle = h.detach().mean(0)
        match self.case:
            case "a flag that is set once":
                if not self.ready:
                    self.ready, h = True, h * 3
            case "a flag that flips":
                self.flips = not self.flips
                h = h * (2 if self.flips else 1)
            case "a buffer that is replaced":
                self.mean = 0.9 * self.mean + 0.1 * middle
                h = h - self.mean
            case "a tensor that is replaced":
                self.loose = 0.9 * self.loose + 0.1 * middle
                h = h - self.loose
            case "hidden state":
                h = h if self.before is None else h + self.before
                self.before = middle
            case "hidden state in a tuple":
                one, two = self.hidden
                h = h + one * two
                self.hidden = (middle, one)
            case "a queue of memories":
                h = h + sum(self.memories)
                self.memories.append(middle)
            case "a tensor that gradients need, too":
                h = h * (1 + self.loose)
                self.loose = middle
            case "state of a recurrent layer":
                out, self.recurrent = self.lstm(h[None], self.recurrent)
                self.recurrent = tuple(s.detach() for s in self.recurrent)
                h = h + out[0].sum(1, keepdim=True)
            case "tensors that change places":
                h = h * (1 + self.loose) + self.mean
                self.loose, self.mean = self.mean + middle, self.loose.view(2, 4).view(8)
            case "what is kept for later":
                self.last = h.detach().abs().sum()
            case "a cache":
                if "scale" not in self.seen:
                    self.seen["scale"] = torch.arange(8.0, dtype=torch.float64)
                h = h * self.seen["scale"]
            case "a counter":
                self.calls += 1
                h = h * self.calls
            case "a size that grows":
                self.calls += 1
                h = h + h[: self.calls].sum()
            case "a list that grows":
                self.log.append(middle)
            case "random numbers of Python":
                h = h * random.random()
            case "random numbers of NumPy":
                h = h * np.random.rand()
            case "a generator of NumPy":
                h = h * self.numbers.random()
            case "an iterator":
                h = h * next(self.items)
            case "the time":
                h = h * time.time()
            case "the time by its own name":
                h = h * perf_counter()
            case "an alias of a parameter":
                self.loose = self.b.weight
            case "a penalty":  # read in the same step, after it was written
                self.seen["penalty"] = h.pow(2).mean()
            case "features of batches of two sizes":
                self.before = h
                h = h + self.before.detach()
        return self.b(self.drop(h))  # type: ignore[no-any-return]


def _doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def _double_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def _double_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            _double_in_place(p)


def _shrink(optimizer: torch.optim.Optimizer, *_: object) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


class Trainer:
    """A job that is a method, and what it reads."""

    scale = 1.0

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = Model(case)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.config = SimpleNamespace(weight=0.1, unread=0)
        self.table: dict[str, Any] = {"weight": 1.0}
        self.weights = [1.0, 2.0]
        self.pair = (0.5, 0.25)
        self.array = np.ones(8)
        self.phase, self.count = "first", 0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model(x)
        loss: Tensor = self.criterion(out, y) * self.scale + self.config.weight * out.pow(2).mean()
        loss = loss + self.table["weight"] * out.mean() + sum(self.weights) * out.std() + sum(self.pair) * out.amax()
        loss = loss + (torch.from_numpy(self.array) * self.model.a.bias).sum()
        if self.model.seen:
            loss = loss + self.model.seen["penalty" if self.case == "a penalty" else "scale"].sum()
        if self.phase == "second":
            loss = loss * 2
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.case == "weights that are clamped":
            with torch.no_grad():
                for p in self.model.parameters():
                    p.clamp_(-0.3, 0.3)
        if self.case == "a scheduler":
            self.scheduler.step()
        if self.case == "a learning rate":
            self.optimizer.param_groups[0]["lr"] *= 0.5
        self.optimizer.zero_grad()
        return loss

    def change(self, case: str) -> None:
        """What the script does between two calls."""
        match case:
            case "an attribute":
                self.config.weight = 0.7
            case "an entry":
                self.table["weight"] = 3.0
            case "an item":
                self.weights[0] = 5.0
            case "another item":
                self.weights.append(5.0)
            case "a tuple":
                self.pair = (0.5, 2.0)
            case "an array":
                self.array[2] = 7.0
            case "an attribute of a class":
                type(self).scale = 3.0
            case "a phase":
                self.phase = "second"
            case "label smoothing":
                self.criterion.label_smoothing = 0.4
            case "dropout":
                self.model.drop.p = 1.0
            case "an epsilon":
                self.model.norm.eps = 0.5
            case "an activation":
                self.model.act = nn.ReLU()
            case "a layer":
                torch.manual_seed(5)
                self.model.b = nn.Linear(8, 3)
            case "an optimizer":
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
            case "a model and its optimizer":
                torch.manual_seed(3)
                self.model = Model(case)
                self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
            case "a forward hook":
                self.model.a.register_forward_hook(lambda module, args, out: out * 2)
            case "a hook of a gradient":
                self.model.a.weight.register_hook(_doubled)
            case "a hook after a gradient":
                self.model.a.weight.register_post_accumulate_grad_hook(_double_in_place)
            case "a hook before the optimizer's step":
                self.optimizer.register_step_pre_hook(_double_all)
            case "a hook after the optimizer's step":
                self.optimizer.register_step_post_hook(_shrink)
            case "what the step does not read":
                self.config.unread = 1


# what changes between two calls → plans that the calls need
BETWEEN = {
    **dict.fromkeys((
        "an attribute", "an entry", "an item", "another item", "a tuple", "an array", "an attribute of a class",
        "a phase", "label smoothing", "dropout", "an epsilon", "an activation", "an optimizer",
        "a model and its optimizer", "a forward hook", "a hook of a gradient", "a hook after a gradient",
        "a hook before the optimizer's step", "a hook after the optimizer's step",
    ), 2),
    "a layer": 3,  # the optimizer does not know it: nobody clears its gradients
    "what the step does not read": 1,
}  # fmt: skip
WITHIN = {  # what changes in the step → plans
    "nothing": 1,
    "a counter": 1,
    "a learning rate": 1,
    "a scheduler": 3,
    "a flag that is set once": 2,
    "a flag that flips": 2,
    "a buffer that is replaced": 1,
    "a tensor that is replaced": 1,
    "hidden state": 2,
    "hidden state in a tuple": 1,
    "a queue of memories": 1,
    "a tensor that gradients need, too": 1,
    "state of a recurrent layer": 2,
    "tensors that change places": 1,
    "what is kept for later": 1,
    "a cache": 2,
    "weights that are clamped": 1,
    "a penalty": 2,
    "features of batches of two sizes": 4,
}
REFUSED = {  # what changes in the step → what is said of it
    "a size that grows": r"python_state.py:\d+: self.model.calls changes from 3 to 4, and to another value in each",
    "a list that grows": r"python_state.py:\d+: self.model.log has 0 items before the step and 1 after it",
    "random numbers of Python": r"python_state.py:\d+: step draws random numbers of Python or NumPy",
    "random numbers of NumPy": r"python_state.py:\d+: step draws random numbers of Python or NumPy",
    "a generator of NumPy": r"python_state.py:\d+: step draws random numbers of Python or NumPy",
    "an iterator": r"python_state.py:\d+: the step takes the next item of self.model.items",
    "the time": r"python_state.py:\d+: the step asks for the time",
    "the time by its own name": r"python_state.py:\d+: the step asks for the time",
    "an alias of a parameter": r"self.model.loose and self.model\S*.b.weight would be one tensor .*\.clone\(\)",
}


def train(case: str, job: bool) -> tuple[list[float], int]:
    """The losses of all calls, and what the step leaves for later; how many plans there are."""
    torch.set_default_dtype(torch.float64)
    Trainer.scale = 1.0
    trainer = Trainer(case)
    step: Any = flow.global_function(trainer.step) if job else trainer.step
    generator = torch.Generator().manual_seed(1)
    losses = []
    for i in range(CALLS):
        if i == CHANGE:
            trainer.change(case)
        trainer.count += 1
        rows = 4 if case.endswith("two sizes") and i % 3 == 2 else 6
        x, y = torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)
        losses.append(step(x, y).item())
        if case == "what is kept for later":
            losses.append(trainer.model.last.item())
    return losses, len(step.plans) if job else 0


def main() -> None:
    """A line for each case."""
    for case in sys.argv[1:] or [*BETWEEN, *WITHIN]:
        wanted, _ = train(case, job=False)
        found, plans = train(case, job=True)
        gap = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        if flow.env.rank() == 0:
            right = gap < 1e-9 and plans == (BETWEEN | WITHIN)[case]
            print(f"{case}: {'right' if right else f'WRONG: {gap:.0e} apart, {plans} plans'}")


if __name__ == "__main__":
    main()
