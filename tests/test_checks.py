"""A branch of a step one side of which raises is checked in every call, which raises as eagerly and changes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from scripts.checks import CASES, cases, difference
from test_runs import actorflow
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "checks.py"


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("name", CASES)
def test_a_check_raises_in_the_call_where_eager_does_and_what_is_behind_it_does_not_change(name: str) -> None:
    assert difference(name, "one") < 1e-9


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("name", ["asserts", "raises", "each_gradient", "after_step"])
def test_every_micro_batch_is_checked(name: str) -> None:
    assert difference(name, "micro-batches") < 1e-9


def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["data", "tensor", "pipeline", "zero 3"], how)


def layer() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A layer and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_is_raised_names_the_line_of_the_check() -> None:
    model, _ = layer()

    @flow.global_function(type="predict")
    def predict(x: Tensor) -> Tensor:
        h: Tensor = model(x)
        if torch.isnan(h).any():
            raise ValueError("NaN")
        return h

    predict(torch.ones(2, 4))
    with pytest.raises(ValueError, match="NaN") as raised:
        predict(torch.full((2, 4), math.nan))
    assert str(raised.value) == "NaN"
    (note,) = raised.value.__notes__
    assert "raised by a call of predict at " in note
    assert "if torch.isnan(h).any():" in note
    assert "other calls are done as ever" in note


def test_what_is_printed_before_is_printed_by_the_call_that_raises(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = layer()

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        print("captured")
        loss = model(x).square().mean()
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item():.3f}, stopping")
            raise SystemExit(3)
        print("to its end")
        return loss

    train(torch.ones(2, 4)).item()
    assert capsys.readouterr().out == "captured\nto its end\n"
    with pytest.raises(SystemExit) as raised:
        train(torch.full((2, 4), math.nan))
    assert raised.value.code == 3
    assert capsys.readouterr().out == "Loss is …, stopping\n"


def test_a_text_of_many_checks_at_one_place_says_what_they_have_in_common() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))

    @flow.global_function
    def predict(x: Tensor) -> Tensor:
        for at, one in enumerate(layers):
            x = one(x)
            if x.abs().max() > 10**at:
                raise ValueError(f"layer {at} is too large")
        return x

    with pytest.raises(ValueError, match=r"^layer 0 is too large"):
        predict(torch.full((1, 2), 1e3)).sum()
    nn.init.constant_(layers[10].weight, 1e30)
    with pytest.raises(ValueError, match=r"^layer … is too large"):
        predict(torch.zeros(1, 2)).sum()


KEEPS = """
import torch
import actorflow as flow

class Kept:
    mean = torch.zeros(3)

model = torch.nn.Linear(4, 3)

@flow.global_function
def train(x):
    h = model(x)
    Kept.mean = 0.9 * Kept.mean + h.detach().mean(0)
    assert not torch.isnan(h).any()
    return (h - Kept.mean).square().mean()

train(torch.ones(2, 4)).item()
for x in (torch.full((2, 4), float("nan")), torch.ones(2, 4)):
    try:
        train(x)
    except (AssertionError, flow.StateError) as error:
        print(type(error).__name__, error, *getattr(error, "__notes__", ()))
"""


def test_no_call_follows_one_that_had_changed_what_cannot_be_taken_back(tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(KEEPS)
    run = actorflow("run", str(tmp_path / "keeps.py"), "--devices", "1")
    assert re.search(r"^AssertionError .*\n.*it had changed Kept\.mean before, and no call can", run.stdout), run.stdout
    assert re.search(r"^StateError .*its step had changed Kept\.mean before", run.stdout, re.MULTILINE), run.stdout


def test_a_gradient_that_a_call_has_left_where_it_raised_is_not_passed_over() -> None:
    model, optimizer = layer()

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(torch.ones(2, 4)).item()
    with pytest.raises(RuntimeError, match="non-finite"):
        train(torch.full((2, 4), math.nan))
    with pytest.raises(flow.StateError, match=r"the step depends on gradients that a call before it has left"):
        train(torch.ones(2, 4))
    optimizer.zero_grad()
    assert math.isfinite(train(torch.ones(2, 4)).item())


def test_what_a_step_catches_itself_is_no_check() -> None:
    model, _ = layer()

    @flow.global_function
    def predict(x: Tensor) -> Tensor:
        h: Tensor = model(x)
        try:
            if h.sum() > 0:
                raise ValueError
        except ValueError:
            h = h * 2
        return h

    with pytest.raises(flow.CaptureError, match="the step looks at the value of a tensor"):
        predict(torch.ones(2, 4))


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("what", ["steps", "writes", "writes data", "writes several", "rebinds", "appends", "backward"])
def test_a_side_that_changes_tensors_before_it_raises_is_no_check(what: str) -> None:
    model, optimizer = layer()
    kept = SimpleNamespace(mean=torch.zeros(2), log=[])

    def change(loss: Tensor) -> None:
        if what == "writes":
            kept.mean.add_(1)
        elif what == "writes data":
            model.weight.data.mul_(2)
        elif what == "writes several":
            torch._foreach_mul_([p.data for p in model.parameters()], 2.0)
        elif what == "rebinds":
            kept.mean = kept.mean + 1
        elif what == "appends":
            kept.log.append(3)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        if what == "steps":
            optimizer.step()

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() + kept.mean.sum() + len(kept.log)
        bad = bool(loss.isnan())
        if bad or what not in ("appends", "rebinds"):
            change(loss)
        if bad:
            raise ValueError("no number")
        return loss

    with pytest.raises(flow.CaptureError, match=r"test_checks\.py:\d+: bad = bool.*\n  the step looks at the value"):
        train(torch.ones(2, 4))


def test_a_side_that_torch_refuses_is_no_check() -> None:
    model, _ = layer()

    @flow.global_function
    def predict(x: Tensor) -> Tensor:
        h: Tensor = model(x)
        if h.sum() > 0:
            h = h @ torch.ones(7, 7)  # does not fit
        return h

    with pytest.raises(flow.CaptureError, match="the step looks at the value of a tensor"):
        predict(torch.ones(2, 4))


def test_a_check_in_a_branch_of_which_both_sides_are_computed_raises_where_it_is_taken() -> None:
    @flow.global_function(type="predict")
    def predict(x: Tensor) -> Tensor:
        def small(h: Tensor) -> Tensor:
            if h.min() < 0:
                raise ValueError("below")
            return h

        found: Tensor = torch.cond(x.sum() < 1, small, lambda h: h * 2, (x,))
        return found

    assert predict(torch.tensor([-1.0, 3.0])).tolist() == [-2, 6]
    assert predict(torch.tensor([0.0, 0.5])).tolist() == [0, 0.5]
    with pytest.raises(ValueError, match="below"):
        predict(torch.tensor([-1.0, 0.5]))


def test_a_step_that_skips_a_batch_is_told_to_raise() -> None:
    model, optimizer = layer()

    @flow.global_function
    def train(x: Tensor) -> Tensor | None:
        loss: Tensor = model(x).square().mean()
        if torch.isnan(loss):
            return None
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    with pytest.raises(flow.CaptureError, match=r"To leave a batch out, raise an error here, and catch it around the"):
        train(torch.ones(2, 4))


def both(x: Tensor) -> None:
    """Asked for in two parts."""
    if (x > 10).any() and (x < -10).any():
        raise ValueError("both")


def either_of_two(x: Tensor) -> None:
    """Parts of parts."""
    if (x > 10).any() and STRICT and ((x < -10).any() or torch.isnan(x).any()):
        raise ValueError("strict")


def between(x: Tensor) -> None:
    """A chain of comparisons."""
    if not -10 < x.sum() < 1e3:
        raise OverflowError("out of range")


def each_column(x: Tensor) -> None:
    """One place, several times."""
    for i in range(x.shape[1]):
        if x[:, i].max() > 10 and x[:, i].min() < -10:
            raise ValueError(f"column {i}")


def one_of_two_checks(x: Tensor) -> None:
    """Two checks of one statement."""
    if (x > 10).any() and (x < -10).any():
        raise ValueError("both")
    elif torch.isnan(x).any() and x.shape[0] > 1 and (x.nansum() > -1e6):  # noqa: RET506
        raise KeyError("no number")


STRICT = True
BATCHES = [[1.0, 2.0], [20.0, 1.0], [1.0, -20.0], [20.0, -20.0], [math.nan, 1.0], [20.0, math.nan], [2.0, 1.0]]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("check", [both, either_of_two, between, each_column, one_of_two_checks])
def test_a_check_of_several_conditions_raises_where_all_of_them_hold(check: Callable[[Tensor], None]) -> None:
    def said(step: Callable[[Tensor], Tensor]) -> list[str]:
        found = []
        for batch in BATCHES:
            x = torch.tensor(batch)[:, None].expand(2, 3).clone()
            try:
                found.append(f"{step(x).sum().item():.4f}")
            except (ValueError, KeyError, OverflowError) as error:
                found.append(repr(error))
        return found

    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    weight = plain.weight.detach().clone()

    def eager(x: Tensor) -> Tensor:
        check(x)
        return x @ weight

    @flow.global_function(type="predict")
    def predict(x: Tensor) -> Tensor:
        check(x)
        return x @ plain.weight

    assert said(predict) == said(eager)


def test_several_conditions_of_a_branch_that_goes_on_are_shown_as_one() -> None:
    model, _ = layer()

    @flow.global_function(type="predict")
    def predict(x: Tensor) -> Tensor:
        h: Tensor = model(x)
        if h.sum() > 1e3 and x.sum() > 1e3:
            return x
        return h

    with pytest.raises(flow.CaptureError, match=r"torch\.where\(\(h\.sum\(\) > 1.*\) & \(x\.sum\(\) > 1"):
        predict(torch.ones(2, 4))
