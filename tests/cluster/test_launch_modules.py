"""Modules of a package, run by name as ``python -m`` runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from actorflow.cli import main
from actorflow.rendezvous import start
from actorflow.support.module_files import is_installed, module_file
from actorflow_compiler.core.errors import ClusterError
from cluster.ranks import LIMIT

TOLD = """
import json, sys, pickle
import actorflow as flow
from .beside import NAME
from pathlib import Path

class Kept: pass

def of_main():
    return type(pickle.loads(pickle.dumps(Kept()))) is Kept

if "--ask" in sys.argv:
    flow.config.cpu_device_num(2)
rank = flow.env.get_rank()
told = [NAME, __name__, __package__, __spec__.name, sys.argv[1:], flow.env.get_world_size(), of_main()]
Path(sys.argv[1]).with_name(f"told{rank}").write_text(json.dumps(told))
if "--fail" in sys.argv:
    raise ValueError(NAME)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``practice.train``, which is the working directory."""
    folder = tmp_path / "practice"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "train.py").write_text(TOLD)
    (folder / "__main__.py").write_text("from .beside import NAME\nprint('all of', NAME)\n")
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path)
    return folder


def python(*command: str) -> subprocess.CompletedProcess[str]:
    """``python …`` in the working directory, with its output, errors included."""
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


@pytest.mark.parametrize("fork", ["--fork", "--no-fork"])
def test_a_module_runs_on_each_rank_as_python_runs_it(package: Path, fork: str) -> None:
    out = str(package.parent / "out")
    ended = python("-m", "actorflow", "run", "--devices", "2", fork, "-m", "practice.train", "--", out, "--fail")
    assert ended.returncode == 1, ended.stdout
    assert "raised ValueError: beside (train.py:" in ended.stdout
    assert "runpy" not in ended.stdout
    told = [json.loads((package.parent / f"told{rank}").read_text()) for rank in range(2)]
    assert told == [["beside", "__main__", "practice", "practice.train", [out, "--fail"], 2, True]] * 2


def test_a_package_runs_what_it_has_as_its_main_module(package: Path) -> None:
    ended = python("-m", "actorflow", "run", "--devices", "1", "-m", package.name)
    assert (ended.returncode, "all of beside" in ended.stdout) == (0, True), ended.stdout


def test_a_module_that_asks_for_devices_is_run_anew_by_its_name(package: Path) -> None:
    out = str(package.parent / "out")
    ended = python("-m", "practice.train", out, "--ask")
    assert ended.returncode == 0, ended.stdout
    assert "practice.train asks for 2" in ended.stdout
    told = json.loads((package.parent / "told1").read_text())
    assert told == ["beside", "__main__", "practice", "practice.train", [out, "--ask"], 2, True]


def test_a_plan_is_made_of_a_modules_step(package: Path) -> None:
    (package / "step.py").write_text(
        "import torch, actorflow as flow\nfrom .beside import NAME\nmodel = torch.nn.Linear(4, 4)\n"
        "sgd = torch.optim.SGD(model.parameters(), 0.1)\n@flow.global_function\ndef step(x):\n"
        "    loss = model(x).sum()\n    loss.backward()\n    sgd.step()\n    return loss\nstep(torch.ones(4, 4))\n"
    )
    ended = python("-m", "actorflow", "plan", "-m", "practice.step", "--devices", "2")
    assert (ended.returncode, "plan step: 2 ranks" in ended.stdout) == (0, True), ended.stdout


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["-m", "practice.trian"], "there is no module 'practice.trian' in practice"),
        (["-m", "recipe.train"], "there is no module 'recipe' in the working directory or on sys.path"),
        (["-m", "practice..train"], "there is no module 'practice.' in practice"),
        (["-m", "practice.train.deeper"], "practice.train is a module, and no package"),
        (["-m", "alone"], "alone is a package without a module __main__"),
        (["-m", "practice/train.py"], "is the name of a file; without -m it is run as one"),
        (["-m", "math"], "math has no source file"),
        (["practice.train"], "does not exist. There is a module of this name: actorflow run -m practice.train."),
        (["practice.trian"], "File 'practice.trian' does not exist."),
        (["practice"], "File 'practice' is a directory. There is a module of this name: actorflow run -m practice."),
        (["-m", "practice.train", "--on", "ray"], "-m is not there with --on ray"),
    ],
)
@pytest.mark.usefixtures("package")
def test_what_is_no_module_is_refused(command: list[str], told: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        main.main(["run", *command], prog_name="actorflow", standalone_mode=False)
    assert told in refused.value.format_message()
    assert "practice" not in sys.modules


@pytest.mark.usefixtures("package")
def test_only_modules_of_the_user_are_run_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def script_of(name: str, file: str, *command: str) -> tuple[list[str], list[str]]:
        process = SimpleNamespace(__file__=file, __spec__=SimpleNamespace(name=name))
        return start._script(process, [sys.executable, *command], ["changed", "argument"])  # type: ignore[arg-type]

    mine = module_file("practice.train")
    assert not is_installed(mine)
    assert script_of("practice.train", mine, "-m", "practice.train", "-m", "x") == (
        ["-m", "practice.train"],
        ["-m", "x"],
    )
    assert script_of("practice.train", mine, "-mpractice.train", "x") == (["-m", "practice.train"], ["argument"])
    with pytest.raises(ClusterError, match=r"python -m \(pytest\.__main__\), which is no module of yours"):
        script_of("pytest.__main__", module_file("pytest"), "-m", "pytest")
    with pytest.raises(ClusterError, match=r"python -m \(cProfile\)"):
        script_of("cProfile", module_file("cProfile"), "-m", "cProfile", "train.py")
    monkeypatch.chdir("/")
    with pytest.raises(ClusterError, match=r"no module of yours that is found in / or on sys\.path"):
        script_of("practice.train", mine, "-m", "practice.train")
