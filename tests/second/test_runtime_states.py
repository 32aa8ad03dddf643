"""A graph goes on from its runtime state in a new process: nothing is compiled, and all is as if it never stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import actorflow as flow
import warm
from actorflow.control import cluster
from actorflow.session import plan_store, process
from actorflow.session.plan_store import KEPT
from actorflow_compiler.core.errors import ActorflowError, CallError
from second.launching import command, run
from second.scripts.runtime_states import CASES

SCRIPT = Path(__file__).with_name("scripts") / "runtime_states.py"


def ran(kind: str, world: int, folder: Path, out: Path, *cases: str) -> tuple[list[dict[str, Any]], str]:
    out.mkdir(exist_ok=True)
    arguments = ["--", kind, str(folder), str(out), *cases]
    line = command("run", str(SCRIPT), *arguments, processes=world, python=warm.python())
    done = run(line, out, ACTORFLOW_CACHE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((out / f"{kind}-{rank}.json").read_text()) for rank in range(world)], done.stderr


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, ("accumulated", "global"), id="2"),
        *(pytest.param(n, tuple(CASES), id=f"{n}, all", marks=pytest.mark.slow) for n in (1, 2, 4)),
    ],
)
def test_a_run_that_goes_on_compiles_nothing_and_is_bit_for_bit_the_one_that_never_stopped(
    world: int, cases: tuple[str, ...], tmp_path: Path
) -> None:
    whole, _ = ran("whole", world, tmp_path, tmp_path / "out", *cases)
    on, said = ran("on", world, tmp_path, tmp_path / "out", *cases)
    for rank in range(world):
        for name in cases:
            one, other = whole[rank][name], on[rank][name]
            assert (one.pop("taken"), other.pop("taken")) == (0, int(rank == 0)), name
            assert one == other, name
    assert "compiled Train" not in said


@pytest.mark.slow
def test_on_other_devices_a_run_goes_on_with_another_plan_and_says_so(tmp_path: Path) -> None:
    whole, _ = ran("whole", 2, tmp_path, tmp_path / "out", "accumulated")
    on, said = ran("on", 4, tmp_path, tmp_path / "more", "accumulated")
    assert on[3]["accumulated"]["losses"] == pytest.approx(whole[0]["accumulated"]["losses"], abs=1e-5)
    assert on[0]["accumulated"]["taken"] == 0
    assert "no plan of the runtime state of Train_0 fits it; what differs:" in said
    assert "the devices (2 of kind cpu; now 4 of kind cpu)" in said


# -- in one process --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A session of each test's own, without a cache."""
    monkeypatch.setattr(process, "_session", process._session)
    monkeypatch.setenv("ACTORFLOW_CACHE", "0")
    as_a_new_process()
    yield
    as_a_new_process()


def as_a_new_process() -> None:
    process.finish()
    process._session = cluster._current = None
    KEPT.forget()


class Doubling(flow.nn.Graph):
    """Trains one layer on batches of any size."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def test_several_shapes_have_their_plans_again_and_a_state_may_be_kept_again() -> None:
    sizes = (8, 5, 8, 3)
    whole = Doubling()
    for n in sizes[:2]:
        float(whole(torch.ones(n, 4)))
    state = whole.runtime_state_dict()
    assert len(state["plans"]) == 2
    expected = [float(whole(torch.ones(n, 4))) for n in sizes[2:]]
    for _ in range(2):
        as_a_new_process()
        graph = Doubling()
        graph.load_runtime_state_dict(state)
        before = graph.model.weight.clone()
        found = [float(graph(torch.ones(n, 4))) for n in sizes[2:]]
        assert found == expected
        assert KEPT.taken == 1
        assert not torch.equal(before, graph.model.weight)
        assert graph.name == whole.name


def test_a_state_without_modules_leaves_those_of_the_graph_as_they_are() -> None:
    whole = Doubling()
    float(whole(torch.ones(8, 4)))
    state = whole.runtime_state_dict(with_eager=False)
    assert list(state["values"]) == ["optimizer.0", "System-Train-TrainStep"]
    as_a_new_process()
    graph = Doubling()
    with torch.no_grad():
        graph.model.weight.fill_(0.5)
    graph.load_runtime_state_dict(state)
    assert graph.model.weight.unique().tolist() == [0.5]
    float(graph(torch.ones(8, 4)))
    assert KEPT.taken == 1


def test_plans_of_other_code_or_versions_are_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Doubling()
    float(whole(torch.ones(8, 4)))
    state = whole.runtime_state_dict()

    def on() -> str:
        graph = Doubling()
        graph.load_runtime_state_dict(state)
        assert float(graph(torch.ones(8, 4))) > 0
        assert KEPT.taken == 0
        as_a_new_process()
        return capsys.readouterr().err

    as_a_new_process()
    Doubling.build, build = lambda self, x: build(self, x) + 1.0, Doubling.build  # type: ignore[method-assign]
    said = on()
    Doubling.build = build  # type: ignore[method-assign]
    assert "is compiled, as no plan of the runtime state of Doubling_" in said
    assert "what the step does, or where" in said
    parts = {**plan_store.code_parts(), "the version of torch": (("9.9", ""), "9.9")}
    monkeypatch.setattr(plan_store, "code_parts", lambda: parts)
    said = on()
    assert re.search(r"what differs:\n.*the version of torch \(2\..*; now 9\.9\)", said)
    monkeypatch.undo()
    monkeypatch.setenv("ACTORFLOW_CACHE", "0")
    state["plans"][0][-1] ^= 1
    assert "a plan in the runtime state of" in on()


def test_another_job_may_have_laid_out_the_variables_before() -> None:
    whole = Doubling()
    float(whole(torch.ones(8, 4)))
    state = whole.runtime_state_dict()
    expected = float(whole(torch.ones(8, 4)))
    as_a_new_process()
    graph = Doubling()
    graph.load_runtime_state_dict(state)
    evaluated = flow.nn.Graph.trace(graph.model)(torch.ones(8, 4))
    assert evaluated.shape == (8, 2)
    assert float(graph(torch.ones(8, 4))) == expected


class Loose(flow.nn.Graph):
    """Changes a tensor of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.seen = nn.Linear(4, 2), torch.zeros(())
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        self.seen.add_(1)
        loss: torch.Tensor = self.model(x).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def loose() -> None:
    graph = Loose()
    float(graph(torch.ones(2, 4)))
    graph.runtime_state_dict()


def late() -> None:
    graph = Doubling()
    float(graph(torch.ones(2, 4)))
    graph.load_runtime_state_dict(graph.runtime_state_dict())


def foreign() -> None:
    graph = Doubling()
    float(graph(torch.ones(2, 4)))
    Loose().load_runtime_state_dict(graph.runtime_state_dict() | {"values": {"model": {}, "other": {}}})


def share() -> None:
    Doubling().share_from(Doubling())


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "before": (lambda: Doubling().runtime_state_dict(), "was asked for before its first call, which makes its plan"),
    "loose": (loose, "its calls change self.seen, a tensor that is in no module"),
    "late": (late, "load_runtime_state_dict was found for nn.Graph"),
    "foreign": (foreign, "'System-Train-TrainStep', 'optimizer.0' is missing, and 'other' is not in the graph"),
    "state dict": (
        lambda: Doubling().load_runtime_state_dict(Doubling().state_dict()), "that is no runtime state; what"
    ),
    "nothing": (lambda: Doubling().load_runtime_state_dict(None), "was given a NoneType that is no runtime state"),
    "form": (
        lambda: Doubling().load_runtime_state_dict({"actorflow_runtime_state": 99}), "whose form this version"
    ),
    "moved": (lambda: flow.nn.Graph.runtime_state_dict_to({}, "cpu"), "that is no runtime state"),
    "share": (share, "model is another module there"),
    "share what": (lambda: Doubling().share_from(nn.Linear(1, 1)), "an nn.Graph was expected"),
    "size": (lambda: flow.nn.Graph.with_dynamic_input_shape(size=0), "with_dynamic_input_shape(size=0) was found"),
    "decorator": (lambda: flow.nn.Graph.with_dynamic_input_shape()(Doubling), "it is a decorator of a graph's"),
    "level": (lambda: Doubling(debug_v_level=4), "debug(4) was found; -1 (off) to 3 was expected"),
    "depth": (lambda: Doubling(debug_max_py_stack_depth=-1), "debug(max_py_stack_depth=-1) was found"),
    "ranks": (lambda: Doubling(debug_ranks="all"), "debug(ranks='all') was found"),
    "pickled": (lambda: flow.save(Doubling(), "graph.pt"), "runtime_state_dict() were expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_use_of_a_state_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    work, text = MISTAKES[name]
    with pytest.raises(ActorflowError) as error:
        work()
    assert text in str(error.value)


def test_what_oneflow_asks_for_before_is_taken_and_changes_nothing() -> None:
    class Shaped(Doubling):
        """Is asked to have plans for several shapes, and a runtime state."""

        @flow.nn.Graph.with_dynamic_input_shape(size=3, enable_shared=True)
        def __init__(self) -> None:
            super().__init__(enable_get_runtime_state_dict=True)
            self.enable_save_runtime_state_dict()
            self.enable_shared()

    graph = Shaped()
    assert [float(graph(torch.ones(n, 4))) > 0 for n in (4, 2)] == [True, True]
    state = graph.runtime_state_dict(destination=None)
    assert flow.nn.Graph.runtime_state_dict_to(state, "cuda:0") == state
    other = Shaped()
    other.model = graph.model
    other.share_from(graph)
    with pytest.raises(CallError, match=r"enable_shared\(1\) was found; True or False"):
        graph.enable_shared(1)  # type: ignore[arg-type]
