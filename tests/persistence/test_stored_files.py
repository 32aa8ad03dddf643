"""Files of a checkpoint stay readable while somebody is still to read them, and what has been checked is read once."""

from __future__ import annotations

import gc
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import actorflow as flow
from actorflow.deferred import DeferredTensor
from actorflow.persistence import stored
from actorflow.persistence.container import BlockWriter, header_of
from actorflow.persistence.folders import open_checkpoint
from actorflow.persistence.loading import read_checkpoint, verified
from actorflow.persistence.manifest import FileRecord, Manifest, StoredPiece, TensorRecord
from actorflow.persistence.save_task import SaveTask
from actorflow.persistence.storage import LocalFolder
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.tensor_bytes import contents


def trained(width: int = 64, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Holder:
    """Keeps the state that it is given, as an object that reads it later."""

    state: dict[str, Any] = {}  # noqa: RUF012

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each checksum that is computed from now on."""
    found: list[int] = []

    class Counting:
        @staticmethod
        def crc32(data: memoryview) -> int:
            found.append(len(data))
            return zlib.crc32(data)

    monkeypatch.setattr(stored, "zlib", Counting)
    return found


@pytest.mark.parametrize("verify", [True, False])
def test_each_byte_is_checked_once_or_as_it_is_read(
    verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow.checkpoint.save(tmp_path, a={"x": torch.randn(1500, 1000)}, wait=True)
    size = (tmp_path / "rank-00000.safetensors").stat().st_size
    checked, holder = counted(monkeypatch), Holder()
    flow.checkpoint.load(tmp_path, a=holder, verify=verify)
    assert sum(checked) == (size if verify else 0)
    assert isinstance(holder.state["x"], DeferredTensor)
    flow.materialize(holder.state["x"])
    assert sum(checked) >= size
    assert not verify or sum(checked) == size


def test_a_file_that_was_written_to_since_it_was_checked_is_checked_again(tmp_path: Path) -> None:
    flow.checkpoint.save(tmp_path, a={"x": torch.randn(1500, 1000)}, wait=True)
    holder = Holder()
    flow.checkpoint.load(tmp_path, a=holder)
    with (tmp_path / "rank-00000.safetensors").open("r+b") as file:
        file.seek(3_000_000)
        file.write(b"other")
    with pytest.raises(StateError, match="is damaged: bytes 2097152 to 3145728 are not those that were written"):
        flow.materialize(holder.state["x"])


def several_files(folder: Path, count: int) -> dict[str, torch.Tensor]:
    """A checkpoint whose tensors lie in many files, as many ranks write them."""
    values = {str(number): torch.full((40, 50), float(number)) for number in range(count)}
    flow.checkpoint.save(folder, a=values, wait=True)
    found = open_checkpoint(LocalFolder(folder))
    manifest, state = found.manifest, found.state
    assert manifest is not None
    files, tensors = [], {}
    for number, name in enumerate(manifest.tensors):
        header, (entry,) = header_of([(name, torch.float32, (0, 0), (40, 50))])
        writer = BlockWriter(LocalFolder(folder).create(f"rank-{number + 1:05d}.safetensors"))
        writer.write(memoryview(header))
        writer.write(contents(state.values(name).whole()))
        writer.close()
        files.append(FileRecord(f"rank-{number + 1:05d}.safetensors", writer.size, tuple(writer.checksums)))
        tensors[name] = TensorRecord("float32", (40, 50), (StoredPiece(number, entry.begin, (0, 0), (40, 50)),))
    made = Manifest(None, count, manifest.objects, manifest.random, tensors, tuple(files))
    (folder / "manifest.json").write_bytes(made.to_json())
    for name in ("rank-00000.safetensors", ".actorflow-lock"):
        (folder / name).unlink()
    return values


def test_more_files_than_may_stay_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEPT_OPEN", 4)
    values, holder = several_files(tmp_path, 20), Holder()
    flow.checkpoint.load(tmp_path, a=holder)
    for order in (list(values), list(reversed(values))):
        for name in order:
            assert flow.materialize(holder.state[name]).equal(values[name])
    state = open_checkpoint(LocalFolder(tmp_path)).state
    for name in values:
        state.values(f"a.{name}").whole()
    assert sum(file._reader is not None for file in state.files) == 4


def test_damage_in_any_of_many_files_is_found(tmp_path: Path) -> None:
    several_files(tmp_path, 5)
    found = open_checkpoint(LocalFolder(tmp_path))
    assert verified(found, found.state) == ""
    for number in range(1, 6):
        path = tmp_path / f"rank-{number:05d}.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert f"{path} is damaged" in verified(found, found.state)
        path.write_bytes(whole)


def test_a_keeper_removes_what_was_loaded_once_it_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "KEPT_OPEN", 1)
    values = several_files(tmp_path / "step-00000000", 6)
    holder = Holder()
    keeper = flow.checkpoint.Keeper(tmp_path, a=holder, every=1, keep=1)
    assert keeper.start == 0  # the checkpoint was saved without a number
    saved = dict(holder.state)
    holder.state = {}
    for number in (1, 2):
        keeper.save(number).wait()
    assert (tmp_path / "step-00000000").exists()
    assert not (tmp_path / "step-00000001").exists()
    for name, value in values.items():
        assert flow.materialize(saved[name]).equal(value)
    saved.clear()
    gc.collect()
    keeper.save(3).wait()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


def test_a_save_leaves_the_files_of_the_checkpoint_that_it_replaces_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "KEPT_OPEN", 1)
    values = several_files(tmp_path, 6)
    holder = Holder()
    flow.checkpoint.load(tmp_path, a=holder)
    flow.checkpoint.save(tmp_path, a={"b": 1}, wait=True)
    for name, value in values.items():
        assert flow.materialize(holder.state[name]).equal(value)
    holder.state = {}
    gc.collect()
    flow.checkpoint.save(tmp_path, a={"b": torch.ones(2)}, wait=True)
    assert len([*tmp_path.glob("*.safetensors")]) == 1
    assert read_checkpoint(tmp_path)[0]["a"]["b"].tolist() == [1, 1]


def test_a_removed_file_that_is_needed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEPT_OPEN", 1)
    several_files(tmp_path / "run", 3)
    holder = Holder()
    flow.checkpoint.load(tmp_path / "run", a=holder)
    shutil.rmtree(tmp_path / "run")
    flow.materialize(holder.state["2"])  # the one that is open
    with pytest.raises(StateError, match=r"rank-00002\.safetensors is missing.*has to stay until all that is needed"):
        flow.materialize(holder.state["1"])


def test_a_step_may_be_asked_for_in_the_folder_that_is_its_checkpoint(tmp_path: Path) -> None:
    model, _ = trained()
    flow.checkpoint.save(tmp_path / "run", model=model, step=7, wait=True)
    folder = tmp_path / "run" / "step-00000007"
    assert flow.checkpoint.load(folder, model=model, step=7).step == 7
    with pytest.raises(StateError, match=r"is the checkpoint of step 7; step 8 was asked for: load it without step="):
        flow.checkpoint.load(folder, model=model, step=8)
    flow.checkpoint.save(tmp_path / "plain", model=model, wait=True)
    with pytest.raises(StateError, match=r"was saved without a step; step 8 was asked for"):
        flow.checkpoint.load(tmp_path / "plain", model=model, step=8)


class FarRun:
    """A run in which this process is rank 1, and rank 0 takes its time to say how a save has ended."""

    rank = 1

    def __init__(self, said: str) -> None:
        self.asked, self.may_answer = 0, threading.Event()
        self._said = said

    def pull(self, rank: int, request: object) -> bytes:
        self.asked += 1
        self.may_answer.wait(100)
        return self._said.encode()


@pytest.mark.parametrize("said", ["", "the disk is full"])
def test_a_limited_wait_on_another_rank_ends_though_rank_0_does_not_answer(said: str, tmp_path: Path) -> None:
    run: Any = FarRun(said)
    order: Any = type("Order", (), {"folder": LocalFolder(tmp_path), "number": 0})
    task = SaveTask(run, order, (), None, None, lambda folder: None)
    task.ended.set()  # this rank's part is done
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"was not written in 0\.01 s"):
            task.wait(0.01)
    run.may_answer.set()
    if said:
        with pytest.raises(StateError, match=said):
            task.wait(100)
    else:
        task.wait(100)
    assert run.asked == 1
