"""What ``actorflow checkpoint`` says of checkpoints, whole and damaged, and what others read of what it exports."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor, nn

import actorflow as flow
from actorflow.cli import main
from actorflow.persistence import storage
from actorflow.persistence.manifest import read_manifest
from actorflow.persistence.stored import StoredTensorValues
from test_runs import actorflow

FILE = "rank-00000.safetensors"
SHARDS = "model-{:05d}-of-{:05d}.safetensors"


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(  # not in the order of the model
        [{"params": [*model[2].parameters()], "lr": 0.2}, {"params": [*model[:2].parameters()]}], lr=0.1
    )
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def trained(steps: int = 3) -> dict[str, Any]:
    model, optimizer, scheduler = build()
    for _ in range(steps):
        model[2](model[:2](torch.randn(5, 6)).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 5, 10 and 100."""
    objects = trained()
    for step in (5, 10, 100):
        flow.checkpoint.save(tmp_path / "runs", **objects, step=step, epoch=step // 5, wait=True)
    return tmp_path / "runs"


def at(runs: Path, step: int) -> Path:
    return runs / f"step-{step:08d}"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def ran(*arguments: object) -> str:
    done = command(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: object, status: int = 1) -> str:
    done = command(*arguments)
    assert done.exit_code == status, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return " ".join(done.output.replace("│", " ").split())


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flipped(folder: Path) -> str:
    flip(folder / FILE)
    return f"{folder / FILE} is damaged: bytes 0 to "


def cut_short(folder: Path) -> str:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-7])
    return f"{folder / FILE} is damaged: it has {len(data) - 7} bytes, and {len(data)} were written"


def deleted(folder: Path) -> str:
    (folder / FILE).unlink()
    return f"{folder / FILE} is missing"


def broken_manifest(folder: Path) -> str:
    flip(folder / "manifest.json", 300)
    return f"{folder / 'manifest.json'} is damaged"


def no_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return f"{folder} has no manifest.json: its save did not end"


def later_version(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    return f"{path} is of version 99 of the format; up to 1 were expected"


DAMAGES = [flipped, cut_short, deleted, broken_manifest, no_manifest, later_version]
IN_MANIFEST = [broken_manifest, no_manifest, later_version]


# -- list ------------------------------------------------------------------------------------------


def test_a_list_has_a_line_for_each_step_the_oldest_first(runs: Path) -> None:
    head, *lines = ran("list", runs).splitlines()
    assert head.split() == ["step", "written", "ranks", "size", "whole"]
    assert [line.split()[0] for line in lines] == ["5", "10", "100"]
    for line in lines:
        assert "UTC      1  " in line
        assert "KiB  yes" in line


@pytest.mark.parametrize("damage", [cut_short, deleted, *IN_MANIFEST])
def test_a_list_says_why_a_checkpoint_is_not_whole(runs: Path, damage: Any) -> None:
    said = damage(at(runs, 10)).replace(f"{at(runs, 10)}/", "").replace(f"{runs}/", "").replace("is damaged: it ", "")
    _, first, second, last = ran("list", runs).splitlines()
    assert f"no: {said}" in second
    assert first.endswith("yes  ") or first.split()[-1] == "yes"
    assert last.split()[-1] == "yes"
    assert ("UTC      1  " in second) == (damage not in IN_MANIFEST)


def test_a_checkpoint_without_a_step_is_listed_alone(tmp_path: Path) -> None:
    flow.checkpoint.save(tmp_path / "one", model=nn.Linear(2, 2), wait=True)
    _, line = ran("list", tmp_path / "one").splitlines()
    assert line.split()[0] == "–"
    assert line.split()[-1] == "yes"


def test_the_folder_of_a_step_is_listed_alone(runs: Path) -> None:
    _, line = ran("list", at(runs, 10)).splitlines()
    assert line.split()[0] == "10"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no such folder, or nothing in it"),
        (lambda path: path.mkdir(), "there is no such folder, or nothing in it"),
        (lambda path: path.write_text("x"), "it is a file"),
        (lambda path: [path.mkdir(), (path / "notes.txt").touch()], "there are notes.txt; expected: a folder"),
        (lambda path: [path.mkdir(), (path / "model.safetensors").touch()], "`actorflow checkpoint show` read"),
    ],
    ids=["none", "empty", "file", "other files", "foreign"],
)
@pytest.mark.parametrize("name", ["list", "verify", "export"])
def test_where_there_is_no_checkpoint_commands_say_what_there_is(
    tmp_path: Path, name: str, make: Any, said: str
) -> None:
    make(tmp_path / "runs")
    more = [tmp_path / "out", "--format", "torch"] if name == "export" else []
    text = refused(name, tmp_path / "runs", *more)
    assert f"'{tmp_path / 'runs'}' holds no checkpoint of flow.checkpoint.save" in text
    assert said in text
    assert not (tmp_path / "out").exists()


def test_a_url_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    assert "a path or a URL that fsspec knows was expected" in refused("list", "nowhere://runs/a")


# -- show ------------------------------------------------------------------------------------------


def test_show_counts_what_the_newest_checkpoint_holds(runs: Path) -> None:
    lines = [line.split() for line in ran("show", runs).splitlines()]
    assert ["checkpoint", str(at(runs, 100))] in lines
    assert ["step", "100"] in lines
    assert ["versions", "actorflow", flow.__version__ + ",", "torch", torch.__version__] in lines
    tensors = trained()["model"].state_dict().values()
    elements, nbytes = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
    assert ["model", str(len(tensors)), str(elements), str(nbytes), "B"] in lines
    assert ["epoch", "20"] in lines
    assert any(line[:3] == ["scheduler", "{'step_size':", "2,"] for line in lines)
    assert not any(FILE in line for line in lines)


def test_show_takes_the_step_that_is_asked_for_or_the_newest_whole_one(runs: Path) -> None:
    assert "step           5\n" in ran("show", runs, "--step", 5)
    assert "step           10\n" in ran("show", at(runs, 10))
    said = no_manifest(at(runs, 100))
    text = ran("show", runs)
    assert "step           10\n" in text
    assert f"{said}; it is ignored" in text


def test_show_lists_tensors_in_whose_name_the_expression_is_found(runs: Path) -> None:
    text = ran("show", runs, "--tensors", r"^model\.[02]\.weight")
    lines = [line.split() for line in text.partition("tensor ")[2].splitlines()[1:]]
    assert lines == [
        ["model.0.weight", "float32", "[8,", "6]", "192", "B", FILE],
        ["model.2.weight", "bfloat16", "[4,", "8]", "64", "B", FILE],
    ]


def test_long_values_are_shortened_and_kinds_of_later_versions_shown_as_they_are(tmp_path: Path) -> None:
    flow.checkpoint.save(tmp_path, words=["word"] * 100, rate=float("nan"), wait=True)
    lines = ran("show", tmp_path).splitlines()
    assert any(line.startswith("words  ['word', 'word'") and line.rstrip().endswith("…") for line in lines)
    assert any(line.split() == ["rate", "nan"] for line in lines)
    manifest = read_manifest(storage.open_folder(tmp_path))
    later = replace(manifest, objects={**manifest.objects, "rate": {"$new": [1]}})
    (tmp_path / "manifest.json").write_bytes(later.to_json())
    assert "{'$new': [1]}" in ran("show", tmp_path)


@pytest.mark.parametrize("damage", [cut_short, deleted, *IN_MANIFEST])
def test_a_checkpoint_that_is_not_whole_is_not_shown_or_exported(runs: Path, tmp_path: Path, damage: Any) -> None:
    said = damage(at(runs, 10)).replace("is damaged: it has", "has")
    assert said in refused("show", runs, "--step", 10)
    assert said in refused("export", runs, tmp_path / "out", "--format", "torch", "--step", 10)
    assert not (tmp_path / "out").exists()


def test_where_no_checkpoint_is_whole_show_says_why(runs: Path) -> None:
    said = [deleted(at(runs, 5)), cut_short(at(runs, 10)).replace("is damaged: it ", ""), no_manifest(at(runs, 100))]
    text = refused("show", runs)
    assert all(f"{one}" in text for one in said)
    assert "holds no whole checkpoint" in text


@pytest.mark.parametrize("name", ["show", "verify", "export"])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(runs: Path, tmp_path: Path, name: str) -> None:
    more = [tmp_path / "out", "--format", "torch"] if name == "export" else []
    text = refused(name, runs, *more, "--step", 7)
    assert f"'{runs}' has no checkpoint of step 7; it has those of steps: 5, 10, 100" in text


def test_a_bad_expression_and_one_that_finds_nothing_are_refused(runs: Path) -> None:
    text = refused("show", runs, "--tensors", "model.(", status=2)
    assert "'model.(' is no regular expression: missing )" in text
    text = refused("show", runs, "--tensors", "decoder")
    assert "'decoder' is found in no name of the" in text
    assert "such as model.0.weight, " in text


def test_show_reads_what_others_have_written(tmp_path: Path) -> None:
    objects = trained()
    torch.save({name: one.state_dict() for name, one in objects.items()}, tmp_path / "all.pt")
    lines = [line.split() for line in ran("show", tmp_path / "all.pt", "--tensors", "model.0.b").splitlines()]
    assert ["model", str(len(objects["model"].state_dict()))] in [line[:2] for line in lines]
    assert ["model.0.bias", "float32", "[8]", "32", "B"] in lines
    torch.save(objects["model"].state_dict(), tmp_path / "model.pt")
    assert ["(all)", str(len(objects["model"].state_dict()))] in [
        line.split()[:2] for line in ran("show", tmp_path / "model.pt").splitlines()
    ]
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "cannot be read as a file of torch.save" in refused("show", tmp_path / "text.pt")
    (tmp_path / "bad.safetensors").write_bytes(b"\1" * 20)
    assert "is no whole safetensors file" in refused("show", tmp_path / "bad.safetensors")


# -- verify ----------------------------------------------------------------------------------------


def test_whole_checkpoints_are_verified_in_a_line_each(runs: Path) -> None:
    assert [line.partition(", 1 file, ")[0] for line in ran("verify", runs).splitlines()] == [
        f"{at(runs, step)}: whole" for step in (5, 10, 100)
    ]
    assert len(ran("verify", runs, "--step", 10).splitlines()) == 1
    assert len(ran("verify", at(runs, 10)).splitlines()) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_fails_where_one_checkpoint_is_damaged_and_names_the_file(runs: Path, damage: Any) -> None:
    said = damage(at(runs, 10))
    done = command("verify", runs)
    first, second, last = done.output.splitlines()
    assert done.exit_code == 1
    assert second.startswith(f"{at(runs, 10)}: NOT WHOLE: {said}")
    assert first.startswith(f"{at(runs, 5)}: whole, ")
    assert last.startswith(f"{at(runs, 100)}: whole, ")
    assert command("verify", runs, "--step", 10).exit_code == 1
    assert command("verify", runs, "--step", 100).exit_code == 0


@pytest.mark.parametrize("position", [0, 8, 1_500_000, -1])
def test_a_flipped_byte_is_found_wherever_it_is(tmp_path: Path, position: int) -> None:
    flow.checkpoint.save(tmp_path, weights=torch.randn(1_000_000), wait=True)
    assert "whole" in ran("verify", tmp_path)
    flip(tmp_path / FILE, position)
    first = 1_048_576 if position == 1_500_000 else 0 if position >= 0 else 3_145_728
    assert f"{tmp_path / FILE} is damaged: bytes {first} to" in command("verify", tmp_path).output


# -- export to safetensors -------------------------------------------------------------------------


def same(found: Any, wanted: Any) -> None:
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in wanted.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_an_exported_module_is_one_file_with_the_names_of_its_state_dict(runs: Path, tmp_path: Path) -> None:
    text = ran("export", runs, tmp_path / "out", "--format", "safetensors")
    assert f"model of {at(runs, 100)} written to {tmp_path / 'out'}" in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    same(found, trained()["model"].state_dict())
    build()[0].load_state_dict(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


def test_files_have_no_more_bytes_of_tensors_than_is_said(runs: Path, tmp_path: Path) -> None:
    ran("export", runs, tmp_path / "out", "--format", "safetensors", "--max-shard-size", "0.1KB")
    wanted = trained()["model"].state_dict()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [SHARDS.format(number, len(files)) for number in range(1, len(files) + 1)]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*files, "model.safetensors.index.json"}
    found: dict[str, Tensor] = {}
    for file in files:
        some = load_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == some.keys()
        assert len(some) == 1 or sum(tensor.nbytes for tensor in some.values()) <= 100
        found |= some
    same(found, wanted)
    model = build()[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    flow.checkpoint.load(tmp_path / "out", model=model)
    same(model.state_dict(), wanted)


def test_transformers_loads_an_exported_model(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    model = GPT2LMHeadModel(config)
    flow.checkpoint.save(tmp_path / "runs", model=model, step=1, wait=True)
    ran("export", tmp_path / "runs", tmp_path / "out", "--format", "safetensors", "--max-shard-size", "5KB")
    config.save_pretrained(tmp_path / "out")
    found, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    same(found.state_dict(), model.state_dict())


def test_one_tensor_is_in_memory_at_a_time(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[weakref.ref[Tensor]] = []
    whole = StoredTensorValues.whole

    def watched(values: StoredTensorValues) -> Tensor:
        assert not any(tensor() is not None for tensor in read)
        read.append(weakref.ref(found := whole(values)))
        return found

    monkeypatch.setattr(StoredTensorValues, "whole", watched)
    ran("export", runs, tmp_path / "out", "--format", "safetensors")
    assert len(read) == len(trained()["model"].state_dict())


def test_the_object_is_that_which_is_named_or_the_only_one_with_tensors(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 3), nn.Linear(3, 4)
    flow.checkpoint.save(tmp_path / "two", net=one, critic=other, epoch=1, wait=True)
    text = refused("export", tmp_path / "two", tmp_path / "out", "--format", "safetensors")
    assert f"'{tmp_path / 'two'}' has net, critic, each with tensors" in text
    assert "name it with --only" in text
    ran("export", tmp_path / "two", tmp_path / "out", "--format", "safetensors", "--only", "critic")
    same(load_file(tmp_path / "out" / "model.safetensors"), other.state_dict())
    text = refused("export", tmp_path / "two", tmp_path / "no", "--format", "safetensors", "--only", "critics")
    assert "has no object 'critics' (the nearest is critic); it has net, critic, epoch" in text
    text = refused("export", tmp_path / "two", tmp_path / "no", "--format", "safetensors", "--only", "epoch")
    assert "has no tensors; one of net, critic, or --format torch, was expected" in text
    flow.checkpoint.save(tmp_path / "single", net=one, epoch=1, wait=True)
    ran("export", tmp_path / "single", tmp_path / "alone", "--format", "safetensors")
    same(load_file(tmp_path / "alone" / "model.safetensors"), one.state_dict())
    flow.checkpoint.save(tmp_path / "values", epoch=1, wait=True)
    assert "use --format torch" in refused("export", tmp_path / "values", tmp_path / "no", "--format", "safetensors")
    assert not (tmp_path / "no").exists()


def test_every_dtype_and_shape_is_exported_as_it_is(tmp_path: Path) -> None:
    kinds = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64, torch.float8_e4m3fn]
    tensors = {str(kind): (torch.arange(6).view(2, 3) % 2).to(kind) for kind in kinds}
    tensors |= {"empty": torch.empty(0, 3), "number": torch.tensor(2.5), "turned": torch.randn(3, 4).t()}
    flow.checkpoint.save(tmp_path / "runs", tensors=tensors, wait=True)
    ran("export", tmp_path / "runs", tmp_path / "out", "--format", "safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].float().equal(tensor.float())


# -- export to torch -------------------------------------------------------------------------------


def test_an_exported_file_goes_on_in_plain_torch(runs: Path, tmp_path: Path) -> None:
    ran("export", runs, tmp_path / "all.pt", "--format", "torch")
    said = torch.load(tmp_path / "all.pt", weights_only=True)
    assert [*said] == ["model", "optimizer", "scheduler", "epoch", "step"]
    assert (said["epoch"], said["step"]) == (20, 100)
    wanted, found = trained(), dict(zip(("model", "optimizer", "scheduler"), build(), strict=True))
    for name, value in found.items():
        value.load_state_dict(said[name])
    same(found["model"].state_dict(), wanted["model"].state_dict())
    assert said["model"]._metadata == wanted["model"].state_dict()._metadata
    assert said["scheduler"] == wanted["scheduler"].state_dict()
    states = wanted["optimizer"].state_dict()
    assert said["optimizer"]["param_groups"] == states["param_groups"]
    assert said["optimizer"]["state"].keys() == states["state"].keys()
    for number, state in states["state"].items():
        same(said["optimizer"]["state"][number], state)


def test_the_state_of_one_object_is_exported_alone(runs: Path, tmp_path: Path) -> None:
    ran("export", runs, tmp_path / "model.pt", "--format", "torch", "--only", "model", "--step", 5)
    same(torch.load(tmp_path / "model.pt", weights_only=True), trained()["model"].state_dict())
    ran("export", runs, tmp_path / "epoch.pt", "--format", "torch", "--only", "epoch", "--step", 5)
    assert torch.load(tmp_path / "epoch.pt", weights_only=True) == 1
    text = refused("export", runs, tmp_path / "no.pt", "--format", "torch", "--only", "modle")
    assert "has no object 'modle' (the nearest is model); it has model, optimizer, scheduler, epoch" in text


def test_values_of_every_kind_are_read_with_weights_only(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    values: dict[str, Any] = {
        "counter": Counter(a=2), "pair": (1, [2.5, None]), "names": {"a", "b"}, "frozen": frozenset({3}),
        "array": np.arange(3.0), "number": np.float32(1.5), "kind": torch.float16, "device": torch.device("cpu"),
        "text": b"\0\xff", "complex": 1 + 2j, "numbered": {1: "one", (2, 3): torch.ones(2)}, "infinite": float("inf"),
        "generator": generator, "shape": torch.Size([2, 3]), "step": 77,
    }  # fmt: skip
    flow.checkpoint.save(tmp_path / "runs", values=values, step=3, wait=True)
    ran("export", tmp_path / "runs", tmp_path / "out", "--format", "torch")
    said = torch.load(tmp_path / "out", weights_only=True)
    assert said.pop("step") == 3
    (found,) = said.values()
    assert found.pop("array").equal(torch.arange(3.0, dtype=torch.float64))
    assert found.pop("generator").equal(generator.get_state())
    assert found["numbered"].pop((2, 3)).equal(torch.ones(2))
    left = {name: one for name, one in values.items() if name not in ("array", "generator")}
    assert found == {**left, "frozen": (3,), "numbered": {1: "one"}}
    assert type(found["counter"]) is Counter


def test_an_optimizer_without_a_module_keeps_its_numbers(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    flow.checkpoint.save(tmp_path / "runs", optimizer=optimizer, wait=True)
    ran("export", tmp_path / "runs", tmp_path / "out", "--format", "torch", "--only", "optimizer")
    said = torch.load(tmp_path / "out", weights_only=True)
    assert said["param_groups"][0]["params"] == [0, 1]
    same(said["state"][1], optimizer.state_dict()["state"][1])


def test_a_limit_of_files_is_no_option_of_a_single_file(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = refused("export", runs, out, "--format", "torch", "--max-shard-size", "1GB", status=2)
    assert "--max-shard-size is for --format safetensors" in text
    text = refused("export", runs, out, "--format", "safetensors", "--max-shard-size", "large", status=2)
    assert "'large' was found; a number of bytes or a text such as '5GB' or '512MiB' was expected" in text


# -- where exports go ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_what_is_there_is_replaced_only_with_force(runs: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    ran("export", runs, out, "--format", kind)
    file = out / "model.safetensors" if kind == "safetensors" else out
    before = file.read_bytes()
    assert f"'{out}' is there already" in refused("export", runs, out, "--format", kind, "--step", 5)
    assert file.read_bytes() == before
    file.write_bytes(b"old")
    ran("export", runs, out, "--format", kind, "--force")
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


def test_force_replaces_a_model_of_many_files_and_keeps_other_files(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran("export", runs, out, "--format", "safetensors", "--max-shard-size", "100")
    (out / "config.json").write_text("{}")
    ran("export", runs, out, "--format", "safetensors", "--force")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    ran("export", runs, out, "--format", "safetensors", "--max-shard-size", "100", "--force")
    assert {"config.json", "model.safetensors.index.json"} < {path.name for path in out.iterdir()}
    assert not (out / "model.safetensors").exists()


def test_places_that_cannot_be_written_are_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for kind in ("safetensors", "torch"):
        assert "nothing can be written to the folder '/proc'" in refused("export", runs, "/proc/out", "--format", kind)
        text = refused("export", runs, tmp_path / "file" / "deep" / "out", "--format", kind)
        assert f"{tmp_path / 'file'} is a file" in text
    text = refused("export", runs, tmp_path / "file", "--format", "safetensors", "--force")
    assert f"'{tmp_path / 'file'}' is a file; the name of a folder was expected" in text
    text = refused("export", runs, tmp_path / "folder", "--format", "torch", "--force")
    assert f"'{tmp_path / 'folder'}' is a folder; the name of a file was expected" in text
    text = refused("export", runs, at(runs, 5), "--format", "safetensors", "--force")
    assert "is a checkpoint itself" in text
    text = refused("export", runs, tmp_path / "model.safetensors", "--format", "safetensors")
    assert "the name of a folder was expected" in text


def test_missing_folders_are_made_and_an_empty_one_is_filled(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran("export", runs, tmp_path / "empty", "--format", "safetensors")
    ran("export", runs, tmp_path / "a" / "b" / "all.pt", "--format", "torch")
    assert (tmp_path / "empty" / "model.safetensors").exists()
    assert (tmp_path / "a" / "b" / "all.pt").exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_nothing_is_left_of_an_export_that_fails(
    runs: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped(at(runs, 10))
    text = refused("export", runs, tmp_path / "out", "--format", kind, "--step", 10)
    assert f"{at(runs, 10) / FILE} is damaged: bytes 0 to" in text

    def full(file: object, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage._LocalFile, "write", full)
    assert "No space left on device" in refused("export", runs, tmp_path / "out", "--format", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_paths_may_be_urls(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    model = nn.Linear(3, 2)
    for step in (1, 2):
        flow.checkpoint.save(f"{url}/runs", model=model, step=step, wait=True)
    assert len(ran("list", f"{url}/runs").splitlines()) == 3
    assert "whole" in ran("verify", f"{url}/runs", "--step", 1)
    assert "step           2\n" in ran("show", f"{url}/runs")
    out = f"{url}/out"
    ran("export", f"{url}/runs", out, "--format", "safetensors", "--max-shard-size", "10")
    assert "is there already" in refused("export", f"{url}/runs", out, "--format", "safetensors")
    ran("export", f"{url}/runs", out, "--format", "safetensors", "--force")
    assert [*storage.open_folder(out).files()] == ["model.safetensors"]
    other = nn.Linear(3, 2)
    flow.checkpoint.load(out, model=other)
    same(other.state_dict(), model.state_dict())
    ran("export", f"{url}/runs", f"{url}/all.pt", "--format", "torch")
    assert "is there already" in refused("export", f"{url}/runs", f"{url}/all.pt", "--format", "torch")
    (tmp_path / "all.pt").write_bytes(storage.open_folder(url).get("all.pt"))
    same(torch.load(tmp_path / "all.pt", weights_only=True)["model"], model.state_dict())


# -- of a run --------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
import actorflow as flow

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Linear(512, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
flow.zero(model, 3)

@flow.global_function(type="train")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for number in range(3):
    step(torch.ones(4, 8) * number)
flow.checkpoint.save(sys.argv[1], model=model, optimizer=optimizer, step=3, wait=True)
if flow.env.rank() == 0:
    torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[2])
"""


def test_pieces_of_two_ranks_become_whole_tensors(tmp_path: Path) -> None:
    script, runs = tmp_path / "train.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    done = actorflow("run", str(script), "--devices", "2", "--", str(runs), str(tmp_path / "plain.pt"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran("list", runs).splitlines()[1].split()[4] == "2"
    text = ran("show", runs, "--tensors", "model.0.weight")
    assert "rank-00000.safetensors, rank-00001.safetensors" in text
    assert ", 2 files, " in ran("verify", runs)
    ran("export", runs, tmp_path / "out", "--format", "safetensors")
    ran("export", runs, tmp_path / "all.pt", "--format", "torch")
    model, optimizer = torch.load(tmp_path / "plain.pt", weights_only=True)
    same(load_file(tmp_path / "out" / "model.safetensors"), model)
    said = torch.load(tmp_path / "all.pt", weights_only=True)
    same(said["model"], model)
    for number, state in optimizer["state"].items():
        same(said["optimizer"]["state"][number], state)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        flip(at(runs, 3) / name)
    text = refused("verify", runs)
    assert f"{at(runs, 3)}/rank-00000.safetensors is damaged" in text
    assert f"{at(runs, 3)}/rank-00001.safetensors is damaged" in text


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from actorflow.cli import main; "
        "shown = [CliRunner().invoke(main, ['checkpoint', *said, '--help']).output for said in ([], ['export'])]; "
        "print('--force' in shown[1], 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True False\n"
