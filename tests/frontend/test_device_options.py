"""``--device-type`` and ``--oversubscribe``: from the command line, or a variable, to the ranks and their plans."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import warm
from actorflow.cli import main
from actorflow.launch import attempt as launching
from actorflow.launch import launcher
from actorflow.rendezvous import options
from actorflow.rendezvous.elastic import torch_settings
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError

DEVICE_TYPE, OVERSUBSCRIBE, NCCL_TIMEOUT, LOST_AFTER, FAN_OUT = (
    getattr(options, name).variable
    for name in ("DEVICE_TYPE", "OVERSUBSCRIBE", "NCCL_TIMEOUT", "LOST_AFTER", "FAN_OUT")
)
SCRIPT = """
import torch
import torch.nn.functional as F
import actorflow as flow

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
PLACED

@flow.global_function(micro_batches=4)
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

step(torch.randn(16, 64), torch.zeros(16, dtype=torch.int64))
"""
PLACED = 'flow.place(model, {"0": flow.placement("cpu", [0])})'
SCRIPT = SCRIPT.replace("PLACED", PLACED)
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What would be launched, instead of launching it."""
    found: list[Settings] = []

    def launch(run: Settings) -> int:
        found.append(run)
        return 0

    for name in (DEVICE_TYPE, OVERSUBSCRIBE, NCCL_TIMEOUT, LOST_AFTER, FAN_OUT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "launch", launch)
    return found


@pytest.mark.parametrize(
    ("arguments", "variables", "gpus", "expected"),
    [
        ((), {}, 0, (1, "", False)),
        ((), {}, 2, (2, "", False)),
        (("--device-type", "cpu"), {}, 2, (1, "cpu", False)),
        (("--device-type", "cuda"), {}, 2, (2, "cuda", False)),
        (("--device-type", "cuda", "--devices", "4", "--oversubscribe"), {}, 2, (4, "cuda", True)),
        ((), {DEVICE_TYPE: "cpu", OVERSUBSCRIBE: "1"}, 2, (1, "cpu", True)),
        (("--device-type", "cuda"), {DEVICE_TYPE: "cpu"}, 2, (2, "cuda", False)),
    ],
)
def test_the_options_reach_the_ranks(
    script: Path,
    launched: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    gpus: int,
    expected: tuple[int, str, bool],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    done = CliRunner().invoke(main, ["run", str(script), *arguments], env=variables)
    assert done.exit_code == 0, done.output
    (run,) = launched
    assert (run.devices, run.device_type, run.oversubscribe) == expected
    variables_of_ranks = launching._variables(launching._rank_settings(run, 1, "", "", 0))
    found = Settings.from_env(variables_of_ranks)
    assert (found.devices, found.device_type, found.oversubscribe) == expected


@pytest.mark.usefixtures("launched")
def test_cuda_on_a_machine_without_it_is_refused_before_anything_starts(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = CliRunner().invoke(main, ["run", str(script), "--device-type", "cuda"])
    assert done.exit_code == 2
    assert "this machine has no CUDA device that torch can use" in done.output
    assert (
        "'gpu' is not one of 'cpu', 'cuda'"
        in CliRunner().invoke(main, ["run", str(script), "--device-type", "gpu"]).output
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (DEVICE_TYPE, "gpu", "cpu or cuda"),
        (OVERSUBSCRIBE, "yes", "0 or 1"),
        (NCCL_TIMEOUT, "0", "a number of seconds"),
        (LOST_AFTER, "5", "a number of seconds above 5, up to 86400,"),
        (LOST_AFTER, "nan", "a number of seconds above 5, up to 86400,"),
        (LOST_AFTER, "90000", "a number of seconds above 5, up to 86400,"),
        (FAN_OUT, "0", "a number from 1 to 999999999"),
        (FAN_OUT, "many", "a number from 1 to 999999999"),
        (FAN_OUT, "99999999999", "a number from 1 to 999999999"),
    ],
)
def test_a_variable_that_is_no_setting_is_named_however_the_process_was_started(
    name: str, value: str, expected: str
) -> None:
    for environ in ({}, {"ACTORFLOW_MASTER": "127.0.0.1:1"}):
        with pytest.raises(ClusterError, match=f"{name}={value} was found in the environment; {expected} was expected"):
            Settings.from_env({**environ, name: value})
    with pytest.raises(ClusterError, match=name):
        torch_settings({**TORCH, name: value})


def test_a_variable_that_is_no_setting_is_named_before_a_rank_is_started(
    launched: list[Settings], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAN_OUT, "0")
    done = CliRunner().invoke(main, ["run", str(script)])
    expected = "Error: ACTORFLOW_FAN_OUT=0 was found in the environment; a number from 1 to 999999999 was expected."
    assert (done.exit_code, done.output.splitlines()[-1]) == (2, expected)
    assert launched == []


def test_a_script_that_nobody_launched_and_one_of_torchs_launcher_heed_the_variables() -> None:
    said = {DEVICE_TYPE: "cpu", OVERSUBSCRIBE: "1", NCCL_TIMEOUT: "7.5", LOST_AFTER: "20"}
    for found in (Settings.from_env(said), torch_settings({**TORCH, **said})):
        assert found is not None
        assert (found.device_type, found.oversubscribe, found.nccl_timeout) == ("cpu", True, 7.5)
        assert found.lost_after == 20.0


def plan(script: Path, *arguments: object) -> str:
    command = [warm.python(), "-m", "actorflow", "plan", script, "--devices", 2, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_for_gpus_is_made_without_any_and_names_what_goes_over_nccl(script: Path, tmp_path: Path) -> None:
    script.write_text(SCRIPT.replace(PLACED, ""))
    out = tmp_path / "plan.txt"
    said = plan(script, "--device-type", "cuda", "--forecast", "--replicas", 4, "--out", out)
    assert said.splitlines()[0] == "forecast on GPUs of one host"
    text = out.read_text()
    assert "cuda:[0,1]" in text
    assert "  calls     nccl: all_reduce" in text
    assert "among ranks 0, 1, nccl" in text


def test_what_goes_between_a_processor_and_a_gpu_goes_through_host_memory(script: Path) -> None:
    script.write_text(SCRIPT.replace(PLACED, PLACED.replace("})", ', "[12]": flow.placement("cuda", [1])})')))
    text = plan(script)
    assert "cpu:[0]" in text
    assert "cuda:[1]" in text
    assert "from rank 0 to rank 1, shared" in text
    assert "nccl" not in text
