"""A Keeper saves when it is time to, keeps the last checkpoints, and resumes from the newest whole one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import actorflow as flow
import warm
from actorflow_compiler.core.errors import StateError

SCRIPT = Path(__file__).parent.parent / "scripts" / "kept.py"


def run(devices: int, *arguments: object) -> int:
    command = [warm.python(), "-m", "actorflow", "run", str(SCRIPT), "--devices", str(devices), "--"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).returncode


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_is_killed_goes_on_as_one_that_was_not(devices: int, tmp_path: Path) -> None:
    assert run(devices, tmp_path / "whole", tmp_path / "expected") == 0
    expected = json.loads((tmp_path / "expected").read_text())
    for killed_at in (2, 10, 17):
        assert run(devices, tmp_path / "parts", tmp_path / "found", killed_at)
    assert run(devices, tmp_path / "parts", tmp_path / "found") == 0
    found: dict[str, Any] = json.loads((tmp_path / "found").read_text())
    assert found["state"] == expected["state"]
    assert 2 <= len(found["losses"]) <= 8  # those that were still to be done
    assert all(expected["losses"][number] == loss for number, loss in found["losses"].items())
    assert sorted(path.name for path in (tmp_path / "parts").glob("step-*")) == ["step-00000017", "step-00000019"]


def keeper(folder: Path, model: nn.Module, **options: Any) -> flow.checkpoint.Keeper:
    return flow.checkpoint.Keeper(folder, model=model, **{"every": 2, **options})


def test_checkpoints_that_are_not_whole_or_damaged_are_named_and_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    for number in keeper(tmp_path, model, keep=None).steps(8):
        with torch.no_grad():
            model.weight.fill_(number)
    assert [path.name[-1] for path in sorted(tmp_path.glob("step-*"))] == ["1", "3", "5", "7"]
    (tmp_path / "step-00000007" / "manifest.json").unlink()
    file = tmp_path / "step-00000005" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other = nn.Linear(3, 2)
    again = keeper(tmp_path, other)
    assert again.start == 4
    assert (other.weight == 3).all()
    said = capfd.readouterr().err
    assert "step-00000007 has no manifest.json: its save did not end; it is ignored" in said
    assert f"{file} is damaged" in said
    assert list(again.steps(6)) == [4, 5]
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["1", "3", "5"]  # 5 is whole again, 7 is gone


def test_it_saves_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("actorflow.persistence.keeper.time.monotonic", lambda: now[0])
    by_clock = keeper(tmp_path, nn.Linear(1, 1), every=None, every_seconds=10, keep=None)
    saved = []
    for number in range(30):
        now[0] += 3
        if by_clock.step(number) is not None:
            saved.append(number)
    by_clock.wait()
    assert saved == [3, 7, 11, 15, 19, 23, 27]


def test_a_checkpoint_of_another_model_ends_the_run_before_anything_is_changed(tmp_path: Path) -> None:
    list(keeper(tmp_path, nn.Linear(3, 2)).steps(2))
    with pytest.raises(StateError, match=r"model\.weight has shape \[2, 4\]; in the checkpoint .* \[2, 3\].*nothing"):
        list(keeper(tmp_path, nn.Linear(4, 2)).steps(4))


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": 1.5}, {"every": None}, {"keep": 0}, {"every_seconds": -1}], ids=str
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StateError, match="Keeper without every=" if options == {"every": None} else "was found"):
        keeper(tmp_path, nn.Linear(1, 1), **options)


def test_a_generator_of_the_scripts_own_goes_on_where_it_was(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    model = nn.Linear(1, 1)
    first = flow.checkpoint.Keeper(tmp_path, model=model, every=2, draws=generator)
    drawn = [torch.rand(2, generator=generator) for _ in first.steps(4)]
    again = torch.Generator().manual_seed(1)
    resumed = flow.checkpoint.Keeper(tmp_path, model=model, every=2, draws=again)
    assert resumed.start == 4
    assert again.get_state().equal(generator.get_state())
    flow.checkpoint.load(tmp_path, step=1, draws=again)
    assert torch.rand(2, generator=again).equal(drawn[2])


def test_a_generator_is_not_loaded_from_what_is_none(tmp_path: Path) -> None:
    flow.checkpoint.save(tmp_path, draws={"state": 1}, model=nn.Linear(1, 1)).wait()
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    with pytest.raises(StateError, match="the state of a random generator was expected"):
        flow.checkpoint.load(tmp_path, draws=generator)
    assert generator.get_state().equal(before)
