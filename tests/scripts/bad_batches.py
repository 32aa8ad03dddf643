"""Train over bad batches whose errors are caught: every rank goes on, and ends as eager PyTorch does on the others."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import ActorError
from recipes.layouts import LAYOUTS

WIDTH, CLASSES, ROWS, CALLS = 8, 4, 8, 12
Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]


class Normed(nn.Module):
    """An embedding, a batch norm and a deeper layer: a wrong index and a wrong label fail in different places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.norm(self.embedding(x).mean(1))))
        return found


class Plain(nn.Module):
    """The same without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.embedding(x).mean(1)))
        return found


def batches(bad: dict[int, str]) -> list[Batch]:
    """Some of them with a label or an index out of range, in the first or the last row."""
    torch.manual_seed(3)
    found = [(torch.randint(0, WIDTH, (ROWS, 3)), torch.randint(0, CLASSES, (ROWS,))) for _ in range(CALLS)]
    for number, what in bad.items():
        x, y = found[number]
        row = 0 if what.startswith("first") else ROWS - 1
        if what.endswith("label"):
            y[row] = 99
        elif what.endswith("index"):
            x[row] = 99
        else:
            y[:] = 99
    return found


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def run(kind: Callable[[], nn.Module], layout: str, bad: dict[int, str], late: bool) -> str:
    """What is wrong with a training; nothing where each call that has to fails, and what is left is eager's."""
    torch.manual_seed(0)
    model = kind().double()
    eager = copy.deepcopy(model)
    flows = LAYOUTS[layout]
    if flows.hints is not None:
        flows.hints({"model": model})
    optimizer, other = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, eager))
    options: Any = flows.options
    step, eagerly = flow.global_function(trainer(model, optimizer), type="train", **options), trainer(eager, other)
    found: list[Any] = []
    errors = 0
    for number, batch in enumerate(batches(bad)):
        if number not in bad:
            expected = eagerly(*batch)
        while True:
            try:
                loss = step(*batch)
            except ActorError as error:  # of a call before: this one has not been made
                if not late or "was a call before" not in str(error):
                    return f"call {number} raised {error}"
                errors += 1
                continue
            break
        if late:
            found.append((number, loss, None if number in bad else expected.item()))
            continue
        try:
            off = abs(float(loss) - expected.item())
        except ActorError as error:
            if number not in bad or "has changed nothing" not in str(error) or "bad_batches.py" not in str(error):
                return f"call {number} raised {error}"
            errors += 1
        else:
            if number in bad or off > 1e-9:
                return f"call {number} is off by {off}"
    for number, loss, right in found:
        try:
            value = float(loss)
        except ActorError as error:
            if number not in bad:
                return f"call {number} raised {error}"
            errors += 1
        else:
            if right is None or abs(value - right) > 1e-9:
                return f"call {number} gave {value}, expected was {right}"
    if errors < len(bad):
        return f"{errors} of {len(bad)} errors came"
    if kind is Plain:
        for (name, mine), theirs in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
            if (mine - theirs).abs().max() > 1e-9:
                return f"{name} is off by {(mine - theirs).abs().max()}"
    return ""


class Counts:
    """What a step counts and sets in Python, before, in the middle of, and behind what may fail."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.begun, self.entries, self.scale, self.phase = 0, {"seen": 0}, 1.0, "done"
        self.between, self.done, self.running = 0, 0, False
        self.rows: int | None = None
        self.last: Tensor | None = None
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)

    def told(self) -> list[Any]:
        last = None if self.last is None else round(self.last.item(), 9)
        rate = round(self.schedule.optimizer.param_groups[0]["lr"], 12)
        counts = self.begun, self.entries["seen"], round(self.scale, 12), self.between, self.done
        return [*counts, self.phase, self.running, self.rows, last, self.schedule.last_epoch, rate]


def counting(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Counts]:
    counts = Counts(optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        counts.begun += 1
        counts.entries["seen"] += len(x)
        counts.phase, counts.running, counts.rows = "forward", True, None
        logits = model(x)
        counts.between += 1
        counts.scale *= 0.9
        loss = F.cross_entropy(logits, y) * counts.scale
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        counts.schedule.step()
        counts.done += 1
        counts.last = loss.detach()
        counts.phase, counts.running, counts.rows = "done", False, len(x)
        return loss

    return step, counts


def counted(layout: str, bad: dict[int, str]) -> str:
    """What is wrong with what a training leaves in Python after each call, and with its weights."""
    torch.manual_seed(0)
    model = Plain().double()
    eager = copy.deepcopy(model)
    flows = LAYOUTS[layout]
    if flows.hints is not None:
        flows.hints({"model": model})
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, eager))
    (plain, mine), (eagerly, theirs) = counting(model, optimizer), counting(eager, other)
    options: Any = flows.options
    step = flow.global_function(plain, type="train", **options)
    for number, batch in enumerate(batches(bad)):
        try:
            eagerly(*batch)
        except IndexError:
            try:
                float(step(*batch).detach())
            except ActorError as error:
                if "but what its step does in Python before that line" not in str(error):
                    return f"call {number} raised {error}"
            else:
                return f"call {number} raised nothing"
        else:
            step(*batch)
        if mine.told() != theirs.told():
            return f"call {number} has left {mine.told()}, expected was {theirs.told()}"
    for (name, value), right in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        if (value - right).abs().max() > 1e-9:
            return f"{name} is off by {(value - right).abs().max()}"
    return ""


CASES: dict[str, tuple[dict[int, str], bool]] = {
    "in the first rows": ({0: "first label", 4: "first index"}, False),
    "in the last rows": ({1: "last label", 2: "last index", 11: "last label"}, False),
    "in all rows": ({3: "all", 4: "all", 5: "first label"}, False),
    "not read": ({2: "last label", 3: "first index"}, True),
}

if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        kinds = (Plain,) if chosen == "pipeline 2" else (Plain, Normed)  # a batch norm sees one micro-batch at a time
        for made in kinds:
            for case, (wrong, unread) in CASES.items():
                told = run(made, chosen, wrong, unread)
                print(f"{chosen}, {made.__name__}, {case}: {'WRONG: ' + told if told else 'right'}", flush=True)
        wrong = {0: "first label", 1: "last label", 4: "first index", 5: "first label", 11: "last index"}
        told = counted(chosen, wrong)
        print(f"{chosen}, counted: {'WRONG: ' + told if told else 'right'}", flush=True)
