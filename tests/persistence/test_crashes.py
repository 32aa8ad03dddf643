"""Whatever ends a save, and wherever: the checkpoint before is whole, or else the new one, and each is found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import actorflow as flow
import warm
from actorflow_compiler.core.errors import StateError
from persistence.faulty_files import FaultyCalls, full_disk
from persistence.held_states import NEW, OLD, equal, load, save

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "step",
    [None, *(pytest.param(step, marks=pytest.mark.slow) for step in (5, 6))],
    ids=["the same folder", "the same step", "another step"],
)
def test_a_process_that_is_killed_anywhere_in_a_save_leaves_the_old_or_the_new_checkpoint(
    step: int | None, tmp_path: Path
) -> None:
    subprocess.run(
        [warm.python(), str(TESTS / "scripts" / "killed_saves.py"), str(tmp_path / "old"),
         *("none" if one is None else str(one) for one in (step and 5, step)), str(tmp_path / "found")],
        check=True, timeout=250, env={**os.environ, "PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    found = json.loads((tmp_path / "found").read_text())
    assert len(found) > 16
    assert found == sorted(found, reverse=True)  # old ... old new ... new
    assert set(found) == {"old", "new"}


def calls_of_a_save(folder: Path) -> list[str]:
    with FaultyCalls().in_force() as calls:
        save(folder, NEW, None)
    return calls.said


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_is_told_and_leaves_the_old_checkpoint(call: str, tmp_path: Path) -> None:
    folder, trial = tmp_path / "old", tmp_path / "trial"
    save(folder, OLD, None)
    save(trial, OLD, None)
    said = calls_of_a_save(trial)
    numbers = [number for number, name in enumerate(said, 1) if name == call]
    assert numbers
    before = sorted(path.name for path in folder.iterdir())
    if call == "fsync":
        numbers = numbers[:-1]  # when the last one fails, the new manifest is there
    for number in numbers:
        with (
            FaultyCalls(number, full_disk).in_force(),
            pytest.raises(StateError, match=r"was not written: .*No space left.*older checkpoints are as they were"),
        ):
            save(folder, NEW, None)
        assert equal(load(folder), OLD)
        assert sorted(path.name for path in folder.iterdir()) == before  # nothing is left behind
    after = said.index("replace") + 3  # of the call that makes the renamed file durable
    with FaultyCalls(after, full_disk).in_force():
        save(folder, NEW, None)
    assert equal(load(folder), NEW)


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_is_found_and_named_and_the_older_checkpoint_is_offered(tmp_path: Path) -> None:
    for step, value in ((1, OLD), (2, NEW)):
        save(tmp_path, value, step)
    file = tmp_path / "step-00000002" / "rank-00000.safetensors"
    whole = file.read_bytes()
    for at in (9, len(whole) // 2, len(whole) - 1):
        damage(file, at)
        with pytest.raises(StateError, match=rf"{file} is damaged.*the next older checkpoint is that of step 1"):
            load(tmp_path)
        file.write_bytes(whole)
    file.write_bytes(whole[:-1])
    assert equal(load(tmp_path), OLD)  # one that is not whole is passed over ...
    with pytest.raises(StateError, match=rf"{file} has {len(whole) - 1} bytes.*step 1: load it with step=1"):
        flow.checkpoint.load(tmp_path, state=torch.nn.Linear(1, 1), step=2)  # ... and named where it is asked for
    file.unlink()
    with pytest.raises(StateError, match=rf"{file} is missing"):
        flow.checkpoint.load(tmp_path / "step-00000002", state=torch.nn.Linear(1, 1))


def test_a_manifest_with_one_other_bit_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, OLD, None)
    manifest = tmp_path / "manifest.json"
    whole = manifest.read_bytes()
    for at in range(0, len(whole), 37):
        damage(manifest, at)
        try:
            assert equal(load(tmp_path), OLD)  # white space around the checkpoint, for example
        except StateError as error:
            assert "damaged" in str(error) or "version" in str(error)  # noqa: PT017
        manifest.write_bytes(whole)
