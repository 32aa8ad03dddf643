"""Plans that were called least recently are let go of where a script needs more than are kept ready."""

from __future__ import annotations

import gc
import linecache
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import actorflow as flow
from actorflow.classic import job_body
from actorflow.classic.job_body import ClassicJobBody
from actorflow.script_state.user_code import is_user_class
from actorflow.session.plan_uses import PlanUses
from actorflow.session.process import current
from actorflow_compiler.core import torch_internals
from actorflow_compiler.core.errors import CallError, StateError
from actorflow_compiler.core.garbage_collection import forgotten_at_the_end
from actorflow_compiler.core.op_call import OpCall
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.core.torch_internals import trace_kernel
from actorflow_compiler.rewriting.expand import trace
from test_runs import actorflow

SCRIPT = Path(__file__).parent / "scripts" / "many_shapes.py"


class Held:
    """Stands for a plan of a job."""


def test_the_plans_that_were_called_last_stay() -> None:
    uses, held = PlanUses(), [Held() for _ in range(4)]
    for number, plan in enumerate(held):
        uses.installed(number, (), plan)
    uses.called(0)
    uses.called(2)
    assert uses.unused(4) == set()
    assert uses.unused(2) == {1, 3}
    uses.drop([1])
    assert uses.unused(2) == {3}
    assert uses.unused(0) == {0, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_more_shapes_than_plans_that_are_kept_ready(devices: int) -> None:
    run = actorflow("run", str(SCRIPT), "--devices", str(devices), ACTORFLOW_MOST_PLANS="4")
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"plans (\d+), of the job (\d+) and (\d+), wrong (\S+)", run.stdout)
    assert found is not None, run.stdout
    assert (int(found[1]), int(found[2]) + int(found[3])) == (4, 4)
    assert float(found[4]) < 1e-12
    assert run.stderr.count("train is compiled again: its plan had not been used for long") == 1
    assert "more of them stay: ACTORFLOW_MOST_PLANS=1000" in run.stderr
    assert run.stdout.count("had not been used for long, and was let go") >= 4  # shapes 4 and 6 of either job at least


def test_a_job_whose_only_plan_was_let_go_of_has_none_until_its_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORFLOW_MOST_PLANS", "2")
    layer = nn.Linear(3, 3)

    def made(factor: float) -> flow.Job:
        @flow.global_function(type="predict")
        def scaled(x: Tensor) -> Tensor:
            out: Tensor = layer(x) * factor
            return out

        return scaled

    x, jobs = torch.randn(4, 3), [made(factor) for factor in (1.0, 2.0, 3.0)]
    for job in jobs:
        job(x)
    assert [job.plan is None for job in jobs] == [True, False, False]
    assert torch.equal(jobs[0](x).clone(), layer(x))
    assert [job.plan is None for job in jobs] == [False, True, False]
    jobs[2](x)
    jobs[1](x)  # of the two that were there, the one called last stays
    assert [job.plan is None for job in jobs] == [True, False, False]
    jobs[2](x)
    jobs[0](x)
    assert [job.plan is None for job in jobs] == [False, True, False]
    worker = current().worker
    assert worker is not None
    assert len(worker.plans) <= 2


@pytest.mark.parametrize("text", ["0", "many", "-1", "1.5"])
def test_a_number_of_plans_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORFLOW_MOST_PLANS", text)

    @flow.global_function(type="predict")
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(StateError, match=rf"ACTORFLOW_MOST_PLANS={re.escape(text)} was found; expected the number"):
        doubled(torch.ones(3))


def test_what_torch_keeps_of_fake_tensors_is_emptied_where_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        torch.ones(3) + torch.ones(3)
    there = FakeTensorMode.cache_info().size
    assert there > 0
    monkeypatch.setattr(torch_internals, "FAKE_RESULTS", there)
    with forgotten_at_the_end():
        pass
    assert FakeTensorMode.cache_info().size == there
    monkeypatch.setattr(torch_internals, "FAKE_RESULTS", there - 1)
    with forgotten_at_the_end():
        pass
    assert FakeTensorMode.cache_info().size == 0


def test_what_a_job_keeps_of_a_shape_goes_with_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORFLOW_MOST_PLANS", "2")
    layer = nn.Linear(3, 3)

    @flow.global_function(type="predict")
    def out(x: Tensor) -> Tensor:
        found: Tensor = layer(x)
        return found

    def shapes() -> int:
        assert isinstance(out.body, ClassicJobBody)
        return len(out.body._found)

    written = _codes_of_torch()
    for rows in range(2, 6):
        x = torch.randn(rows, 3)
        assert torch.equal(out(x).clone(), layer(x))
    assert shapes() == 2
    x = torch.randn(2, 3)
    assert torch.equal(out(x).clone(), layer(x))
    assert shapes() == 2
    assert _codes_of_torch() == written


def test_what_a_job_keeps_of_shapes_whose_calls_fail_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_body, "MOST_FOUND", 3)

    @flow.global_function(type="predict")
    def bad(x: Tensor) -> Tensor:
        raise ValueError("no batch")

    for rows in range(1, 6):
        with pytest.raises(CallError, match="no batch"):
            bad(torch.ones(rows))
    assert isinstance(bad.body, ClassicJobBody)
    assert len(bad.body._found) == 3


def test_no_code_of_torch_is_left_by_an_op_that_is_decomposed_or_expanded() -> None:
    written = _codes_of_torch()
    shape = Meta((4, 6), "float32")
    call = OpCall("aten.sum.dim_IntList", (Ref(0), (1,)), (), (shape,), (Meta((4,), "float32"),))
    assert trace(call, torch.ops.aten.sum.dim_IntList) is not None
    with FakeTensorMode():
        trace_kernel(lambda given: [given[0].exp()], [torch.empty(4, 6)])
    assert _codes_of_torch() == written


def test_a_class_of_the_script_goes_when_the_script_drops_it() -> None:
    def made() -> type:
        class Held:
            pass

        return Held

    kind = made()
    assert is_user_class(kind)
    there = weakref.ref(kind)
    del kind
    gc.collect()
    assert there() is None


def _codes_of_torch() -> list[str]:
    """The files that torch has written for Python's tracebacks, and which never go."""
    return [name for name in linecache.cache if name.startswith("<eval_with_key>")]
