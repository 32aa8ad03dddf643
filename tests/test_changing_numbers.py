"""Numbers that only enter arithmetic are data: arguments, settings and counts of optimizers, counters, item()."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CallError, CaptureError
from scripts.changing_numbers import CASES, OPEN, Trained, cases, difference, plans, rates
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "changing_numbers.py"
KINDS = ["Adadelta", "NAdam", "RAdam"]


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize(("case", "kind"), [(case, "RMSprop") for case in CASES] + [(rates, kind) for kind in KINDS])
def test_numbers_count_as_eagerly(case: Any, kind: str) -> None:
    assert difference(case, "micro-batches", kind) < 1e-9


def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["tensor", "pipeline"], how)


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("case", [case for case in CASES if case.__name__ in OPEN])
def test_what_only_enters_arithmetic_is_compiled_once_for_each_branch(case: Callable[..., list[float]]) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        trained = Trained("data", "RMSprop")
        case(trained)
        assert plans(trained) <= OPEN[case.__name__]
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_factor_is_as_exact_as_that_of_torch(dtype: torch.dtype) -> None:
    x = torch.arange(-6, 7).to(dtype)

    def step(x: Tensor, a: float, k: int) -> list[Tensor]:
        whole = [x * k, k - x, x + k, x > a, x // 2 * k]
        return [*whole, x * a, a * x, x + a, x - a, a - x, x / a, x.sum() * a, x.clamp(-a, a)]

    job = flow.global_function(type="predict")(step)
    for a, k in ((0.1, 3), (1 / 3, 7), (-2.7, -1)):
        for mine, wanted in zip(job(x, a, k), step(x, a, k), strict=True):
            assert mine.dtype == wanted.dtype
            assert mine.tolist() == wanted.tolist()
    assert len(job.plans) == 1


def test_what_a_number_decides_makes_a_plan_for_each_outcome() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor, epoch: int, flag: bool) -> Tensor:
        if isinstance(epoch, int) and epoch < 5:
            x = x * epoch
        return x + epoch if flag else x

    x = torch.ones(2)
    for epoch in range(10):
        assert float(step(x, epoch, True)[0]) == (2 * epoch if epoch < 5 else 1 + epoch)
    assert len(step.plans) == 2
    assert "epoch < 5 from True to False" in flow.explain_recompiles()
    assert float(step(x, 3, False)[0]) == 3
    assert len(step.plans) == 3


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("use", ["size", "index", "text", "dict", "numpy", "scripted"])
def test_what_is_no_arithmetic_is_right_for_each_number(use: str) -> None:
    import numpy as np

    x = torch.arange(12.0).view(3, 4)
    uses: dict[str, Callable[[int], Tensor]] = {
        "size": lambda k: x.new_zeros(k).sum() + x.repeat(k, 1).sum(),
        "index": lambda k: x[k:].sum() + x[:, : k + 1].sum() + x[0, [k, 0]].sum(),
        "text": lambda k: x * len(f"{k}" * k),
        "dict": lambda k: x * {0: 3.0, 1: 5.0, 2: 7.0}[k],
        "numpy": lambda k: x * float(np.exp(np.array([k, 1.0])).sum()),
        "scripted": lambda k: F.dropout(x, 0.0 * k) * math.factorial(k) + torch.tensor([k, 1]).sum(),
    }
    job = flow.global_function(type="predict")(lambda k: uses[use](k))
    for k in (0, 1, 2, 1):
        assert torch.equal(torch.as_tensor(job(k)), uses[use](k))
    assert len(job.plans) == 3


def test_a_number_that_is_returned_is_that_of_the_call() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor, a: float) -> dict[str, Any]:
        return {"x": x * a, "a": a, "half": a / 2, "root": math.sqrt(a)}

    for a in (4.0, 9.0):
        found = step(torch.ones(2), a)
        assert (found["a"], found["half"], found["root"]) == (a, a / 2, math.sqrt(a))
    assert len(step.plans) == 1


def test_what_python_cannot_compute_for_a_call_is_what_the_code_makes_of_it() -> None:
    def plain(x: Tensor, k: int) -> Tensor:
        try:
            return x * (1 / k)
        except ZeroDivisionError:
            return x + 5

    step = flow.global_function(type="predict")(plain)
    for k in (2, 0, 4, 0):
        assert torch.equal(torch.as_tensor(step(torch.ones(2), k)), plain(torch.ones(2), k))
    assert len(step.plans) == 2

    @flow.global_function(type="predict")
    def careless(x: Tensor, k: int) -> Tensor:
        return x * (1 / k)

    careless(torch.ones(2), 2)
    with pytest.raises(CallError, match=r"(?s)test_changing_numbers\.py:\d+: return x \* \(1 / k\).*ZeroDivisionError"):
        careless(torch.ones(2), 0)
    assert float(careless(torch.ones(2), 4)[0]) == 0.25


def test_code_that_asks_for_types_gets_the_numbers_themselves() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor, a: float) -> Tensor:
        return x * a if type(a) is float else x * 100

    for a in (0.5, 0.25):
        assert float(step(torch.ones(2), a)[0]) == a
    assert len(step.plans) == 2


class Counted(torch.optim.Optimizer):
    """Adam as people write it, with its count in Python."""

    def __init__(self, parameters: Any, where: str) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)})
        self.where, self.count = where, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += self.where == "self"
        for group in self.param_groups:
            one, two = group["betas"]
            if self.where == "group":
                group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                if self.where == "state":
                    state["step"] += 1
                t = {"self": self.count, "group": group.get("step"), "state": state["step"]}[self.where]
                state["mean"].mul_(one).add_(p.grad, alpha=1 - one)
                state["square"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                scale = (state["square"].sqrt() / math.sqrt(1 - two**t)).add_(1e-8)
                if t <= 3:  # a warm-up
                    p.add_(state["mean"], alpha=-group["lr"])
                else:
                    p.addcdiv_(state["mean"], scale, value=-group["lr"] / (1 - one**t))


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """That of transformers, which chooses its rate by the parameters."""
    from transformers.optimization import Adafactor

    return Adafactor(parameters, warmup_init=True)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {  # and how many plans it is worth
    "count of the optimizer": (lambda p: Counted(p, "self"), 3),
    "count of a group": (lambda p: Counted(p, "group"), 3),
    "count of a parameter": (lambda p: Counted(p, "state"), 3),
    "torch's Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.01), 2),
    "transformers' Adafactor": (adafactor, 2),
}


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_that_count_and_that_ask_for_values_step_as_eagerly(kind: str) -> None:
    make, worth = OPTIMIZERS[kind]

    def trained(jobs: bool) -> tuple[list[float], list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if "Adafactor" not in kind else None

        def train(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        step: Any = flow.global_function(micro_batches=2)(train) if jobs else train
        torch.manual_seed(1)
        out = []
        for _ in range(7):
            out.append(float(step(torch.randn(8, 4).double(), torch.randint(0, 3, (8,)))))
            if schedule is not None:
                schedule.step()
        out += [s["step"] for s in optimizer.state.values() if isinstance(s["step"], int)]
        out += [optimizer.param_groups[0].get("step", 0), getattr(optimizer, "count", 0)]
        return out, [p.detach().clone() for p in model.parameters()], len(step.plans) if jobs else 0

    wanted, parameters, _ = trained(False)
    found, mine, made = trained(True)
    assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 1e-9
    assert max(float((a - b).abs().max()) for a, b in zip(parameters, mine, strict=True)) < 1e-9
    assert made <= worth


def test_counters_that_a_step_carries_on_are_carried_on_by_calls() -> None:
    seen, totals = {"calls": 0}, [0.5]
    model = nn.Linear(2, 2)
    model.count = 0  # type: ignore[assignment]

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Tensor:
        model.count += 1  # type: ignore[operator]
        seen["calls"] += 2
        totals[0] *= 0.9
        x = x * model.count + seen["calls"] * totals[0]  # type: ignore[operator]
        return x * 10 if model.count % 3 == 0 else x  # type: ignore[operator]

    total = 0.5
    for i in range(1, 8):
        total *= 0.9
        wanted = (torch.ones(2).double() * i + 2 * i * total) * (10 if i % 3 == 0 else 1)
        assert torch.allclose(torch.as_tensor(step(torch.ones(2).double())), wanted, atol=1e-12)
        assert (model.count, seen["calls"], totals[0]) == (i, 2 * i, total)
    assert len(step.plans) == 2
    model.count = 2  # type: ignore[assignment]  # by the script
    assert float(step(torch.ones(2).double())[0]) == pytest.approx((3 + 16 * totals[0]) * 10)


def test_a_value_that_is_asked_for_may_enter_arithmetic_and_nothing_else() -> None:
    def plain(x: Tensor) -> Tensor:
        norm = x.norm().item()
        return x * min(1.0, 1 / (norm + 1e-6)) + max(0.5, norm) + math.sqrt(norm) + (x > 0).sum().item() / 3

    job = flow.global_function(type="predict")(plain)
    for scale in (0.1, 1.0, 10.0):
        x = torch.linspace(-1, 2, 6).double() * scale
        assert torch.allclose(torch.as_tensor(job(x)), plain(x), atol=1e-12, rtol=0)

    for bad in (lambda x: x.sum().item(), lambda x: x * int(x.sum().item()), lambda x: x if x.sum().item() > 0 else -x):
        refused = flow.global_function(type="predict")(bad)
        with pytest.raises(CaptureError, match=r"test_changing_numbers.py:.*looks at the value of a tensor|looks at"):
            refused(torch.ones(2))


def test_bounds_of_which_one_is_a_number_and_one_a_tensor_are_computed_by_the_plan() -> None:
    tops, counts = torch.tensor([0.5, 2.0]).double(), {"calls": 0}

    def plain(x: Tensor, top: Tensor) -> list[Tensor]:
        counts["calls"] += 1
        mean = x.abs().mean()
        return [
            torch.clamp(x, 0, tops.data[0]), x.clamp(-0.1, max=mean), torch.clip(x, min=-mean, max=0.3),
            x.clamp(0, mean.item()), x.clamp(counts["calls"] * 0.1, mean), x.float().clamp(0, mean),
            x.clone().clamp_(-mean, 0.7), torch.arange(6).clamp(1, top), torch.arange(6).clamp(1, mean),
            torch.clamp(tops / 4 * counts["calls"], 0, tops[1]), torch.clamp(min=-1, input=x, max=mean),
        ]  # fmt: skip

    job = flow.global_function(type="predict")(plain)
    for i in range(1, 5):
        x, top = torch.linspace(-1, 2, 6).double() * i, torch.tensor(i)
        counts["calls"] = i - 1
        wanted = plain(x, top)
        counts["calls"] = i - 1
        for found, expected in zip(job(x, top), wanted, strict=True):
            assert found.dtype == expected.dtype
            assert torch.allclose(torch.as_tensor(found), expected, atol=1e-12, rtol=0)
    assert len(job.plans) == 1


@pytest.mark.parametrize("way", ["sum", "item", "dictionary", "rate"])
def test_a_number_of_a_tensor_that_a_step_keeps_is_refused_with_its_place(way: str) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept: dict[str, Any] = {"total": 0.0}

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        loss = layer(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if way == "rate":
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + loss.item())
        elif way == "dictionary":
            kept["logs"] = {"loss": [float(loss)]}
        else:
            kept["total"] = kept["total"] + loss.item() if way == "sum" else loss.item()
        return loss

    said = r"test_changing_numbers.py:\d+: .*would be a number that is there only when .* expected: the tensor itself"
    with pytest.raises(CaptureError, match=said):
        train(torch.ones(3, 2))


def test_what_a_value_that_the_host_knows_decides_makes_a_plan_for_each_outcome() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def plain(x: Tensor) -> Tensor:
        calls: Any = layer.calls
        calls.add_(1)
        return x * (10 if calls.item() > 3 else 1) * (1 + calls.item() / 10)

    job = flow.global_function()(plain)
    for i in range(1, 7):
        assert float(job(torch.ones(2).double())[0]) == pytest.approx((10 if i > 3 else 1) * (1 + i / 10), abs=1e-12)
    assert len(job.plans) == 2


def test_what_a_cache_keeps_of_a_step_is_a_number_afterwards() -> None:
    @functools.lru_cache
    def weight(k: int) -> float:
        return 0.5 * k

    def plain(x: Tensor, k: int) -> Tensor:
        return x * weight(k) + 2 * weight(k)

    one, two = (flow.global_function(type="predict")(plain) for _ in range(2))
    x = torch.ones(2)
    for k in (1, 2, 1):
        assert float(one(x, k)[0]) == 1.5 * k
        assert float(two(x, k)[0]) == 1.5 * k
        assert torch.equal(plain(x, k), torch.full((2,), 1.5 * k))

    @flow.global_function(type="predict")
    def other(x: Tensor, k: int, j: int) -> tuple[Tensor, float]:
        return x * (k * weight(j)), weight(j)

    for k in (7, 11):
        found, half = other(x, k, 1)
        assert (float(found[0]), half) == (k * 0.5, 0.5)


def test_a_learning_rate_in_a_tensor_is_read_at_each_call() -> None:
    def trained(jobs: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3).double()
        optimizer = torch.optim.RMSprop(layer.parameters(), lr=torch.tensor(0.1))  # type: ignore[arg-type]

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step: Any = flow.global_function(train) if jobs else train
        out = []
        for _ in range(4):
            out.append(float(step(torch.ones(2, 4).double())))
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
        return out, len(step.plans) if jobs else 0

    found, made = trained(True)
    assert found == pytest.approx(trained(False)[0], abs=1e-9)
    assert made == 1
