"""What was saved under one plan goes on under every other, on other numbers of devices, as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load

import warm

SCRIPT = Path(__file__).parent.parent / "scripts" / "checkpointed.py"
DEVICES = {"one": 1, "tensor": 2, "zero": 4, "pipeline": 4, "hybrid": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder that a layout's run has saved, and what the run found when it went on."""

    @cache
    def save(layout: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(layout)
        return folder / "runs", run(layout, folder / "out.json", "save", folder / "runs")[0]

    return save


def run(layout: str, out: Path, *arguments: object) -> list[dict[str, Any]]:
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", str(SCRIPT), "--devices", str(DEVICES[layout]), "--",
         layout, str(out), *map(str, arguments)],
        capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def same(found: dict[str, Any], expected: dict[str, Any], exactly: bool) -> None:
    assert found["rate"] == expected["rate"]
    limit = 0 if exactly else 1e-9
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=limit, atol=limit)
    torch.testing.assert_close(tensors(found), tensors(expected), rtol=limit, atol=limit)


def tensors(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in found["state"].items()}


@pytest.mark.parametrize(
    "layout", [*(pytest.param(x, marks=pytest.mark.slow) for x in ("one", "tensor", "zero")), "pipeline"]
)
def test_a_run_goes_on_from_checkpoints_of_other_plans(layout: str, saved: Any, tmp_path: Path) -> None:
    """The first one is loaded before the first call of the job, the other one after it."""
    sources = {"one": ["hybrid", "one"], "tensor": ["hybrid", "zero"], "zero": ["hybrid", "one"],
               "pipeline": ["hybrid", "one"]}[layout]  # fmt: skip
    folders, expected = zip(*map(saved, sources), strict=True)
    found = run(layout, tmp_path / "out.json", "load", *folders)
    for one, before, source in zip(found, expected, sources, strict=True):
        same(one, before, exactly=source == layout)


def test_a_run_goes_on_bit_for_bit_on_the_plan_that_saved(saved: Any, tmp_path: Path) -> None:
    folder, expected = saved("hybrid")
    (found,) = run("hybrid", tmp_path / "out.json", "load", folder)
    same(found, expected, exactly=True)


def test_every_element_is_written_once_and_about_as_much_by_every_rank(saved: Any) -> None:
    folder, _ = saved("hybrid")
    (checkpoint,) = folder.glob("step-*")
    manifest = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]
    covered = {}
    for name, tensor in manifest["tensors"].items():
        marks = torch.zeros(tensor["shape"], dtype=torch.int64)
        for _, _, offsets, shape in tensor["pieces"]:
            marks[tuple(slice(lo, lo + n) for lo, n in zip(offsets, shape, strict=True))] += 1
        covered[name] = bool((marks == 1).all())
    assert all(covered.values())
    parameters = sum(torch.Size(t["shape"]).numel() for n, t in manifest["tensors"].items() if n.startswith("model."))
    sizes = [path.stat().st_size for path in checkpoint.glob("*.safetensors")]
    assert len(sizes) == 4
    assert sum(sizes) < 3 * 8 * parameters + 4 * 6000  # parameters and both moments, once, and headers
    assert max(sizes) < 2 * min(sizes)


def test_torch_and_the_safetensors_library_read_the_folder(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved("hybrid")
    (checkpoint,) = folder.glob("step-*")
    manifest = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["tensors"]
    wanted = {name: torch.empty(one["shape"], dtype=getattr(torch, one["dtype"])) for name, one in manifest.items()}
    dcp_load(wanted, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 -- the object is no mapping
                piece = file.get_tensor(name)
                cut = zip(offsets[name]["saved_offsets"], piece.shape, strict=True)
                assert wanted[name][tuple(slice(lo, lo + n) for lo, n in cut)].equal(piece), name
