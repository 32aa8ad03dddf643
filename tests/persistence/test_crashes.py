"""Whatever ends a save, and wherever: the checkpoint before is whole, or else the new one, and each is found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.persistence.folder_lock import _held
from actorflow_compiler.core.errors import StateError
from persistence.faulty_files import FaultyCalls, full_disk, killed

OLD, NEW = (
    {
        "a": torch.full((300, 1000), value),
        "b": {"c": torch.full((7,), value + 0.5, dtype=torch.float64), "d": value},
        "e": [torch.full((3, 5), value + number) for number in range(16)],
    }
    for value in (1.0, 2.0)
)


def save(folder: Path, value: dict[str, object], step: int | None) -> None:
    flow.checkpoint.save(folder, state=value, step=step, random=False, wait=True)


def load(folder: Path) -> dict[str, object]:
    class Holder:
        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.state = state

    holder = Holder()
    flow.checkpoint.load(folder, state=holder, random=False)
    return holder.state


def equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        real = torch.empty(one.shape, dtype=one.dtype).copy_(one)  # it is read when it is needed
        return isinstance(other, Tensor) and real.equal(other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    return one == other


def calls_of_a_save(folder: Path, step: int | None) -> FaultyCalls:
    with FaultyCalls().in_force() as calls:
        save(folder, NEW, step)
    return calls


@pytest.mark.parametrize("step", [None, 5, 6], ids=["the same folder", "the same step", "another step"])
def test_a_process_that_is_killed_anywhere_in_a_save_leaves_the_old_or_the_new_checkpoint(
    step: int | None, tmp_path: Path
) -> None:
    save(tmp_path / "old", OLD, None if step is None else 5)
    _held.clear()  # what a child locks
    shutil.copytree(tmp_path / "old", tmp_path / "trial")
    count = calls_of_a_save(tmp_path / "trial", step).count
    assert count >= 15
    found = []
    for number in range(1, count + 2):
        folder = tmp_path / f"at {number}"
        shutil.copytree(tmp_path / "old", folder)
        child = os.fork()
        if not child:
            with FaultyCalls(number, killed).in_force():
                save(folder, NEW, step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (9 if number <= count else 0)
        state = load(folder)
        found.append("old" if equal(state, OLD) else "new" if equal(state, NEW) else "neither")
        save(folder, NEW, step)  # and the folder can be used again
        assert equal(load(folder), NEW)
        left = {path.name.partition("-")[0] for path in folder.rglob("*.part")}
        assert not left
        shutil.rmtree(folder)
    assert found == sorted(found, reverse=True)  # old ... old new ... new
    assert set(found) == {"old", "new"}


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_is_told_and_leaves_the_old_checkpoint(call: str, tmp_path: Path) -> None:
    save(tmp_path / "old", OLD, None)
    shutil.copytree(tmp_path / "old", tmp_path / "trial")
    save(tmp_path / "trial", OLD, None)  # the lock is taken
    said = calls_of_a_save(tmp_path / "trial", None).said
    tmp_path /= "old"
    numbers = [number for number, name in enumerate(said, 1) if name == call]
    assert numbers
    before = sorted(path.name for path in tmp_path.iterdir())
    if call == "fsync":
        numbers = numbers[:-1]  # when the last one fails, the new manifest is there
    for number in numbers:
        with (
            FaultyCalls(number, full_disk).in_force(),
            pytest.raises(StateError, match=r"was not written: .*No space left.*older checkpoints are as they were"),
        ):
            save(tmp_path, NEW, None)
        assert equal(load(tmp_path), OLD)
        assert sorted(path.name for path in tmp_path.iterdir()) == before  # nothing is left behind
    after = said.index("replace") + 3  # of the call that makes the renamed file durable
    with FaultyCalls(after, full_disk).in_force():
        save(tmp_path, NEW, None)
    assert equal(load(tmp_path), NEW)


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
