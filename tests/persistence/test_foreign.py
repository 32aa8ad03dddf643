"""What torch, Hugging Face and torch's distributed checkpoints have written is loaded; what does not fit is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import save as dcp_save
from transformers import GPT2Config, GPT2LMHeadModel

import actorflow as flow
from actorflow import deferred
from actorflow.persistence import foreign
from actorflow_compiler.core.errors import StateError


def mlp(seed: int, width: int = 64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 4))


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, others = one.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(mine[name].equal(others[name]) for name in mine)


@pytest.mark.parametrize("form", ["state dictionary", "several by name", "safetensors", "folder", "distributed"])
@pytest.mark.parametrize("deferred", [False, True], ids=["real", "deferred"])
def test_a_model_is_loaded_from_what_others_have_written(form: str, deferred: bool, tmp_path: Path) -> None:
    source, path = mlp(0), tmp_path / "there"
    if form == "state dictionary":
        torch.save(source.state_dict(), path)
    elif form == "several by name":
        torch.save({"model": source.state_dict(), "epoch": 3}, path)
    elif form == "safetensors":
        path = tmp_path / "there.safetensors"
        save_file(source.state_dict(), path)
    elif form == "folder":
        path.mkdir()
        save_file({"0.weight": source[0].weight, "0.bias": source[0].bias}, path / "model-1.safetensors")
        save_file({"2.weight": source[2].weight, "2.bias": source[2].bias}, path / "model-2.safetensors")
    else:
        dcp_save({"model": source.state_dict()}, checkpoint_id=str(path), no_dist=True)
        with pytest.raises(StateError, match=r"is a pickle.*trusted=True"):
            flow.checkpoint.load(path, model=mlp(1))
    if deferred:
        with flow.deferred_init():
            model = mlp(1)
    else:
        model = mlp(1)
    flow.checkpoint.load(path, model=model, trusted=form == "distributed")
    assert same(flow.materialize(model), source)


def test_a_folder_of_hugging_face_without_its_tied_weight_is_loaded(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    torch.manual_seed(0)
    source = GPT2LMHeadModel(config)
    source.save_pretrained(tmp_path, max_shard_size="10KB")
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config)
    flow.checkpoint.load(tmp_path, model=model)
    assert same(model, source)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_another_model_is_refused_with_the_nearest_name_and_nothing_is_changed(tmp_path: Path) -> None:
    flow.checkpoint.save(tmp_path, model=mlp(0), wait=True)
    wider, before = mlp(1, 65), mlp(1, 65)
    with pytest.raises(StateError, match=r"model\.0\.weight has shape \[65, 32\].*\[64, 32\]; nothing was loaded"):
        flow.checkpoint.load(tmp_path, model=wider)
    assert same(wider, before)
    named = nn.Sequential()
    named.add_module("0", nn.Linear(32, 64))
    named.add_module("2_", nn.Linear(64, 4))
    with pytest.raises(StateError, match=r"model has 2_\.weight, which .* has not \(the nearest is 2\.weight\)"):
        flow.checkpoint.load(tmp_path, model=named)
    with pytest.raises(StateError, match=r"modle is not in the checkpoint \(the nearest is model\)"):
        flow.checkpoint.load(tmp_path, modle=mlp(0))
    with pytest.raises(StateError, match=r"epoch is a int; an object with load_state_dict\(\) was expected"):
        flow.checkpoint.load(tmp_path, model=mlp(0), epoch=0)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("nonsense")
    with pytest.raises(StateError, match=r"text\.pt' cannot be read as a file of torch\.save"):
        flow.checkpoint.load(tmp_path / "text.pt", model=mlp(0))
    (tmp_path / "text.safetensors").write_text("nonsense")
    with pytest.raises(StateError, match=r"text\.safetensors is no whole safetensors file"):
        flow.checkpoint.load(tmp_path / "text.safetensors", model=mlp(0))


def test_two_files_with_tensors_of_the_same_names_are_refused(tmp_path: Path) -> None:
    source = mlp(0)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    halves = {name: tensor.half() for name, tensor in source.state_dict().items()}
    save_file(halves, tmp_path / "model.fp16.safetensors")
    with pytest.raises(StateError, match=r"is in model\.fp16\.safetensors and in model\.safetensors"):
        flow.checkpoint.load(tmp_path, model=mlp(1))
    flow.checkpoint.load(tmp_path / "model.safetensors", model=(model := mlp(1)))
    assert same(model, source)


def test_files_of_others_stay_where_checkpoints_are_saved_and_removed(tmp_path: Path) -> None:
    for name in ("model.safetensors", "big.part", "step-00000001/pytorch_model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    flow.checkpoint.save(tmp_path, model=mlp(0), wait=True)
    list(flow.checkpoint.Keeper(tmp_path, model=mlp(0), every=1, keep=1).steps(4))
    for name in ("model.safetensors", "big.part", "step-00000001/pytorch_model.bin"):
        assert (tmp_path / name).read_text() == "precious", name
    assert not (tmp_path / "step-00000002").exists()


def test_of_a_distributed_checkpoint_no_more_than_a_part_is_made_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.arange(6000.0).view(60, 100)
    dcp_save({"state": {"w": source}}, checkpoint_id=str(tmp_path), no_dist=True)
    state = foreign.open_foreign(tmp_path, True).state["state"]["w"]  # type: ignore[union-attr]
    regions: list[int] = []
    region = foreign._DcpReader.region

    def counted(self: Any, name: str, offsets: Any, shape: Any) -> torch.Tensor:
        regions.append(torch.Size(shape).numel())
        return region(self, name, offsets, shape)

    monkeypatch.setattr(foreign._DcpReader, "region", counted)
    for rows, columns in (
        (np.arange(10, 20), np.arange(100)), (np.arange(60), np.arange(30, 50)), (np.array([3, 9, 4]), np.arange(2)),
    ):  # fmt: skip
        assert deferred.shard(state, [rows, columns]).equal(source[rows][:, columns])
    assert regions == [1000, 1200, 14]


def test_a_distributed_checkpoint_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    dcp_save({"model": mlp(0).state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    model, before = mlp(1), mlp(1)
    with pytest.raises(StateError, match=r"cannot be read: FileNotFoundError.*as torch\.distributed\.checkpoint has"):
        flow.checkpoint.load(tmp_path, model=model, trusted=True)
    assert same(model, before)


@pytest.mark.parametrize("form", ["torch", "distributed"])
def test_what_an_optimizer_keeps_comes_from_other_makers_too(form: str, tmp_path: Path) -> None:
    def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(0, 2)
    saved, path = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved"
    if form == "torch":
        torch.save(saved, path)
    else:
        dcp_save(saved, checkpoint_id=str(path), no_dist=True)
    other, again = trained(1, 0)
    flow.checkpoint.load(path, model=other, optimizer=again, trusted=True)
    if form == "torch":
        path.write_bytes(b"")  # what was loaded is no part of the file
    state, expected = flow.materialize(again).state_dict()["state"], optimizer.state_dict()["state"]
    assert state.keys() == expected.keys()
    for number, kept in expected.items():
        assert state[number]["step"] == kept["step"] == 2
        assert state[number]["exp_avg"].equal(kept["exp_avg"])


def test_checkpoints_of_steps_count_and_not_a_file_of_another_maker_beside_them(tmp_path: Path) -> None:
    source, model = mlp(0), mlp(1)
    flow.checkpoint.save(tmp_path, model=source, step=7, wait=True)
    save_file(mlp(2).state_dict(), tmp_path / "model.safetensors")
    assert flow.checkpoint.load(tmp_path, model=model).step == 7
    assert same(model, source)
