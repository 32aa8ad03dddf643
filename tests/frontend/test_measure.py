"""Measured costs: what is measured, what is kept of it, and who uses it."""

from __future__ import annotations

import json
import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from actorflow.link_probe import link_of
from actorflow.runtime import measured_costs as costs
from actorflow.runtime.bodies.kernels import Kernel, Kernels
from actorflow.runtime.measured_costs import Place, Target, measure
from actorflow_compiler.core.hardware import CPU_CORE, SharedCores
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.plan.plan import (
    Actor,
    Body,
    Constant,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Operand,
    Plan,
    Plane,
    Read,
    Register,
    Send,
    Step,
    TensorSpec,
    Variable,
)
from actorflow_scheduler.cost import seconds
from actorflow_scheduler.work_digest import work_digest

WIDTH = 96


def plan_of(*bodies: tuple[Body, tuple[Operand, ...], float]) -> Plan:
    """An actor for each body; register 0 has a matrix and a row of indices, ``w`` is split over two ranks."""
    place = Placement("cpu", (0, 1), (2,))
    variables = (Variable("w", (2 * WIDTH, WIDTH), "float32", place, (Split(0),), "parameter"),)
    constants = (Constant("c", (2,), "float32", bytes(8)),)
    specs = (TensorSpec((WIDTH, WIDTH), "float32", "B"), TensorSpec((WIDTH,), "int64", "B"))
    source = Actor(0, "source", 0, "source", "source", operands=(OfInput("x"), OfInput("y")))
    actors = [
        Actor(i, f"F{i}", 0, "compute", "forward", body=i - 1, operands=operands, flops=flops)
        for i, (_, operands, flops) in enumerate(bodies, 1)
    ]
    register = Register(0, 0, tuple(Read(a.id) for a in actors), specs)
    return Plan(
        "measured", 2, 1, tuple(b for b, _, _ in bodies), (source, *actors), (register,), variables, (), (), constants
    )


def body(op: str, *args: object, inputs: int) -> Body:
    return Body(inputs, (Step(op, args, (), (inputs,)),), ())


def product(flops: float = 2.0 * WIDTH**3) -> tuple[Body, tuple[Operand, ...], float]:
    return body("aten.mm.default", Ref(0), Ref(1), inputs=2), (FromRegister(0, 0), OfVariable("w")), flops


LOOKUP = (body("aten.embedding.default", Ref(0), Ref(1), inputs=2), (OfVariable("w"), FromRegister(0, 1)), 0.0)
SCALED = (
    Body(
        4,
        (Step("aten.mul.Tensor", (Ref(0), Ref(1)), (), (4,)), Step("aten.add.Tensor", (Ref(3), Ref(2)), (), (5,))),
        (),
    ),
    (FromRegister(0, 0), OfScalar("rate"), OfPiece(), OfVariable("c")),
    0.0,
)
IMPOSSIBLE = (body("aten.mm.default", Ref(0), Ref(1), inputs=2), (FromRegister(0, 0), FromRegister(0, 1)), 5e6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path))
    return tmp_path


def test_every_distinct_body_is_measured_on_tensors_of_the_plan_s_shapes() -> None:
    plan = plan_of(product(), LOOKUP, SCALED)
    hardware = measure([plan], "cpu", 1)
    assert hardware.measured.keys() == {work_digest(plan, a) for a in plan.actors if a.body is not None}
    for actor in plan.actors[1:]:
        taken = hardware.measured[work_digest(plan, actor)]
        assert 0 < taken < 1
        assert seconds(plan, actor, hardware) == hardware.fire_overhead_s + taken
    assert hardware.flops_per_s == pytest.approx(2 * WIDTH**3 / hardware.measured[work_digest(plan, plan.actors[1])])


@pytest.mark.parametrize(
    ("apart", "rate"), [(0, 1), (6 * 2 * 4 * WIDTH**2, 1), (12 * 2 * 4 * WIDTH**2, 2), (1 << 40, 1)]
)
def test_a_body_runs_on_operands_that_are_in_no_cache_as_far_as_its_rank_uses_others_meanwhile(
    apart: int, rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    class Watched(Kernels):
        def kernel(self, body: Body) -> Kernel:
            made = super().kernel(body)
            return lambda values: used.append(values[0].data_ptr()) or made(values)

    monkeypatch.setattr(costs, "Kernels", Watched)
    monkeypatch.setattr(costs, "_used_bytes", lambda plan: {0: apart})
    plan = plan_of(product())
    plan = replace(plan, actors=tuple(replace(a, rate=rate) for a in plan.actors))
    measure([plan], "cpu", 1)
    after = used[2 : len(used) // costs.TURNS]  # those before are to wake threads
    distinct = len(set(after))
    assert distinct == {0: 1, 1 << 40: costs.RUNS[1]}.get(apart, 6)
    assert after[distinct : 2 * distinct] == after[: len(after) - distinct][:distinct]


@pytest.mark.parametrize(("turns", "distinct"), [(1, 1), (4, 4), (1000, 15)])
def test_outputs_are_made_in_memory_that_was_not_used_just_before(
    turns: int, distinct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    outputs_made: list[weakref.ref[torch.Tensor]] = []
    kept: list[int] = []  # outputs that are there when a run begins

    class Watched(Kernels):
        def kernel(self, body: Body) -> Kernel:
            inner = super().kernel(body)

            def kernel(values: list[Any]) -> tuple[Any, ...]:
                kept.append(sum(output() is not None for output in outputs_made))
                outputs = inner(values)
                made.append(outputs[0].data_ptr())
                outputs_made.append(weakref.ref(outputs[0]))
                return outputs

            return kernel

    monkeypatch.setattr(costs, "Kernels", Watched)
    monkeypatch.setattr(costs, "_used_bytes", lambda plan: {0: turns * 4 * WIDTH**2})
    made_matrix = replace(product()[0], outputs=(2,))
    measure([plan_of((made_matrix, *product()[1:]))], "cpu", 1)
    assert len(set(made[2 : 2 + distinct])) == distinct
    assert distinct - 1 <= max(kept) <= distinct  # memory is used again, as that of a register's slots


def test_a_rank_uses_what_all_of_its_actors_read_and_write_in_a_step() -> None:
    plan = plan_of(product(), LOOKUP)
    matrix, row = 4 * WIDTH**2, 8 * WIDTH
    assert costs._used_bytes(plan) == {0: 2 * matrix + matrix + row}
    many = replace(plan, actors=tuple(replace(a, rate=3) if a.name == "F1" else a for a in plan.actors))
    assert costs._used_bytes(many) == {0: 3 * 2 * matrix + matrix + row}


def test_arithmetic_is_as_fast_as_bodies_that_do_little_else() -> None:
    assert costs._arithmetic([]) == 0
    assert costs._arithmetic([(1e9, 0.01), (2e9, 0.03), (1e6, 0.01)]) == pytest.approx(3e9 / 0.04)


def test_what_only_works_elsewhere_in_its_operands_is_the_same_work() -> None:
    def digest(op: str, *args: object) -> str:
        plan = plan_of((body(op, Ref(0), *args, inputs=2), (FromRegister(0, 0), FromRegister(0, 1)), 0.0))
        return work_digest(plan, plan.actors[1])

    first = digest("actorflow.carve", (0, 0), (4, WIDTH))
    assert digest("actorflow.carve", (8, 0), (4, WIDTH)) == first
    assert digest("actorflow.carve", (0, 0), (8, WIDTH)) != first
    assert digest("actorflow.pick", Ref(1), 1, -100, 48, 96) == digest("actorflow.pick", Ref(1), 1, -100, 0, 96)
    assert digest("aten.sum.dim_IntList", (0,)) != digest("aten.sum.dim_IntList", (1,))


def test_what_cannot_run_on_invented_values_is_estimated_by_what_could() -> None:
    plan = plan_of(product(), IMPOSSIBLE)
    hardware = measure([plan], "cpu", 1)
    assert len(hardware.measured) == 1
    expected = hardware.fire_overhead_s + 5e6 / hardware.flops_per_s
    assert seconds(plan, plan.actors[2], hardware) == pytest.approx(expected)


def test_the_most_work_is_measured_first_where_time_does_not_suffice_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(LOOKUP, product(), SCALED)
    now = iter(range(100))
    monkeypatch.setattr(costs.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(costs, "_time", lambda kernels, plan, actor, device, apart: 1.0)
    hardware = measure([plan], "cpu", 1, budget=1.5)
    assert hardware.measured == {work_digest(plan, plan.actors[2]): 1.0}


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0)])
def test_the_shorter_of_two_turns_counts(times: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(times)
    monkeypatch.setattr(costs, "_time", lambda *_: left.pop(0))
    assert list(measure([plan_of(product())], "cpu", 1).measured.values()) == [1.0]
    assert not left


def test_what_was_measured_is_kept_for_later_plans_and_runs_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(product())
    assert Target(threads=1).hardware("cpu") == CPU_CORE
    found = measure([plan], "cpu", 1)
    monkeypatch.setattr(costs, "_time", lambda *_: pytest.fail("it was measured before"))
    assert measure([plan], "cpu", 1) == found
    shared = replace(found, cores=SharedCores(len(os.sched_getaffinity(0)) / 4, 1))
    assert Target(threads=1, ranks=4).hardware("cpu") == shared
    assert Target(threads=3, ranks=4).hardware("cpu") == CPU_CORE
    assert Target(measure=True, threads=1, ranks=4).hardware("cpu", lambda: [plan]) == shared


def test_a_file_that_is_not_ours_is_as_good_as_none() -> None:
    plan = plan_of(product())
    measure([plan], "cpu", 1)
    path = Place("cpu", 1).path()
    assert path is not None
    for text in ("", "[]", json.dumps({"format": costs.FORMAT}), json.dumps({"format": 0, "work": {}})):
        path.write_text(text)
        assert Target(threads=1).hardware("cpu") == CPU_CORE
    assert measure([plan], "cpu", 1).measured


def test_nothing_is_kept_where_no_cache_is_wanted(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("ACTORFLOW_CACHE", "")
    assert measure([plan_of(product())], "cpu", 1).measured
    assert not list(cache.iterdir())


@pytest.mark.parametrize("folder", ["", "file"])
@pytest.mark.filterwarnings("ignore:what was measured cannot be kept")
def test_what_cannot_be_kept_is_measured_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch, cache: Path, folder: str
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("ACTORFLOW_CACHE", folder and str(cache / folder))
    monkeypatch.setattr(costs, "_of_process", {})
    plan = plan_of(product())
    found = measure([plan], "cpu", 1)
    with monkeypatch.context() as patched:
        patched.setattr(costs, "_time", lambda *_: pytest.fail("it was measured before"))
        assert measure([plan], "cpu", 1) == found
    assert measure([plan_of(product(), LOOKUP)], "cpu", 1).measured.keys() > found.measured.keys()


def test_what_cannot_be_measured_is_tried_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(costs, "_probe", lambda: tried.append(1) or (None, None))
    monkeypatch.setattr(costs, "_time", lambda *_: tried.append(2))
    for _ in range(3):
        measure([sending(), plan_of(product())], "cpu", 1)
    assert sorted(tried) == [1] + [2] * costs.TURNS


def test_costs_that_cannot_be_kept_are_said_to_count_in_one_process(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("ACTORFLOW_CACHE", str(cache / "file"))
    with pytest.warns(UserWarning, match=r"cannot be kept in .*: Not a directory; it counts in this process alone"):
        assert measure([plan_of(product())], "cpu", 1).measured


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    measure([plan_of(product())], "cpu", before + 1)
    assert torch.get_num_threads() == before


def sending() -> Plan:
    """A plan in which rank 0 sends a row to rank 1."""
    plan = plan_of(product())
    spec = TensorSpec((WIDTH,), "float32", "B")
    there = Register(1, 2, (), (spec,))
    send = Actor(
        2, "send", 0, "compute", "boxing", operands=(FromRegister(0, 0),), targets=(FromRegister(1, 0),),
        comm=Send(0, 0, 1, Plane.SHARED),
    )  # fmt: skip
    return replace(plan, actors=(*plan.actors, send), registers=(*plan.registers, there))


def test_sends_are_measured_between_two_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm.python())
    hardware = measure([sending()], "cpu", 1)
    assert 1e-7 < hardware.latency_s < 1
    assert hardware.latency_s != CPU_CORE.latency_s
    assert 1e6 < hardware.bytes_per_s < 1e13
    assert hardware.bytes_per_s != CPU_CORE.bytes_per_s
    assert hardware.collectives is not None
    assert 1e-7 < hardware.collectives.latency_s < 1
    assert 1e6 < hardware.collectives.bytes_per_s < 1e13
    monkeypatch.setattr(costs, "_probe", lambda: pytest.fail("it was measured before"))
    assert measure([sending()], "cpu", 1) == hardware


def test_that_sends_cannot_be_measured_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('no way')")
    monkeypatch.setattr(costs, "PROBE", script)
    monkeypatch.setattr(sys, "executable", warm.python())
    with pytest.warns(UserWarning, match=r"could not be measured \(.*\); they are taken to be as fast as"):
        hardware = measure([sending()], "cpu", 1)
    assert hardware.bytes_per_s == CPU_CORE.bytes_per_s


def test_sends_whose_times_cannot_be_true_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    copy = 4e-4
    fair = link_of(1e-4, 1.1e-3, copy)
    assert fair == {"latency_s": 1e-4, "bytes_per_s": pytest.approx(4.19e9, rel=1e-2)}
    assert link_of(1e-4, 1.1e-3, copy, 1 << 22)["bytes_per_s"] == pytest.approx(4 * 4.19e9, rel=1e-2)
    for small, large in ((1e-4, 1e-4), (1e-4, 1.1e-4), (2e-3, 1e-3), (-1e-5, 1e-3), (0.0, 1e-3)):
        assert list(link_of(small, large, copy)) == ["failed"], (small, large)
    script = tmp_path / "disturbed.py"
    found = {"sends": fair, "collectives": link_of(1e-4, 1e-4, copy)}
    script.write_text(f"import json; print(json.dumps({found!r}))")
    monkeypatch.setattr(costs, "PROBE", script)
    monkeypatch.setattr(sys, "executable", warm.python())
    with pytest.warns(UserWarning, match=r"could not be measured \(other processes disturb it: 1.0e-04 s for 16"):
        hardware = measure([sending()], "cpu", 1)
    assert (hardware.latency_s, hardware.bytes_per_s) == (CPU_CORE.latency_s, CPU_CORE.bytes_per_s)
    assert hardware.collectives is None
