"""Train small models whose scripts read and move optimizer state, and print what differs from eager PyTorch.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import actorflow as flow
from scripts.trainings import in_float64, main, off

CALLS = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {}, "data": {}, "tensor": {"parallel": "tensor"}, "pipeline": {"micro_batches": 2}, "zero 3": {},
}  # fmt: skip
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Trained:
    """A model and the optimizer that steps it; eagerly, with functions in place of jobs."""

    def __init__(self, layout: str | None, kind: str) -> None:
        torch.manual_seed(0)
        self.layout, self.kind = layout, kind
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.now = SimpleNamespace(optimizer=KINDS[kind](self.model.parameters()))
        if layout == "pipeline":
            flow.place(self.model, stages=2)
        elif layout == "zero 3":
            flow.zero(self.model, stage=3)

    def job(self, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The step, as a job where there is a layout."""
        if self.layout is None:
            return step
        return flow.global_function(**(options or LAYOUTS[self.layout]))(step)

    def values(self) -> list[float]:
        """What the model and the optimizer have."""
        kept = self.now.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values()]
        tensors += [value for p in sorted(kept) for _, value in sorted(kept[p].items()) if isinstance(value, Tensor)]
        return [number for tensor in tensors for number in tensor.double().flatten().tolist()]


Case = Callable[[Trained], list[float]]


def batches(count: int = CALLS) -> list[tuple[Tensor, Tensor]]:
    """The same for each run."""
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(count)]


def looked_at(weigh: Callable[[nn.Module, Optimizer], float]) -> Case:
    """A step, and an evaluation, of which what the optimizer keeps decides something; some of it is cleared."""

    def case(t: Trained) -> list[float]:
        model, optimizer, found = t.model, t.now.optimizer, []

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y) * weigh(model, optimizer)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def evaluate(x: Tensor) -> Tensor:
            with torch.no_grad():
                return model(x).sum() * weigh(model, optimizer)  # type: ignore[no-any-return]

        train, look = t.job(step), t.job(evaluate, type="predict")
        for i, (x, y) in enumerate(batches()):
            if i == 3:
                optimizer.state.clear()
            if i == 5:
                del optimizer.state[model[0].weight]
            found += [look(x).item(), train(x, y).item(), look(x).item()]
        return found

    return case


def kept_beside(t: Trained) -> list[float]:
    """A mean of gradients that the step keeps with the state of an optimizer of torch's."""
    model, optimizer = t.model, t.now.optimizer

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p in model.parameters():
                state = optimizer.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                assert p.grad is not None
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.grad.copy_(state["mean"])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train = t.job(step)
    return [train(x, y).item() for x, y in batches()]


def looks_afterwards(t: Trained) -> list[float]:
    """How much is kept before and behind the optimizer's step, in the step."""
    model, optimizer, found = t.model, t.now.optimizer, []

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, int, int]:
        loss = F.cross_entropy(model(x), y)
        before = len(optimizer.state)
        loss.backward()  # type: ignore[no-untyped-call]
        model[0].bias.grad = None  # type: ignore[index, union-attr]  # of which it keeps nothing
        optimizer.step()
        optimizer.zero_grad()
        return loss, before, len(optimizer.state)

    train = t.job(step)
    for x, y in batches():
        loss, before, after = train(x, y)
        found += [loss.item(), float(before), float(after)]
    return found


def moved(move: Callable[[Optimizer, Optimizer], object]) -> Case:
    """Another optimizer that goes on with what the one before has kept."""

    def case(t: Trained) -> list[float]:
        model, now, found = t.model, t.now, []

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            now.optimizer.step()
            now.optimizer.zero_grad()
            return loss

        train = t.job(step)
        for i, (x, y) in enumerate(batches()):
            if i == 4:
                other = KINDS[t.kind](model.parameters())
                move(other, now.optimizer)
                now.optimizer = other
            found.append(train(x, y).item())
        return found

    return case


def _as_a_whole(other: Optimizer, optimizer: Optimizer) -> None:
    other.state = optimizer.state


def _of_each(other: Optimizer, optimizer: Optimizer) -> None:
    other.state.update(optimizer.state)


def _tensors(other: Optimizer, optimizer: Optimizer) -> None:
    for p, kept in optimizer.state.items():
        other.state[p] = dict(kept)


def grown(t: Trained) -> list[float]:
    """Parameters that take in more columns, lose some and start anew, as Gaussians that are split and pruned do."""
    made = nn.ParameterDict({"w": torch.full((4, 5), 0.3), "b": torch.linspace(-0.2, 0.2, 5)})
    optimizer = KINDS[t.kind]([{"params": [p], "name": name} for name, p in made.items()])
    t.model, t.now.optimizer = made, optimizer  # type: ignore[assignment]
    if t.layout == "zero 3":
        flow.zero(made, stage=3)

    def change(of: Callable[[Tensor], Tensor]) -> None:
        for group in optimizer.param_groups:
            old = group["params"][0]
            kept = optimizer.state.get(old)
            kept.update({key: of(value) for key, value in kept.items() if value.ndim})
            del optimizer.state[old]
            group["params"][0] = nn.Parameter(of(old.detach()))
            optimizer.state[group["params"][0]] = kept
            made[group["name"]] = group["params"][0]

    def step(x: Tensor) -> Tensor:
        loss = torch.sin(x @ made["w"] + made["b"]).pow(2).mean() + made["b"].exp().sum() * 0.01
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train, found = t.job(step), []
    for i, (x, _) in enumerate(batches(10)):
        found.append(train(x).item())
        if i == 2:
            change(lambda value: torch.cat([value, torch.zeros_like(value[..., :2])], dim=-1))
        if i == 5:
            change(lambda value: value[..., torch.tensor([0, 2, 3, 6])])
        if i == 7:
            change(lambda value: value * 0.5)
    return found


CASES: dict[str, Case] = {
    "its length": looked_at(lambda _, optimizer: 1.0 + len(optimizer.state)),
    "its truth": looked_at(lambda _, optimizer: 2.0 if optimizer.state else 1.0),
    "a parameter in it": looked_at(lambda model, optimizer: 2.0 if model[0].weight in optimizer.state else 1.0),  # type: ignore[index]
    "names in it": looked_at(lambda _, optimizer: 1.0 + sum(map(len, optimizer.state.values()))),
    "kept beside": kept_beside,
    "looked at afterwards": looks_afterwards,
    "moved as a whole": moved(_as_a_whole),
    "moved for each": moved(_of_each),
    "tensors moved": moved(_tensors),
    "grown": grown,
}


PAIRS = [  # Adam takes it that state of which there is some is its own
    *((case, "Adam") for case in CASES if case != "kept beside"),
    *((case, "SGD") for case in ("names in it", "kept beside", "moved as a whole", "grown")),
]


def cases(layout: str) -> list[tuple[str, str]]:
    """Those for a layout: parameters without modules are no pipeline of two stages."""
    return [pair for pair in PAIRS if layout != "pipeline" or pair[0] != "grown"]


def difference(case: str, kind: str, layout: str) -> float:
    """How far a job is from eager PyTorch, in losses, parameters and optimizer state."""
    with in_float64():
        each = []
        for t in (Trained(None, kind), Trained(layout, kind)):
            found = CASES[case](t)
            each.append(found + t.values())
        return max(abs(a - b) for a, b in zip(*each, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(cases, lambda layout, pair: off(difference(*pair, layout)), ", ".join)
