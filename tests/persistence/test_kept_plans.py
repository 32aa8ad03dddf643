"""A restart takes the plan that is kept beside the checkpoints, where all that it was made from is as it was."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import actorflow as flow
import warm
from actorflow.cli import main
from actorflow.control import cluster
from actorflow.persistence.saving import finish_saves
from actorflow.persistence.storage import LocalFolder
from actorflow.runtime.measured_costs import Costs, Place
from actorflow.session import compiling, kept_capture, plan_store, process
from actorflow.session.plan_store import KEPT
from actorflow_compiler.core import digest
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import Link
from persistence.faulty_files import FaultyCalls, full_disk
from recipes import all as every_recipe  # noqa: F401 -- which registers them
from recipes.recipe import RECIPES, Job
from recipes.run import trained

SCRIPT = Path(__file__).parent.parent / "scripts" / "kept.py"
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


# -- runs of several ranks -------------------------------------------------------------------------


def run(script: Path, devices: int, *arguments: object) -> str:
    """What the run says on standard error."""
    command = [warm.python(), "-m", "actorflow", "run", str(script), "--devices", str(devices), "--"]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 or len(arguments) == 3, done.stderr
    return done.stderr


@pytest.fixture
def result(tmp_path: Path) -> Callable[[], tuple[dict[str, Any], int]]:
    """Reads what the last run has found, and how many of its plans were kept ones."""
    out = tmp_path / "found"
    return lambda: (json.loads(out.read_text()), json.loads(Path(f"{out}.plans").read_text()))


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_its_plan_as_one_that_was_not(
    tmp_path: Path, result: Callable[[], tuple[dict[str, Any], int]]
) -> None:
    run(SCRIPT, 2, tmp_path / "whole", tmp_path / "found")
    expected, taken = result()
    assert not taken
    run(SCRIPT, 2, tmp_path / "parts", tmp_path / "found", 10)
    run(SCRIPT, 2, tmp_path / "parts", tmp_path / "found")
    found, taken = result()
    assert taken == 1
    assert found["state"] == expected["state"]
    assert all(expected["losses"][number] == loss for number, loss in found["losses"].items())
    assert len(plans_in(tmp_path / "parts")) == 1


def test_a_script_or_a_run_that_has_changed_is_compiled_anew(
    tmp_path: Path, result: Callable[[], tuple[dict[str, Any], int]]
) -> None:
    script, folder, found = tmp_path / "script.py", tmp_path / "run", tmp_path / "found"
    text = SCRIPT.read_text()
    script.write_text(text)
    run(script, 2, folder, found, 5)
    script.write_text(text.replace("0.3", "0.4"))
    run(script, 2, folder, found, 10)
    assert len(plans_in(folder)) == 2
    script.write_text(text)
    run(script, 1, folder, found, 15)
    assert len(plans_in(folder)) == 3
    run(script, 2, folder, found)
    assert result()[1] == 1  # the first one's
    assert len(plans_in(folder)) == 3


# -- one process -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _this_process_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(process, "_session", process._session)
    yield
    finish_saves()


def as_a_new_process() -> None:
    """Forget what this process has of a run: plans, names, layouts of variables."""
    finish_saves()
    process.finish()
    process._session = cluster._current = None
    KEPT.forget()
    flow.manual_seed(0)


class Script:
    """A model, its optimizer and a step, made anew as a script that starts makes them."""

    def __init__(self, width: int = 16) -> None:
        as_a_new_process()
        drop = nn.Dropout(0.3)
        self.model = model = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), drop, nn.Linear(width, 4))
        self.optimizer = optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.step = flow.global_function(step)

    def keeper(self, folder: Path | str, **options: Any) -> flow.checkpoint.Keeper:
        return flow.checkpoint.Keeper(folder, model=self.model, optimizer=self.optimizer, **{"every": 1, **options})

    def train(self, folder: Path | str, steps: int = 2) -> list[float]:
        return [float(self.step(X)) for _ in self.keeper(folder).steps(steps)]


def plans_in(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "plans").glob("plan-*") if plan_store.NAME.fullmatch(path.name))


def test_a_process_that_goes_on_takes_the_plan_and_computes_the_same(tmp_path: Path) -> None:
    expected = Script().train(tmp_path / "whole", 6)
    assert Script().train(tmp_path / "parts", 3) == expected[:3]
    assert KEPT.taken == 0
    before = [path.read_bytes() for path in plans_in(tmp_path / "parts")]
    assert Script().train(tmp_path / "parts", 6) == expected[3:]
    assert KEPT.taken == 1
    assert [path.read_bytes() for path in plans_in(tmp_path / "parts")] == before
    assert plans_in(tmp_path / "whole")[0].read_bytes() == before[0]  # compiled twice, byte for byte the same


class CallCounter:
    """A function that counts its calls, and keeps what they return."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.returned: list[Any] = []
        self._function = function

    @property
    def calls(self) -> int:
        return len(self.returned)

    def __call__(self, *args: Any) -> Any:
        self.returned.append(self._function(*args))
        return self.returned[-1]


class AtOnce:
    """A timer whose time has come."""

    def __init__(self, seconds: float, do: Callable[[], object]) -> None:
        self.start = do

    def cancel(self) -> None:
        """There is nothing to cancel."""

    join = cancel


@pytest.mark.slow
def test_a_start_says_whose_plan_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("actorflow.support.progress.threading.Timer", AtOnce)
    Script().train(tmp_path)
    said = capfd.readouterr().err
    assert "actorflow: compiled step in" in said
    assert "kept" not in said
    Script().train(tmp_path, 4)
    said = capfd.readouterr().err
    assert f"actorflow: captured step, whose plan was kept in {tmp_path}/plans, in" in said
    assert "choosing layouts" not in said
    monkeypatch.setenv("ACTORFLOW_CACHE_CAPTURES", "1")
    Script().train(tmp_path, 5)
    capfd.readouterr()
    Script().train(tmp_path, 6)
    said = capfd.readouterr().err
    assert f"actorflow: took the plan of step, which is as it was, from {tmp_path}/plans, in" in said
    assert "choosing layouts" not in said
    assert "parallelism    one device" in said


def test_a_step_and_its_evaluation_are_both_kept(tmp_path: Path) -> None:
    def both() -> list[float]:
        script = Script()
        model = script.model

        def evaluate(x: Tensor) -> Tensor:
            was: Tensor = model(x).sum()
            return was

        predict, losses = flow.global_function(type="predict")(evaluate), []
        script.keeper(tmp_path)
        for _ in range(2):
            model.train()
            losses.append(float(script.step(X)))
            model.eval()
            losses.append(float(predict(X)))
        return losses

    first = both()
    assert both() == first
    assert KEPT.taken == 2


@pytest.mark.parametrize("url", [False, True], ids=["a folder", "a URL"])
def test_a_plan_that_was_compiled_before_the_folder_was_named_is_kept_there(url: bool, tmp_path: Path) -> None:
    folder = f"memory://{tmp_path}" if url else str(tmp_path / "run")
    script = Script()
    script.step(X)
    flow.checkpoint.save(folder, model=script.model, optimizer=script.optimizer, wait=True)
    expected = float(script.step(X))
    again = Script()
    flow.checkpoint.load(folder, model=again.model, optimizer=again.optimizer)
    assert float(again.step(X)) == expected
    assert KEPT.taken == 1
    if url:
        assert [name for name in fsspec.filesystem("memory").find(f"{tmp_path}/plans") if name.endswith(".actorflow")]


def test_nothing_is_written_where_checkpoints_are_only_loaded(tmp_path: Path) -> None:
    script = Script()
    flow.checkpoint.save(tmp_path, model=script.model, wait=True)
    again = Script()
    flow.checkpoint.load(tmp_path, model=again.model)
    again.step(X)
    assert not (tmp_path / "plans").exists()


def test_plans_of_a_step_that_is_loaded_are_those_of_all_steps(tmp_path: Path) -> None:
    Script().train(tmp_path)
    again = Script()
    flow.checkpoint.load(tmp_path / "step-00000001", model=again.model, optimizer=again.optimizer)
    again.step(X)
    assert KEPT.taken == 1
    assert not (tmp_path / "step-00000001" / "plans").exists()


def test_plans_for_devices_that_are_not_there_are_neither_kept_nor_taken(tmp_path: Path) -> None:
    script = Script()
    script.keeper(tmp_path)
    flow.plan(script.step, X, devices=2)
    assert not (tmp_path / "plans").exists()
    assert KEPT.taken == 0


FEW = ("an exponential average beside the step", "modules of torch.export, torch.fx and torch.compile")
ALONE = [name for name, made in RECIPES.items() if "one device" in made.layouts]


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ALONE]
)
def test_a_training_that_starts_again_compiles_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RECIPES[name]
    torch.set_default_dtype(torch.float32 if made.bfloat16 else torch.float64)
    found = []
    for _ in range(2):
        as_a_new_process()
        random.seed(0), np.random.seed(0)
        KEPT.keep_in(LocalFolder(tmp_path))
        found.append(trained(made, Job(flow.global_function)))
        monkeypatch.setattr(compiling, "_compiled", None)  # from the second start on, nobody may call it
    assert found[0].keys() == found[1].keys()
    assert [at for at, tensor in found[0].items() if not same(tensor, found[1][at])] == []
    assert KEPT.taken


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


# -- files that are not as they must be ------------------------------------------------------------


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def exchanged(path: Path) -> None:
    Script(width=8).train(path.parent.parent.parent / "other")
    path.write_bytes(plans_in(path.parent.parent.parent / "other")[0].read_bytes())


def signed(path: Path) -> None:
    """Another plan, under this one's name and with a checksum of its own."""
    key, _ = plan_store._opened(path.read_bytes())
    exchanged(path)
    path.write_bytes(plan_store._closed(key, plan_store._opened(path.read_bytes())[1]))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (flipped, "it is damaged"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it is damaged"),
    "cut off in its head": (lambda path: path.write_bytes(path.read_bytes()[:30]), "it is damaged"),
    "a text": (lambda path: path.write_text("hello"), "it is no plan of this version"),
    "a later version": (lambda path: path.write_bytes(b"actorflow plan 4\n" + bytes(99)), "no plan of this version"),
    "another plan": (exchanged, "it is another plan's"),
    "another plan that is whole": (signed, "is none of this step"),
    "a pickle": (lambda path: path.write_bytes(b"\x80\x04\x95."), "it is no plan of this version"),
}


@pytest.fixture(scope="module")
def trained_before(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a training, with its plan, and its losses."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((process, "_session"), (cluster, "_current")):
            patch.setattr(module, name, getattr(module, name))
        losses = Script().train(folder, 2)
        finish_saves()
    return folder, losses


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_plan_of_the_step_is_ignored_with_a_line_and_replaced(
    damage: str, trained_before: tuple[Path, list[float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, expected = trained_before
    folder = shutil.copytree(before, tmp_path / "run")
    (path,) = plans_in(folder)
    whole = path.read_bytes()
    change, said = DAMAGES[damage]
    change(path)
    capfd.readouterr()
    script = Script()
    script.keeper(folder)
    assert [float(script.step(X)) for _ in range(2)] == expected
    assert KEPT.taken == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "is ignored, and the plan compiled" in line]
    assert len(lines) == 1
    assert said in lines[0]
    assert path.read_bytes() == whole


def test_a_file_whose_plan_cannot_even_be_walked_through_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Script().train(tmp_path)
    monkeypatch.setattr("actorflow.session.plan_store.from_bytes", lambda data: [][1])
    Script().train(tmp_path, 4)
    assert "IndexError: list index out of range" in capfd.readouterr().err
    assert KEPT.taken == 0


def test_other_code_of_ours_takes_no_plan_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Script().train(tmp_path)
    code = plan_store.code_parts()
    other = {"the version of torch": ("another version", "another version")}
    monkeypatch.setattr(plan_store, "code_parts", lambda: {**code, **other})
    Script().train(tmp_path, 4)
    assert KEPT.taken == 0
    assert len(plans_in(tmp_path)) == 2


def test_all_code_that_makes_plans_is_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def noted(folder: Path) -> str:
        folders.append(folder)
        return ""

    monkeypatch.setattr(digest, "digest_of_files", noted)
    plan_store.code_parts.__wrapped__()
    names = {folder.name for folder in folders}
    ours = {"actorflow_compiler", "actorflow_scheduler", "actorflow_protos", "session", "runtime", "auto_parallel"}
    assert names == ours


def test_code_that_has_changed_since_the_process_started_keeps_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(digest, "STARTED", 0.0)
    monkeypatch.setattr(plan_store, "code_parts", plan_store.code_parts.__wrapped__)
    Script().train(tmp_path)
    assert "the plan of step is not kept" in (said := capfd.readouterr().err)
    assert said.count("which has changed since this process started") == 1
    assert plans_in(tmp_path) == []


# -- captures ----------------------------------------------------------------------------------------


@pytest.fixture
def captures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORFLOW_CACHE_CAPTURES", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("captures_are_kept")
def test_a_capture_of_another_torch_is_made_again_and_replaced(tmp_path: Path) -> None:
    skipped = []
    for steps in (2, 4, 6, 8, 10):
        if steps == 8:
            for path in (tmp_path / "plans").glob("step-*"):
                data = json.loads(plan_store._checked(path.read_bytes(), plan_store.STEP_HEAD))
                for one in data:
                    one["library"]["torch.nn.functional"] = "0" * len(one["library"]["torch.nn.functional"])
                path.write_bytes(plan_store._sealed(plan_store.STEP_HEAD, json.dumps(data).encode()))
        Script().train(tmp_path, steps)
        skipped.append(KEPT.skipped)
    assert skipped[2:] == [1, 0, 1]


def scheduled(calls: int, gamma: float = 0.5) -> tuple[list[float], int]:
    """The losses of a script that starts with a schedule and a check in its step, and how often it was not captured."""
    as_a_new_process()
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if loss > 1e9:
            raise ValueError("the loss has run away")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss

    return [float(step(X)) for _ in range(calls)], KEPT.skipped


@pytest.mark.slow
@pytest.mark.usefixtures("captures_are_kept")
def test_each_plan_of_a_step_with_a_schedule_is_kept_with_its_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [scheduled(6, gamma)[0] for gamma in (0.5, 0.25)]
    assert expected[0] != expected[1]
    monkeypatch.setenv("ACTORFLOW_CACHE_PLANS", "1")
    for name in ("other", "cache"):  # the first start imports what later ones have
        monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / name))
        monkeypatch.setattr(compiling, "capture_step", counted := CallCounter(compiling.capture_step))
        assert scheduled(6) == (expected[0], 0)
    assert counted.calls > 2  # for the first call, and for those in which the learning rate stays and changes
    monkeypatch.setattr(compiling, "capture_step", none := CallCounter(compiling.capture_step))
    assert scheduled(6) == (expected[0], counted.calls)
    assert not none.calls
    assert scheduled(6, 0.25)[0] == expected[1]


def test_what_a_capture_adds_after_the_step_has_no_line_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "capture_step", counted := CallCounter(compiling.capture_step))
    scheduled(1)
    graph = counted.returned[0].graph
    (last,) = [node for node in graph.nodes if graph.results[-1] in node.outs]  # whether checks raise
    (step,) = [code for code in scheduled.__code__.co_consts if getattr(code, "co_name", "") == "step"]
    lines = {int(node.line.rpartition(":")[2]) for node in graph.nodes if node.line}
    assert last.line == ""
    assert lines <= {at for *_, at in step.co_lines()}


@pytest.mark.slow
@pytest.mark.usefixtures("captures_are_kept")
def test_of_captures_with_one_key_those_made_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACTORFLOW_CACHE_PLANS", "1")
    monkeypatch.setattr(kept_capture, "MOST_CAPTURES", 1)
    for _ in range(2):  # the first start imports what later ones have
        expected, _ = scheduled(4)
    again, skipped = scheduled(4)
    assert again == expected
    assert skipped == 1  # the first call's, which has a key of its own


@pytest.mark.slow
@pytest.mark.usefixtures("captures_are_kept")
def test_a_step_whose_ops_come_from_code_that_the_search_has_not_followed_is_captured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_capture, "covered_lines", lambda found: {})
    for steps in (2, 4, 6):
        Script().train(tmp_path, steps)
        assert KEPT.skipped == 0
    assert [*(tmp_path / "plans").glob("step-*")] == []


@pytest.mark.usefixtures("captures_are_kept")
def test_code_of_the_search_that_has_changed_since_the_process_started_keeps_no_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_store.code_parts()
    monkeypatch.setattr(digest, "STARTED", 0.0)
    monkeypatch.setattr(kept_capture, "_own_code", kept_capture._own_code.__wrapped__)
    Script().train(tmp_path)
    assert [*(tmp_path / "plans").glob("step-*")] == []


# -- folders that cannot be written, or have other things in them -----------------------------------


def test_a_folder_that_cannot_be_written_is_said_once_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plans").write_text("of somebody else")
    assert len(Script().train(tmp_path, 4)) == 4
    said = capfd.readouterr().err
    assert said.count("plans cannot be kept in") == 1
    assert (tmp_path / "plans").read_text() == "of somebody else"
    assert len(Script().train(tmp_path, 6)) == 2
    assert KEPT.taken == 0


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_of_a_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 9):
        script = Script()
        script.keeper(tmp_path)
        with FaultyCalls(number, full_disk).in_force():
            script.step(X)
        for path in plans_in(tmp_path):
            again = Script()
            again.keeper(tmp_path)
            again.step(X)
            assert KEPT.taken == 1
            path.unlink()
    assert "plans cannot be kept in" in capfd.readouterr().err


@pytest.mark.slow
def test_of_many_plans_those_used_last_stay_and_files_of_others_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_store, "MOST", 2)
    mine = tmp_path / "plans"
    mine.mkdir()
    theirs = ["plan-a.actorflow", f"plan-{'a' * 64}.actorflow.bak", "plan.txt", f"plan-{'A' * 64}.actorflow"]
    for name in theirs:
        (mine / name).write_text("of somebody else")
    (mine / f"plan-{'b' * 64}").mkdir()
    seen: list[Path] = []
    for width in (4, 5, 4, 6):
        script = Script(width)
        script.keeper(tmp_path)
        script.step(X)
        assert KEPT.taken == (len(seen) == 2 and width == 4)
        seen += [path for path in plans_in(tmp_path) if path not in seen]
    assert len(seen) == 3
    assert plans_in(tmp_path) == sorted([seen[0], seen[2]])  # that of width 4 was used again
    assert {path.name for path in mine.iterdir()} >= {*theirs, f"plan-{'b' * 64}"}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("text", ["", "[1, 2", '{"a": 1}', "[1, null]", "\xff"])
def test_a_list_of_plans_that_is_none_is_written_anew(text: str, tmp_path: Path) -> None:
    Script().train(tmp_path)
    (tmp_path / "plans" / "plans.json").write_text(text, encoding="latin-1")
    Script().train(tmp_path, 4)
    assert KEPT.taken == 1
    (path,) = plans_in(tmp_path)
    names = json.loads((tmp_path / "plans" / "plans.json").read_text())
    assert [name for name in names if name.startswith("plan-")] == [path.name]


def test_commands_and_the_keeper_pass_the_plans_over(tmp_path: Path) -> None:
    Script().train(tmp_path, 5)
    Script().train(tmp_path, 8)
    assert len(plans_in(tmp_path)) == 1
    assert len([*tmp_path.glob("step-*")]) == 3
    for command in ("list", "verify", "show"):
        done = CliRunner().invoke(main, ["checkpoint", command, str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert "NOT WHOLE" not in done.output
        assert ".actorflow" not in done.output


# -- measured costs --------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Begins an empty cache of this name."""

    def begin(name: str) -> None:
        monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / name))

    return begin


@pytest.mark.slow
def test_a_machine_without_measurements_takes_those_that_are_kept_with_the_plan(
    tmp_path: Path, measured: Callable[[str], None]
) -> None:
    place = Place("cpu", torch.get_num_threads())
    measured("first")
    path = place.path()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(Costs({"a": 1e-3}, 3e10, Link(1e9, 1e-5)).to_json()))
    Script().train(tmp_path / "run")
    assert KEPT.taken == 0
    measured("second")
    Script().train(tmp_path / "run", 4)
    assert KEPT.taken == 1
    assert place.path() is not None
    assert not (tmp_path / "second" / "costs").exists()  # they are not this machine's
    path = place.path()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(Costs({"a": 2e-3}, 3e10, Link(1e9, 1e-5)).to_json()))
    Script().train(tmp_path / "run", 6)
    assert KEPT.taken == 0  # it has its own by now


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', '{"format": 2, "work": {"a": NaN}, "flops_per_s": 1, "links": {}}', "[" * 10**5],
    ids=["empty", "a list", "nothing", "a format", "without a time", "deep"],
)
def test_measurements_that_are_none_are_ignored(text: str, tmp_path: Path, measured: Callable[[str], None]) -> None:
    measured("empty")
    (tmp_path / "run" / "plans").mkdir(parents=True)
    (tmp_path / "run" / "plans" / plan_store._costs_name(Place("cpu", torch.get_num_threads()))).write_text(text)
    Script().train(tmp_path / "run")
    Script().train(tmp_path / "run", 4)
    assert KEPT.taken == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_measurements_without_meaning_are_none(number: float) -> None:
    assert Costs.from_json(Costs({"a": 1.0}, 1.0, Link(1.0, 1.0)).to_json()) == Costs({"a": 1.0}, 1.0, Link(1.0, 1.0))
    assert Costs.from_json(Costs({"a": number}, 1.0, Link(1.0, 1.0)).to_json()) is None
    assert Costs.from_json(Costs({"a": 1.0}, number, Link(1.0, 1.0)).to_json()) is None
    assert Costs.from_json(Costs({"a": 1.0}, 1.0, Link(1.0, number)).to_json()) is None
    assert Costs.from_json(Costs({"a": 1.0}, 1.0, None, Link(number, 1.0)).to_json()) is None


# -- the store alone -------------------------------------------------------------------------------


def test_folders_that_were_named_long_ago_are_not_looked_through(tmp_path: Path) -> None:
    for number in range(plan_store.FOLDERS + 1):
        KEPT.read_from(LocalFolder(tmp_path / str(number)))
    assert [Path(path).name for path in KEPT._folders] == [str(n) for n in range(1, plan_store.FOLDERS + 1)]


def test_a_plan_too_large_to_be_sent_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(plan: Any) -> bytes:
        raise PlanError("does not fit a message of protobuf")

    monkeypatch.setattr("actorflow.session.plan_store.to_bytes", too_large)
    assert len(Script().train(tmp_path)) == 2
    assert plans_in(tmp_path) == []
