"""Train models whose steps rebind attributes to other tensors, which the script holds and resets; print what differs.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import actorflow as flow
from scripts.trainings import apart, in_float64, main, off

CALLS = 9
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {}, "micro-batches": {"micro_batches": 2}, "tensor": {"parallel": "tensor"},
    "pipeline": {"micro_batches": 2}, "zero 3": {},
}  # fmt: skip


class Model(nn.Module):
    """Keeps what it computes for its next call, in a way that has a name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.inner, self.out = kind, nn.Linear(4, 4), nn.Linear(4, 2)
        self.h: Any = torch.zeros(4)
        if kind == "buffer":
            del self.h
            self.register_buffer("h", torch.zeros(4))
        elif kind != "tensor":
            pair = [torch.zeros(4), torch.ones(4)]
            as_kept = {"tuple": tuple, "list": list, "deque": deque, "dict": lambda p: dict(zip("hc", p, strict=True))}
            self.h = as_kept[kind](pair)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        kept = torch.stack(self.values()).sum(0)
        z = torch.tanh(self.inner(x) + kept)
        new, other = z.mean(0).detach(), 0.5 * z.amax(0).detach()
        match self.kind:
            case "tuple":
                self.h = (new, other)
            case "list":
                self.h = [new, other]
            case "deque":
                self.h.append(new)
                self.h.popleft()
            case "dict":
                self.h = {"h": new, "c": other}
            case _:
                self.h = new
        return self.out(z)  # type: ignore[no-any-return]

    def values(self) -> list[Tensor]:
        """What is kept, one by one."""
        return [*self.h.values()] if isinstance(self.h, dict) else [self.h] if isinstance(self.h, Tensor) else [*self.h]


class Trained:
    """A model and its jobs; eagerly, with functions in place of jobs."""

    def __init__(self, layout: str | None, kind: str) -> None:
        self.model = Model(kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        if layout == "pipeline":
            flow.place(self.model, stages=2)
        elif layout is not None and layout.startswith("zero"):
            flow.zero(self.model, stage=int(layout[-1]))

        def train(x: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(x).pow(2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return loss.detach()

        def moved(x: Tensor) -> Tensor:
            with torch.no_grad():
                found: Tensor = self.model(x).pow(2).mean()
            return found

        how = LAYOUTS[layout] if layout is not None else {}
        self.train: Any = train if layout is None else flow.global_function(**how)(train)
        self.moved: Any = moved if layout is None else flow.global_function(**how)(moved)

    def kept(self) -> list[float]:
        """What the model keeps."""
        return [float(v) for tensor in self.model.values() for v in tensor.detach()]

    def plans(self) -> int:
        """How many plans the training has."""
        return len(self.train.plans)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator) for _ in range(CALLS)]


def floats(value: Any) -> list[float]:
    """The numbers of a tensor, or of what holds several."""
    tensors = [value] if isinstance(value, Tensor) else value.values() if isinstance(value, dict) else value
    return [float(v) for tensor in tensors for v in tensor.detach()]


def empty(t: Trained) -> Any:
    """What the model begins with."""
    return Model(t.model.kind).h


def held(t: Trained) -> list[float]:
    """The script looks at what was there before each call."""
    out = []
    for x in batches():
        old = t.model.h
        out += [float(t.train(x)), *t.kept(), *(floats(old) if not isinstance(old, deque) else [])]
    return out


def collected(t: Trained) -> list[float]:
    """What each call left is kept in a list."""
    seen = []
    for x in batches():
        t.train(x)
        seen.append(t.model.h if not isinstance(t.model.h, deque) else t.model.h[-1])
    return [v for one in seen for v in floats(one)]


def restored(t: Trained) -> list[float]:
    """An evaluation that goes on with its own, and what was there before it comes back."""
    out = []
    for i, x in enumerate(batches()):
        out.append(float(t.train(x)))
        if i % 3 == 2:
            saved = t.model.h
            if isinstance(saved, deque):
                saved = deque(saved)
            out += [float(t.moved(batches()[0])), *t.kept()]
            t.model.h = saved
    return [*out, *t.kept()]


def reset(t: Trained) -> list[float]:
    """Every few calls it begins anew, with what the script has made once."""
    start, out = empty(t), []
    for i, x in enumerate(batches()):
        if i % 3 == 0:
            t.model.h = start if not isinstance(start, deque) else deque(start)
        out.append(float(t.train(x)))
    return [*out, *t.kept(), *floats(start)]


def swapped(t: Trained) -> list[float]:
    """Two sequences take turns."""
    other, out = empty(t), []
    for x in batches():
        out.append(float(t.train(x)))
        t.model.h, other = other, t.model.h
    return [*out, *floats(other), *t.kept()]


def held_by_one(t: Trained) -> list[float]:
    """One rank alone looks at what was there before each call."""
    out = []
    for x in batches():
        old = t.model.h if flow.env.rank() == 0 else None
        out += [float(t.train(x)), *t.kept(), *(floats(old) if old is not None and not isinstance(old, deque) else [])]
    return out


CASES: list[Callable[[Trained], list[float]]] = [held, held_by_one, collected, restored, reset, swapped]
KINDS = ["tensor", "buffer", "tuple", "list", "dict", "deque"]


def difference(case: Callable[[Trained], list[float]], layout: str, kind: str) -> tuple[float, int]:
    """The largest difference between a case as jobs and eagerly; how many plans the training takes."""
    with in_float64():
        eager, planned = Trained(None, kind), Trained(layout, kind)
        wanted, found = torch.tensor(case(eager)), torch.tensor(case(planned))
        difference = apart([wanted, *eager.model.parameters()], [found, *planned.model.parameters()])
        return difference, planned.plans()


def cases(layout: str) -> list[tuple[Callable[[Trained], list[float]], str]]:
    """Those for a layout, each with a kind of what is held."""
    return [(case, kind) for case in CASES for kind in KINDS]


if __name__ == "__main__":
    main(cases, lambda layout, of: off(difference(of[0], layout, of[1])[0]), lambda of: f"{of[0].__name__}, {of[1]}")
