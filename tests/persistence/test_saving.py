"""What is saved is what the calls before it have left, whatever comes after; what cannot be saved is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
import warm
from actorflow.control import cluster
from actorflow.deferred import DeferredTensor
from actorflow.persistence import folder_lock, saving
from actorflow.persistence.loading import read_checkpoint
from actorflow.persistence.state_tree import decode, encode
from actorflow.session import process
from actorflow_compiler.core.errors import StateError
from persistence.faulty_files import FaultyCalls, full_disk

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Training:
    """A model, its optimizer, and a step that is a job."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any

    def values(self) -> dict[str, Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = {f"{n} {key}": torch.as_tensor(v).clone() for n, s in state.items() for key, v in s.items()}
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()} | moments


def training(seed: int = 0, width: int = 16, dropout: float = 0.3) -> Training:
    torch.manual_seed(seed)
    drop = nn.Dropout(dropout)
    model = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), drop, nn.Linear(width, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, flow.global_function(step))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_what_is_saved_is_what_the_last_call_left_while_later_calls_change_it(tmp_path: Path) -> None:
    it, again = training(width=512, dropout=0), training(width=512, dropout=0)
    for number in range(5):
        it.step(X)  # not awaited, as those before: the snapshot waits for them
        saving = flow.checkpoint.save(tmp_path / str(number), model=it.model, optimizer=it.optimizer)
        it.step(X)
        it.step(X)
        saving.wait()
    again.step(X)
    for number in range(5):
        other = training(seed=5, width=512)
        flow.checkpoint.load(tmp_path / str(number), model=other.model, optimizer=other.optimizer)
        flow.materialize(other.optimizer)
        assert equal(other.values(), again.values()), number
        for _ in range(3):
            again.step(X)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("change", ["parameter", "load_state_dict", "optimizer", "data", "delete"])
def test_changes_that_the_script_makes_right_after_a_save_are_not_in_it(change: str, tmp_path: Path) -> None:
    it = training()
    it.step(X)
    expected = it.values()
    saving = flow.checkpoint.save(tmp_path, model=it.model, optimizer=it.optimizer)
    if change == "parameter":
        with torch.no_grad():
            it.model[0].weight.zero_()
    elif change == "load_state_dict":
        it.model.load_state_dict({name: torch.ones_like(t) for name, t in it.model.state_dict().items()})
    elif change == "optimizer":
        it.optimizer.state.clear()
        it.step(X)
    elif change == "data":
        it.model[0].weight.data = torch.ones(16, 16)
        it.step(X)
    else:
        del it
    saving.wait()
    other = training(seed=5)
    flow.checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
    flow.materialize(other.optimizer)
    assert equal(other.values(), expected)


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
def test_a_run_goes_on_bit_for_bit_with_its_random_numbers(called: bool, tmp_path: Path) -> None:
    it = training()
    it.step(X)
    torch.rand(3), np.random.rand(2)
    flow.checkpoint.save(tmp_path, model=it.model, optimizer=it.optimizer, epoch=2)
    expected = [it.step(X).item() for _ in range(3)], torch.rand(4).tolist(), np.random.rand(2).tolist()
    flow.manual_seed(77)
    other = training(seed=9)
    if called:
        other.step(X)
    loaded = flow.checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
    assert dict(loaded) == {"epoch": 2}
    assert ([other.step(X).item() for _ in range(3)], torch.rand(4).tolist(), np.random.rand(2).tolist()) == expected


def test_what_an_optimizer_keeps_stays_in_the_file_until_it_is_needed(tmp_path: Path) -> None:
    it = training(width=128)
    it.step(X)
    flow.checkpoint.save(tmp_path, model=it.model, optimizer=it.optimizer, wait=True)
    other = training(width=128)
    flow.checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
    moments = [state["exp_avg"] for state in other.optimizer.state.values()]
    assert any(isinstance(moment, DeferredTensor) for moment in moments)


def test_a_folder_may_be_removed_when_it_is_loaded(tmp_path: Path) -> None:
    it = training(width=128)
    it.step(X)
    flow.checkpoint.save(tmp_path / "run", model=it.model, optimizer=it.optimizer, wait=True)
    expected = it.step(X).item(), it.step(X).item()
    other = training(seed=2, width=128)
    flow.checkpoint.load(tmp_path / "run", model=other.model, optimizer=other.optimizer)
    shutil.rmtree(tmp_path / "run")
    assert (other.step(X).item(), other.step(X).item()) == expected


def test_parameters_in_another_order_find_what_the_optimizer_keeps_of_them(tmp_path: Path) -> None:
    it = training()
    it.step(X)
    flow.checkpoint.save(tmp_path, model=it.model, optimizer=it.optimizer)
    expected = [it.step(X).item() for _ in range(3)]
    other = training(seed=3)
    other.optimizer.param_groups[0]["params"].reverse()
    flow.checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
    assert [other.step(X).item() for _ in range(3)] == expected


def test_trees_come_back_as_they_were() -> None:
    state = OrderedDict(a=(1, [2.5, None, {3: "x"}]), b=Counter({5: 2}))
    state._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    tree = {
        "state": state, "nan": [math.nan, math.inf, -math.inf], "bytes": b"\x00\xff", "set": ({1, 2}, frozenset("a")),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "complex": 1 + 2j, "$odd": {"$tensor": 1},
        "number": np.float32(0.1), "array": np.arange(6.0).reshape(2, 3), "tensor": torch.ones(2), "big": 10**30,
        "size": torch.Size([2, 3]), "true": True, "a.b": {"c": torch.zeros(1)}, "a": {"b.c": torch.ones(1)},
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    said = json.loads(json.dumps(encode(tree, "x", tensors)))
    found = decode(said, tensors.__getitem__)
    assert len(tensors) == 4  # names that look alike are told apart
    assert found["a.b"]["c"].item() == 0
    assert found["a"]["b.c"].item() == 1
    for name in ("bytes", "set", "dtype", "device", "complex", "$odd", "number", "big", "size", "true"):
        assert found[name] == tree[name], name
        assert type(found[name]) in (type(tree[name]), tuple), name
    assert found["state"] == state
    assert found["state"]._metadata == state._metadata
    assert type(found["state"]["b"]) is Counter
    assert math.isnan(found["nan"][0])
    assert found["nan"][1:] == [math.inf, -math.inf]
    assert found["array"].tolist() == tree["array"].tolist()


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {}


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: 0, r"thing is a builtins\.function, which cannot be kept"),
        ({"a": [Path()]}, r"thing\.a\.0 is a pathlib\.\w+, which cannot be kept"),
        (torch.utils.data.DataLoader([1]), r"thing is a torch\.utils\.data\.dataloader\.DataLoader"),
        (LOOP, r"thing\.0 contains itself"),
        (torch.ones(2, dtype=torch.complex128), r"thing is torch\.complex128, which the safetensors format does not"),
        (torch.eye(2).to_sparse(), r"thing is a torch\.sparse_coo tensor"),
        (torch.empty(2, device="meta"), "thing is a torch.strided tensor on meta"),
        (Odd(), r"thing is a Odd, which has state_dict\(\) and no load_state_dict\(\)"),
    ],
    ids=["lambda", "path", "loader", "loop", "complex", "sparse", "meta", "half an object"],
)
def test_what_has_no_form_in_a_checkpoint_is_refused_with_its_place(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=said):
        flow.checkpoint.save(tmp_path / "new", thing=value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [-1, "5", True, 1.0])
def test_a_step_that_is_no_number_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=rf"step={step!r} was found"):
        flow.checkpoint.save(tmp_path, step=step, a=1)


@pytest.mark.parametrize("path", ["nowhere://x", 5, ""])
def test_a_folder_of_an_unknown_kind_is_refused(path: Any) -> None:
    with pytest.raises(StateError, match="path or a URL"):
        flow.checkpoint.save(path, a=1)


def test_a_checkpoint_may_lie_anywhere_that_fsspec_knows() -> None:
    it = training()
    it.step(X)
    for _ in range(2):  # the second one replaces the first
        flow.checkpoint.save("memory://somewhere/run", model=it.model, step=3, wait=True)
    other = training(seed=8)
    assert flow.checkpoint.load("memory://somewhere/run", model=other.model).step == 3
    for name, value in it.model.state_dict().items():
        assert other.model.state_dict()[name].equal(value), name


def test_a_folder_that_another_process_writes_to_is_refused_and_says_who(tmp_path: Path) -> None:
    flow.checkpoint.save(tmp_path, a=1, wait=True)
    script = tmp_path / "script.py"
    script.write_text("import sys, actorflow as flow\nflow.checkpoint.save(sys.argv[1], a=2, wait=True)")
    command = [warm.python(), str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode
    assert f"another run writes checkpoints to {str(tmp_path)!r}: process {os.getpid()} of" in done.stderr
    assert read_checkpoint(tmp_path)[0]["a"] == 1


def test_a_store_that_another_run_has_taken_over_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "memory://taken/run"
    flow.checkpoint.save(folder, a=1, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(folder_lock, "_held", {})
        flow.checkpoint.save(folder, a=2, wait=True)  # another run
    with pytest.raises(StateError, match=r"another run has begun to write checkpoints to 'memory://taken/run'"):
        flow.checkpoint.save(folder, a=3, wait=True)
    assert read_checkpoint(folder)[0]["a"] == 2


def test_a_save_that_failed_is_told_by_the_next_one(tmp_path: Path) -> None:
    flow.checkpoint.save(tmp_path, a=1, wait=True)
    with FaultyCalls(1, full_disk).in_force():
        saving = flow.checkpoint.save(tmp_path, a=2)
        saving._task.ended.wait()  # type: ignore[union-attr]
    assert repr(saving) == f"<checkpoint {str(tmp_path)!r}, failed>"
    with pytest.raises(StateError, match="No space left on device"):
        flow.checkpoint.save(tmp_path, a=3)
    flow.checkpoint.save(tmp_path, a=4, wait=True)
    assert read_checkpoint(tmp_path)[0]["a"] == 4


def test_requests_of_other_ranks_are_answered_before_any_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, agree, ready = saving._Saver(), saving._agree, []

    def agreeing(run: Any, *rest: Any) -> Any:  # once all have agreed, another rank may be ahead of this one
        ready.append(saver._run is run)
        return agree(run, *rest)

    monkeypatch.setattr(saving, "_saver", saver)
    monkeypatch.setattr(saving, "_agree", agreeing)
    flow.checkpoint.save(tmp_path, a=1, wait=True)
    assert ready == [True]


def test_handles_of_many_saves_can_be_awaited(tmp_path: Path) -> None:
    handles = [flow.checkpoint.save(tmp_path, step=step, a=step) for step in range(5)]
    for handle in handles:
        handle.wait(60)
    first = min(saving._saver._outcomes)
    assert saving._saver._outcome(cluster.current(), first) == b""  # for another rank that asks late


def test_a_call_that_is_given_up_gives_up_the_save_behind_it(tmp_path: Path) -> None:
    table = nn.Embedding(4, 2)

    @flow.global_function(type="predict")
    def look(rows: Tensor) -> Tensor:
        return table(rows).sum()

    look(torch.tensor([1])).item()
    worker, begun = process.current().worker, threading.Event()
    assert worker is not None
    worker._compute._inbox.put(begun.wait, 100)  # the call is not over when the save begins
    lost = look(torch.tensor([9]))
    handle = flow.checkpoint.save(tmp_path, model=table)
    begun.set()
    with pytest.raises(StateError, match=r"was not written: rank 0: .*index out of range"):
        handle.wait()
    with pytest.raises(flow.ActorError):
        lost.item()
    flow.checkpoint.save(tmp_path, model=table, wait=True)


def test_a_global_tensor_is_refused(tmp_path: Path) -> None:
    whole = flow.ones(4, placement=flow.placement("cpu", [0]), sbp=flow.sbp.split(0))
    with pytest.raises(StateError, match=r"value\.0 is a global tensor, which a checkpoint cannot hold"):
        flow.checkpoint.save(tmp_path, value=[whole])


def test_a_relative_folder_is_the_one_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handle = flow.checkpoint.save("runs", a=torch.zeros(1000, 1000))
    monkeypatch.chdir("/")
    handle.wait()
    assert (tmp_path / "runs" / "manifest.json").exists()


def test_a_module_and_its_optimizer_are_loaded_without_the_others_that_were_saved(tmp_path: Path) -> None:
    it, other = training(), training(seed=4)
    it.step(X)
    flow.checkpoint.save(tmp_path, model=it.model, ema=nn.Linear(2, 2), optimizer=it.optimizer)
    expected = it.step(X).item()
    flow.checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
    assert other.step(X).item() == expected


@pytest.mark.parametrize("options", [{"random": np.random.default_rng()}, {"wait": "no"}], ids=["random", "wait"])
def test_a_value_with_the_name_of_an_option_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StateError, match="True or False was expected: a value needs another name"):
        flow.checkpoint.save(tmp_path, a=1, **options)


def test_a_job_s_step_neither_saves_nor_loads(tmp_path: Path) -> None:
    keeper = flow.checkpoint.Keeper(tmp_path, a=1, every=1)
    for what in (
        lambda: flow.checkpoint.save(tmp_path, a=1),
        lambda: flow.checkpoint.load(tmp_path, model=nn.Linear(1, 1)),
        lambda: keeper.step(0),
    ):

        @flow.global_function
        def step(x: Tensor, what: Any = what) -> Tensor:
            what()
            return x

        with pytest.raises(flow.ActorflowError, match="called in a job's step"):
            step(X)
