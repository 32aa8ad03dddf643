"""Plans are kept in the user's cache for all runs, and in files that the script names."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
import warm
from actorflow.control import cluster
from actorflow.persistence.saving import finish_saves
from actorflow.runtime.measured_costs import Costs
from actorflow.session import plan_store, process
from actorflow.session.plan_store import KEPT
from actorflow.support.user_folder import UserFolder
from actorflow_compiler.core.errors import CallError, PlanError
from actorflow_compiler.core.hardware import Link
from actorflow_compiler.plan.rank_location import RankLocation

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
Y = X[:4].clone()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder of plans in a cache of this test's own."""
    monkeypatch.setattr(process, "_session", process._session)
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACTORFLOW_CACHE_PLANS", "1")
    yield tmp_path / "cache" / "plans"
    finish_saves()


def as_a_new_process() -> None:
    finish_saves()
    process.finish()
    process._session = cluster._current = None
    KEPT.forget()
    flow.manual_seed(0)


def script(width: int = 16, **options: Any) -> Callable[[Tensor], Tensor]:
    """A job, made anew as a script that starts makes it."""
    as_a_new_process()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return flow.global_function(**options)(step)


def losses(job: Callable[[Tensor], Tensor]) -> list[float]:
    return [float(job(X)) for _ in range(3)]


def plans_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("plan-*") if plan_store.NAME.fullmatch(path.name))


# -- the cache -------------------------------------------------------------------------------------


def test_a_second_start_takes_the_plan_of_the_first_without_any_checkpoint(folder: Path) -> None:
    expected = losses(script())
    assert KEPT.taken == 0
    (path,) = plans_of(folder)
    assert losses(script()) == expected
    assert KEPT.taken == 1
    losses(script(width=8))
    assert KEPT.taken == 0
    assert len(plans_of(folder)) == 2
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_two_ranks_take_a_kept_plan_and_compute_the_same(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text(
        "import torch\nimport actorflow as flow\nfrom actorflow.session.plan_store import KEPT\n"
        "torch.manual_seed(0)\nmodel = torch.nn.Linear(8, 4)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "@flow.global_function\ndef step(x):\n    loss = model(x).square().mean()\n    loss.backward()\n"
        "    opt.step()\n    opt.zero_grad()\n    return loss\n"
        "found = [float(step(torch.ones(4, 8))) for _ in range(3)]\n"
        "if flow.env.get_rank() == 0:\n    print(found, KEPT.taken)\n"
    )
    command = [warm.python(), "-m", "actorflow", "run", str(source), "--devices", "2"]
    said = [
        subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout.split("] ")
        for _ in range(2)
    ]
    assert said[0][0] == said[1][0]
    assert (said[0][1].strip(), said[1][1].strip()) == ("0", "1")
    assert len(plans_of(folder)) == 1


@pytest.mark.parametrize(
    "off",
    [
        ("ACTORFLOW_CACHE", "0"), ("ACTORFLOW_CACHE_PLANS", "0"),
        pytest.param(("ACTORFLOW_CACHE", ""), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_cache_that_is_switched_off_keeps_nothing(
    off: tuple[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*off)
    monkeypatch.chdir(tmp_path)
    losses(script())
    losses(script())
    assert KEPT.taken == 0
    assert not folder.exists()
    assert not [*tmp_path.rglob("plan-*")]


def test_without_a_name_the_cache_is_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTORFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    losses(script())
    assert len(plans_of(tmp_path / "mine" / "actorflow" / "plans")) == 1


def test_a_cache_that_cannot_be_made_is_said_only_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "file"))
    assert len(losses(script())) == 3
    assert capfd.readouterr().err.count("plans are not kept for later runs") == 1
    monkeypatch.delenv("ACTORFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(losses(script())) == 3
    assert "kept" not in capfd.readouterr().err


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = losses(script())
    folder.chmod(0o777)
    assert losses(script()) == expected
    assert KEPT.taken == 0
    assert f"others may write to {folder}" in capfd.readouterr().err
    folder.chmod(0o700)
    losses(script())
    assert KEPT.taken == 1


def test_a_folder_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    losses(script())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    losses(script())
    assert KEPT.taken == 0
    assert "belongs to another user" in capfd.readouterr().err


def test_a_link_in_place_of_the_folder_or_of_a_plan_is_not_followed(folder: Path, tmp_path: Path) -> None:
    losses(script())
    (path,) = plans_of(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    losses(script())
    assert KEPT.taken == 0
    assert not path.is_symlink()  # a plan of this run has taken its place
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    losses(script())
    assert KEPT.taken == 0


def test_a_plan_that_others_may_write_to_is_ignored(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses(script())
    plans_of(folder)[0].chmod(0o666)
    losses(script())
    assert KEPT.taken == 0
    assert "others may write to" in capfd.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        pytest.param(lambda data: b"", marks=pytest.mark.slow),
        pytest.param(lambda data: data[:-9] + bytes(9), marks=pytest.mark.slow),
    ],
    ids=["cut", "empty", "other"],
)
def test_a_damaged_plan_is_ignored_and_replaced(
    damage: Callable[[bytes], bytes], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = losses(script())
    (path,) = plans_of(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert losses(script()) == expected
    assert KEPT.taken == 0
    assert ("is ignored" in capfd.readouterr().err) == bool(damage(whole))
    assert path.read_bytes() == whole


def test_the_cache_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_store, "CACHE_MOST", 2)
    for width in (4, 5, 4, 6):
        losses(script(width))
    assert len(plans_of(folder)) == 2
    losses(script(4))
    assert KEPT.taken == 1  # it was used after the one of width 5
    monkeypatch.setattr(plan_store, "CACHE_MOST_BYTES", 1)
    losses(script(7))
    assert len(plans_of(folder)) == 1


def test_many_writers_leave_whole_files_and_nothing_else(tmp_path: Path) -> None:
    folder = UserFolder(tmp_path / "mine")
    folder.make()
    contents = [bytes([number]) * 100_000 for number in range(8)]
    seen: list[bytes] = []

    def write(data: bytes) -> None:
        for _ in range(20):
            UserFolder(tmp_path / "mine").put("plan", data)
            seen.append(folder.get("plan"))

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) <= set(contents)
    assert folder.files() == {"plan": 100_000}


def test_what_a_dead_process_has_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = UserFolder(tmp_path)
    tmp_path.chmod(0o700)
    for name, age in (("old.part", 7200), ("new.part", 0), ("old", 7200)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    folder.make()
    assert folder.files().keys() == {"new.part", "old"}


# -- plans that the script names -------------------------------------------------------------------


def test_a_plan_that_was_saved_is_used_by_a_run_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORFLOW_CACHE", "0")
    job = script()
    expected = losses(job)
    flow.save_plan(job, tmp_path / "step.actorflow")
    again = script()
    flow.load_plan(tmp_path / "step.actorflow")
    assert losses(again) == expected
    assert KEPT.taken == 1
    again(Y)  # another batch, which is compiled
    assert KEPT.taken == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step.actorflow"]


def test_a_plan_that_does_not_fit_says_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = script()
    losses(job)
    flow.save_plan(job, tmp_path / "step.actorflow")
    forget = KEPT.forget

    def forget_and_load() -> None:
        forget()
        flow.load_plan(tmp_path / "step.actorflow")

    monkeypatch.setattr(KEPT, "forget", forget_and_load)
    for changed, said in (
        (lambda: script()(Y), r"the arguments \(x: float32\[8,16\]; now x: float32\[4,16\]\)"),
        (lambda: script(width=8)(X), "what the step does, or where"),
        (lambda: script(micro_batches=2)(X), "options of the job"),
        (lambda: script(compile="inductor")(X), "how the job is to run"),
    ):
        with pytest.raises(PlanError, match=said):
            changed()


def test_a_file_that_has_no_plan_is_an_error(tmp_path: Path) -> None:
    job = script()
    with pytest.raises(CallError, match="has no plan yet"):
        flow.save_plan(job, tmp_path / "step.actorflow")
    losses(job)
    with pytest.raises(PlanError, match="cannot be written to"):
        flow.save_plan(job, tmp_path / "no folder" / "step.actorflow")
    with pytest.raises(CallError, match="expected: a job"):
        flow.save_plan(losses, tmp_path / "step.actorflow")
    with pytest.raises(PlanError, match="cannot be read"):
        flow.load_plan(tmp_path / "step.actorflow")
    flow.save_plan(job, tmp_path / "step.actorflow")
    data = (tmp_path / "step.actorflow").read_bytes()
    for damaged, said in ((data[:-1], "it is damaged"), (b"\x80\x04\x95.", "no plan of this version")):
        (tmp_path / "step.actorflow").write_bytes(damaged)
        with pytest.raises(PlanError, match=said):
            flow.load_plan(tmp_path / "step.actorflow")


def test_a_plan_that_another_machine_has_measured_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = script()
    losses(job)
    flow.save_plan(job, tmp_path / "step.actorflow")
    monkeypatch.setenv("ACTORFLOW_CACHE", "0")
    monkeypatch.setattr("actorflow.session.plan_store.read", lambda place: Costs({"a": 1e-3}, 3e10, Link(1e9, 1e-5)))
    again = script()
    flow.load_plan(tmp_path / "step.actorflow")
    losses(again)
    assert KEPT.taken == 1


def test_a_plan_that_was_saved_where_ranks_lay_otherwise_is_used_and_one_that_was_kept_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = script()
    losses(job)
    flow.save_plan(job, tmp_path / "step.actorflow")
    KEPT.forget()
    monkeypatch.setattr("actorflow.session.compiling.numbered", lambda _: (RankLocation("another", "GPU 0", True),))
    losses(script())
    assert KEPT.taken == 0
    again = script()
    flow.load_plan(tmp_path / "step.actorflow")
    losses(again)
    assert KEPT.taken == 1
