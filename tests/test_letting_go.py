"""Models, optimizers and jobs that a script drops are let go of, on every rank; what it holds keeps its values."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import actorflow as flow
from actorflow.script_state.arguments import flatten
from actorflow.session.process import started
from actorflow.standins.beside import BESIDE
from scripts.let_go import KINDS, SOME, Slotted, Trainer, batch, in_turn, kept, now, pair, trained, trials
from test_runs import actorflow

SCRIPT = Path(__file__).parent / "scripts" / "let_go.py"


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("make", KINDS)
def test_nothing_is_left_of_trainings_that_are_dropped(make: Any) -> None:
    found = list(trials(make, 4))
    assert found[-1][0] == found[-2][0]  # plans, variables, stand-ins
    assert found[-1][1] <= 2  # models; one that one job works on is there until its next call
    assert max(wrong for _, _, wrong in found) < 1e-9


def test_nothing_is_remembered_of_the_memory_that_models_had_which_are_gone() -> None:
    def remembered() -> int:
        session = started()
        assert session is not None
        assert session.runtime is not None
        return len(session.runtime.variables._memories)

    list(trials(KINDS[0], 1))
    before = remembered()
    list(trials(KINDS[0], 4))
    # at most that of the last one, which goes with the next call or while there is none
    assert remembered() - before <= len(list(pair(0)[0].parameters()))


def test_a_model_that_is_kept_keeps_its_values_when_its_job_is_gone() -> None:
    assert kept(3) < 1e-9


def test_models_that_one_job_trains_in_turn_have_a_plan_each() -> None:
    assert in_turn(3) == (pytest.approx(0, abs=1e-9), 3)


@pytest.mark.parametrize(
    ("layout", "kinds", "count"),
    [
        ("tensor", "some", len(SOME) + 3),  # one device lets go of all kinds
        pytest.param("tensor", "every", len(KINDS) + 3, marks=pytest.mark.slow),
        pytest.param("zero 3", "some", len(SOME) + 3, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_let_go_alike(layout: str, kinds: str, count: int) -> None:
    run = actorflow("run", str(SCRIPT), "--devices", "2", "--", layout, kinds)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    assert run.stdout.count(": right") == count


@pytest.mark.slow
def test_two_ranks_let_go_soon_where_nothing_is_compiled_and_garbage_is_collected_late() -> None:
    run = actorflow("run", str(SCRIPT), "--devices", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    assert run.stdout.count(": right") == 4


def test_an_object_in_the_place_of_one_that_is_gone_is_another_one() -> None:
    def key(thing: object) -> Any:
        return flatten("job", inspect.signature(lambda thing: thing), (thing,), {}).key

    model = torch.nn.Linear(2, 2)
    known = {key(model): "the plan"}
    assert known[key(model)] == "the plan"
    address, there = id(model), weakref.ref(model)
    del model
    assert there() is None  # the key does not keep it
    others = [torch.nn.Linear(2, 2) for _ in range(100)]
    again = next((other for other in others if id(other) == address), others[0])
    assert key(again) not in known
    assert key(again) == key(again)
    assert key(again.forward) == key(again.forward) != key(others[-1].forward)


def test_copies_of_an_object_with_a_job_have_a_job_of_their_own() -> None:
    first = Trainer(0)
    first.step(batch(0))
    for other in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert other.step is other.step
        assert other.step is not first.step
    assert BESIDE not in copy.deepcopy(first.optimizer).__dict__
    torch.save(first.model, io.BytesIO())


def test_an_object_that_takes_no_attributes_has_one_job_for_as_long_as_it_is_there() -> None:
    trainer = Slotted(0)
    job = trainer.step
    float(job(batch(0)))
    float(trainer.step(batch(1)))
    assert trainer.step is job
    assert len(job.plans) == 1
    other = Slotted(1)
    other.parts = [*trainer.parts]  # of the same model
    assert other.step is not job
    assert other.step is other.step
    model = trainer.parts[0][0]
    found, there = weakref.ref(job), weakref.ref(trainer)
    del trainer, job, other
    assert found() is not None  # the model is there, and what was compiled for it
    del model
    gc.collect()
    float(flow.global_function(lambda x: x.sum(), type="predict")(batch(0)))  # what is gone goes with a call
    gc.collect()
    assert found() is None
    assert there() is None


def test_a_step_that_comes_back_to_a_model_reads_what_the_script_has_changed_meanwhile() -> None:
    step = flow.global_function(lambda x: trained(now.model, now.optimizer, x))
    ours, eager = [pair(0), pair(1)], [pair(0), pair(1)]
    for number, which in enumerate((0, 1, 0, 1, 0)):
        now.model, now.optimizer = ours[which]
        for model in (ours[which][0], eager[which][0]):
            layer: Any = model.layer
            model.scale.fill_(0.5 + number)  # type: ignore[operator, union-attr]
            with torch.no_grad():
                layer.bias.copy_(layer.bias.detach() + 1)
        loss = trained(*eager[which], batch(number)).item()
        assert float(step(batch(number))) == pytest.approx(loss, abs=1e-9), number
    assert len(step.plans) == 2
