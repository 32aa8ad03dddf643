"""A branch on values of tensors is refused with the line that can stand there instead, which does what it did."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow

BRANCHES = {
    "an if": ["if mask.any():", "    loss = loss + h[mask].mean()"],
    "an if in a line": ["if mask.any(): loss += h[mask].mean()"],
    "an else": ["if loss.item() > 0.2:", "    loss = 2 * loss", "else:", "    loss = loss.sqrt()"],
    "an early return": ["if not mask.any():", "    return h.sum() * 0", "return h[mask].mean()"],
    "a number of rows": ["rows = h[mask]", "if len(rows) > 0:", "    return rows.mean()", "return h.mean()"],
    "no rows": ["rows = h[mask]", "if rows.numel() == 0: return h.mean()", "return rows.mean()"],
    "an expression": ["loss = loss + (h[mask].mean() if mask.any() else h.sum())"],
    "two conditions": ["if mask.any() and loss > 0.1:", "    loss = 3 * loss"],
    "a loop": ["while h.abs().max() > 0.3:", "    h = h * 0.5", "loss = h.square().mean()"],
}


def written(path: Path, lines: list[str]) -> ModuleType:
    """A module with a model and a step that has these lines."""
    head = ["import torch", "MOST_ROUNDS = 20", "def step(x):", "    h = model(x)", "    mask = x[:, 0] > 0"]
    text = [*head, "    loss = h.square().mean()", *(f"    {line}" for line in lines), "    return loss"]
    path.write_text("\n".join(text))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    module.model = nn.Linear(4, 3).double()  # type: ignore[attr-defined]
    return module


def trained(module: Any, job: bool) -> list[float]:
    """The losses of some steps, where a mask selects some rows, none, and all; and the weights behind them."""
    optimizer = torch.optim.SGD(module.model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss: Tensor = module.step(x)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run: Callable[[Tensor], Tensor] = flow.global_function(train) if job else train
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = [run(batch).item() for batch in (x, -x.abs(), x.abs(), 0.1 * x)]
    return losses + [v for t in module.model.state_dict().values() for v in t.flatten().tolist()]


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("branch", BRANCHES)
def test_the_line_that_is_shown_does_the_same(branch: str, tmp_path: Path) -> None:
    lines = BRANCHES[branch]
    wanted = trained(written(tmp_path / "eager.py", lines), job=False)
    with pytest.raises(flow.CaptureError) as refused:
        trained(written(tmp_path / "refused.py", lines), job=True)
    shown = re.search(r"Instead of this line: (.*?)\. Both sides", str(refused.value))
    assert shown is not None, str(refused.value)
    first = next(at for at, line in enumerate(lines) if "if " in line or "while " in line)
    more = ["loss = h.square().mean()"] if branch == "a loop" else []
    instead = written(tmp_path / "instead.py", [*lines[:first], shown[1], *more])
    assert trained(instead, job=True) == pytest.approx(wanted, abs=1e-9)


def test_a_check_of_two_conditions_needs_no_other_line(tmp_path: Path) -> None:
    lines = ["if loss.isnan() and mask.any(): raise ValueError"]
    wanted = trained(written(tmp_path / "eager.py", lines), job=False)
    assert trained(written(tmp_path / "checked.py", lines), job=True) == pytest.approx(wanted, abs=1e-9)


def test_a_check_that_names_a_value_is_shown_as_one_condition(tmp_path: Path) -> None:
    lines = ["if (worst := loss.abs()).isnan() and mask.any(): raise ValueError"]
    wanted = trained(written(tmp_path / "eager.py", lines), job=False)
    with pytest.raises(flow.CaptureError) as refused:
        trained(written(tmp_path / "refused.py", lines), job=True)
    shown = re.search(r"Instead of this condition: (.*)$", str(refused.value), re.MULTILINE)
    assert shown is not None, str(refused.value)
    instead = written(tmp_path / "instead.py", [f"if {shown[1]}: raise ValueError"])
    assert trained(instead, job=True) == pytest.approx(wanted, abs=1e-9)


def test_what_has_no_such_line_shows_none(tmp_path: Path) -> None:
    with pytest.raises(flow.CaptureError) as refused:
        trained(written(tmp_path / "long.py", ["if mask.any():", "    h = 2 * h", "    loss = h.mean()"]), job=True)
    assert "Instead of this line" not in str(refused.value)
