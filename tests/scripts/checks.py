"""Train small models whose steps check values, as jobs and eagerly, over a batch that fails, and print what differs.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from scripts.trainings import main, off

CALLS, FAILS = 4, 1  # calls of each training, and the one that fails
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {}, "micro-batches": {"micro_batches": 2}, "data": {}, "tensor": {"parallel": "tensor"},
    "pipeline": {"micro_batches": 2}, "zero 3": {},
}  # fmt: skip
NAN, LARGE = math.nan, 1e9
Step = Callable[[Tensor, Tensor], Tensor]


class BadBatchError(RuntimeError):
    """An error of a script's own that is made of other things than it says."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Trained:
    """A model and its optimizer."""

    def __init__(self, kind: str = "AdamW", norm: bool = False) -> None:
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.model = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 3)).double()
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=0.01)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        """Backward, and the optimizer's step."""
        loss = F.cross_entropy(h, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


CASES: dict[str, tuple[Callable[[Trained], Step], float, dict[str, Any]]] = {}


def case(bad: float, **how: Any) -> Callable[[Callable[[Trained], Step]], Callable[[Trained], Step]]:
    """Register what makes a step; ``bad`` is what is wrong in the batch that fails."""

    def register(make: Callable[[Trained], Step]) -> Callable[[Trained], Step]:
        CASES[make.__name__] = make, bad, how
        return make

    return register


@case(NAN)
def asserts(t: Trained) -> Step:
    """``assert`` of the loss, before anything changes."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = t.model(x)
        assert not torch.isnan(F.cross_entropy(h, y)), "the loss is NaN"
        return t.loss(h, y)

    return step


@case(LARGE)
def together(t: Trained) -> Step:
    """A check of several conditions, of which some hold in a batch that is good."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = t.model(x)
        if ((x > -10).any() and x.abs().max() > 1e6) or (torch.isnan(h).any() and 0 < h.sum() < 1):
            raise ValueError("too large")
        if not (h.isfinite().all() and not x.isnan().any()):
            raise ValueError("no numbers")
        return t.loss(h, y)

    return step


@case(LARGE, kind="SGD")
def raises(t: Trained) -> Step:
    """``if …: raise`` of all elements, with an error of the script's own."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = t.model(x)
        if (x.abs() > 1e3).any():
            raise BadBatchError(3, "too large")
        return t.loss(h, y)

    return step


@case(NAN)
def leaves(t: Trained) -> Step:
    """``sys.exit`` where the loss is not finite, as a number."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = t.model(x)
        value = F.cross_entropy(h, y).item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping")
            sys.exit(3)
        return t.loss(h, y)

    return step


@case(NAN)
def clips(t: Trained) -> Step:
    """A check in torch, between the backward pass and the optimizer's step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        t.optimizer.zero_grad()
        loss = F.cross_entropy(t.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.1, error_if_nonfinite=True)
        t.optimizer.step()
        return loss

    return step


@case(LARGE, norm=True, kind="Adagrad")
def after_norm(t: Trained) -> Step:
    """What batch norm has counted before a check stays."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = t.model(x)
        assert x.abs().max() < 1e3
        return t.loss(h, y)

    return step


@case(LARGE, norm=True)
def before_norm(t: Trained) -> Step:
    """What batch norm counts behind a check does not stay."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        torch._assert((x < 1e3).all(), "too large")
        return t.loss(t.model(x), y)

    return step


@case(LARGE, kind="RMSprop")
def after_step(t: Trained) -> Step:
    """What the optimizer has done before a check stays."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = t.loss(t.model(x), y)
        if x.abs().max().item() > 1e3:
            raise ValueError("too large")
        return loss

    return step


@case(NAN)
def each_gradient(t: Trained) -> Step:
    """A check in a loop, whose text names what has failed; in a hook of a module, too."""
    t.model[0].register_forward_hook(lambda module, args, out: torch._assert((out < 1e6).any(), "all too large"))

    def step(x: Tensor, y: Tensor) -> Tensor:
        t.optimizer.zero_grad()
        loss = F.cross_entropy(t.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, p in t.model.named_parameters():
            assert p.grad is not None
            if not torch.isfinite(p.grad).all():
                raise FloatingPointError(f"{name} has no gradient")
        t.optimizer.step()
        return loss

    return step


@case(LARGE)
def in_torch(t: Trained) -> Step:
    """Checks of arguments in losses and distributions."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = t.model(x)
        scale = torch.where(x[:, 0] > 1e3, -1.0, 1.0)
        torch.distributions.Normal(h[:, 0], 2 + scale, validate_args=True)
        loss = F.gaussian_nll_loss(h[:, 0], x[:, 1], scale)
        return t.loss(h + loss, y)

    return step


@case(LARGE)
def counts(t: Trained) -> Step:
    """What a step counts before a check, and keeps and schedules behind it."""
    kept = SimpleNamespace(begun=0, calls=0, mean=torch.zeros(3, dtype=torch.float64))
    scheduler = torch.optim.lr_scheduler.StepLR(t.optimizer, 2, 0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        kept.begun += 1
        h = t.model(x)
        if x.max() > 1e3:
            raise ValueError("too large")
        kept.calls += 1
        kept.mean = 0.9 * kept.mean + h.detach().mean(0)
        loss = t.loss(h * kept.begun + kept.mean / kept.calls, y)
        scheduler.step()
        return loss

    return step


@case(LARGE, kind="SGD")
def counts_failures(t: Trained) -> Step:
    """What the side that raises counts, and what is done on the way out."""
    kept = SimpleNamespace(calls=0, failed=0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = t.model(x)
        try:
            if x.max() > 1e3:
                kept.failed += 1
                t.optimizer.param_groups[0]["lr"] *= 0.5
                raise ValueError("too large")
        finally:
            kept.calls += 1
        return t.loss(h * kept.calls / (1 + kept.failed), y)

    return step


@case(LARGE, keeps=True)
def accumulates(t: Trained) -> Step:
    """Gradients of calls before, of which a call that fails changes none."""
    kept = SimpleNamespace(calls=0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(t.model(x), y)
        if x.max() > 1e3:
            raise ValueError("too large")
        loss.backward()  # type: ignore[no-untyped-call]
        kept.calls += 1
        if kept.calls % 2 == 0:
            t.optimizer.step()
            t.optimizer.zero_grad()
        return loss

    return step


TWO_RANKS = (  # those that are trained on several
    "asserts", "together", "clips", "leaves", "accumulates", "counts_failures",
)  # fmt: skip


def trained(name: str, layout: str | None) -> list[float | str]:
    """What each call gives or raises, and the state in the end; eagerly without a layout."""
    make, bad, how = CASES[name]
    keeps = how.get("keeps", False)
    t = Trained(**{key: value for key, value in how.items() if key != "keeps"})
    run = make(t)
    if layout == "pipeline":
        flow.place(t.model, stages=2)
    elif layout is not None and layout.startswith("zero"):
        flow.zero(t.model, stage=int(layout[-1]))
    if layout is not None:
        run = flow.global_function(**LAYOUTS[layout])(run)
    g = torch.Generator().manual_seed(1)
    found: list[float | str] = []
    for call in range(CALLS):
        x, y = torch.randn(8, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (8,), generator=g)
        if call == FAILS:
            x[5, 0] = bad
        try:
            found.append(run(x, y).item())
        except flow.ActorflowError:
            raise
        except (Exception, SystemExit) as error:
            found.append(f"{type(error).__name__}: {error}")
            if not keeps:
                t.optimizer.zero_grad()
    state = [value.double().flatten().tolist() for value in t.model.state_dict().values()]
    return found + [number for values in state for number in values]


def difference(name: str, layout: str) -> float:
    """The largest between a job and eager PyTorch; 1 where not the same calls raise the same."""
    wanted, found = trained(name, None), trained(name, layout)
    assert any(isinstance(one, str) for one in wanted), name
    return max(_apart(a, b) for a, b in zip(wanted, found, strict=True))


def _apart(wanted: float | str, found: float | str) -> float:
    """How far two numbers are apart, beside how large they are; 1 for texts that differ, but for values in them."""
    if isinstance(wanted, str) or isinstance(found, str):
        parts = map(re.escape, str(found).split("…"))
        return float(not re.fullmatch(".*".join(parts), str(wanted)))
    if math.isnan(wanted) and math.isnan(found):
        return 0.0
    apart = abs(wanted - found) / max(1.0, abs(wanted))
    return apart if math.isfinite(apart) else 1.0


def cases(layout: str) -> tuple[str, ...]:
    """Those for a layout."""
    return TWO_RANKS


if __name__ == "__main__":
    main(cases, lambda layout, name: off(difference(name, layout)))
