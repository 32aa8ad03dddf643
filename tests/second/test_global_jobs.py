"""A job takes over a module of global tensors as it is, with its layouts, optimizer and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import actorflow as flow
import warm
from second.launching import command, run

SCRIPT = Path(__file__).with_name("scripts") / "global_jobs.py"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_job_trains_a_global_module_in_its_layouts_as_one_device_does(world: int, tmp_path: Path) -> None:
    done = run(command("run", str(SCRIPT), "--", str(tmp_path), processes=world, python=warm.python()), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    everywhere = list(range(world))
    for rank in everywhere:
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("split 0", "split 2", "on one"):
            assert found[name]["losses"] == pytest.approx(found[name]["expected"], abs=1e-5), name
            assert found[name]["kinds"] == ["OwnedTensor"]
            lies = {key.split(".", 1)[1]: value for key, value in found[name]["lies"].items() if key[:5] == "model"}
            place = [world - 1] if name == "on one" else everywhere
            rows = "B" if name == "on one" else "S(0)"
            assert lies["first.weight"] == [place, rows], name
            assert lies["second.weight"] == [place, "B"], name
            assert lies["scale"] == [place, "B"], name
            sbp = str((flow.sbp.broadcast if name == "on one" else flow.sbp.split(0),))
            part = [8 // len(place), 8] if rank in place else [0]
            assert found[name]["still"] == [True, False, sbp, place, sbp, True, part]
        states = found["states"]
        assert [*states["parts"].values()] == [[8 // world, 8]] * 7, states["parts"]
        assert states["same"]
        assert states["eager"] == ["(flow.sbp.split(0),)", True]
        assert states["again"] == pytest.approx([states["again"][0]] * 2, rel=1e-6)
        assert "table is a global tensor that is reached from outside of modules" in found["loose"]


def test_a_gradient_and_an_attribute_of_a_global_parameter_are_taken_over_too() -> None:
    model: Any = nn.Linear(4, 1, bias=False)
    model.weight.note = "mine"
    flow.to_global(model, flow.placement("cpu", [0]), flow.sbp.broadcast)
    model(torch.ones(2, 4)).sum().backward()

    @flow.global_function(type="train")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    float(step(torch.ones(2, 4)))
    assert model.weight.grad.tolist() == [[4.0] * 4]
    assert model.weight.note == "mine"
    assert model.weight.is_global  # for scripts that ask; it is a stand-in
    assert model.weight.sbp == (flow.sbp.broadcast,)
    assert model.weight.to_local().tolist() == model.weight.detach().tolist()
    assert not model.weight.detach().is_global
