"""The optimizer runs in parts, each as soon as its gradients have arrived, and computes what it computes in one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.optim import SGD, AdamW, RMSprop

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.cutting import buckets, optimizer_parts, segment
from actorflow_compiler.cutting.lower import LoweredProgram
from actorflow_compiler.cutting.lowered_step import LoweredStep
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Actor, ActorKind, CollectiveKind, OfVariable, Plan
from actorflow_scheduler import schedule
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.timeline import simulate
from gpt import GPT
from models import CASES, CONTEXT, Case, narrow
from trained import Layout, laid_of, train_planned

WIDE = replace(CASES["gpt"], make=lambda: GPT(layers=4, width=384, heads=4, context=CONTEXT))
DATA = Layout(2)
ZERO_1 = Layout(2, prepare=lambda model: zero(model, 1))
LAYOUTS = {"data": DATA, "micro-batches": Layout(2, 2), "zero": ZERO_1}
SLOW = Hardware(bytes_per_s=1e8)  # a bucket takes longer than all of the optimizer
SCALED = {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)}
# with these a part is a tensor or two of a small model
FEW_BYTES = 2048
FEW_BYTES_TO_PASS = 64


def in_one_part(program: LoweredProgram, levels: Sequence[int], parts: Sequence[int]) -> list[int]:
    """What was before there were parts."""
    return list(parts)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buckets, segment, optimizer_parts):
        monkeypatch.setattr(module, "BUCKET", FEW_BYTES)
    monkeypatch.setattr(optimizer_parts, "SMALL", FEW_BYTES_TO_PASS)


def cut(case: Case, layout: Layout, size: int = 256, hardware: Hardware = SLOW) -> Plan:
    return schedule(laid_of(case, layout, size)[0].cut, hardware)


@functools.cache
def wide(layout: str, parts: int | None = None) -> LoweredStep:
    """What plans of ``WIDE`` are cut from, which keeps what was lowered; ``parts`` tells one from another."""
    return laid_of(WIDE, LAYOUTS[layout], 256)[0]


def optimizers(plan: Plan) -> list[Actor]:
    """The optimizer's actors of rank 0, in the order in which they run."""
    order = next(o.actors for o in plan.orders if (o.rank, o.queue) == (0, "compute"))
    return [plan.actor(a) for a in order if plan.actor(a).kind == "optimizer"]


def updates(plan: Plan, actor: Actor) -> set[str]:
    """The parameters that an optimizer's actor reads, and so updates."""
    kinds = {v.name: v.kind for v in plan.variables}
    names = {o.name for o in actor.operands if isinstance(o, OfVariable)}
    return {name for name in names if kinds.get(name) == "parameter"}


@pytest.mark.parametrize(
    "layout", ["data", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("micro-batches", "zero"))]
)
def test_parts_run_while_gradients_of_other_layers_are_on_their_way(layout: str) -> None:
    plan = schedule(wide(layout).cut, SLOW)
    parts = optimizers(plan)
    assert len(parts) > 4
    spans = {s.actor: s for s in simulate(plan, 1, SLOW).spans if s.rank == 0}
    last = max(
        spans[a.id].end
        for a in plan.actors
        if a.rank == 0 and a.comm is not None and a.name.startswith(("all_reduce0B", "reduce_scatter0B"))
    )
    early = [a for a in parts if spans[a.id].end <= last]
    assert len(early) >= len(parts) - 2  # all but those of the last buckets
    assert any("blocks.3" in name for name in updates(plan, parts[0]))  # the gradients of the last layers come first
    assert any("embed" in name for name in updates(plan, parts[-1]))
    for one, other in itertools.combinations(parts, 2):
        assert not updates(plan, one) & updates(plan, other)
    parameters = {v.name for v in plan.variables if v.kind == "parameter"}
    assert set().union(*(updates(plan, a) for a in parts)) == parameters


@pytest.mark.parametrize("layout", [DATA, ZERO_1], ids=["data", "zero"])
def test_parts_do_not_wait_for_gradients_that_are_cast_after_their_reduction(layout: Layout) -> None:
    case = narrow(WIDE)
    plan = cut(case, layout)
    parts = optimizers(plan)
    assert len(parts) >= 4
    spans = {s.actor: s for s in simulate(plan, 1, SLOW).spans if s.rank == 0}
    sums = [a for a in plan.actors if a.rank == 0 and a.name.startswith(("all_reduce0B", "reduce_scatter0B"))]
    assert spans[parts[0].id].end <= max(spans[a.id].end for a in sums)
    reduced = {a.id for a in sums}
    readers = {plan.actor(read.actor).kind for r in plan.registers if r.producer in reduced for read in r.readers}
    assert readers == {ActorKind.OPTIMIZER}


@pytest.mark.slow
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", ["data", "zero"])
@pytest.mark.parametrize("bytes_per_s", [1e8, 5e8, 4e9])
def test_parts_shorten_a_step_by_its_forecast(layout: str, bytes_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = Hardware(bytes_per_s=bytes_per_s)
    found = forecast(schedule(wide(layout).cut, hardware), hardware).period
    monkeypatch.setattr(segment, "optimizer_parts", in_one_part)
    plan = schedule(wide(layout, parts=1).cut, hardware)
    assert len(optimizers(plan)) == 1
    assert found < forecast(plan, hardware).period


def test_each_part_sends_what_it_has_made_in_one_collective() -> None:
    plan = cut(WIDE, ZERO_1)
    gathers = [
        a for a in plan.actors if a.rank == 0 and a.comm is not None and a.comm.label == CollectiveKind.ALL_GATHER
    ]
    parts = {a.id for a in optimizers(plan)}
    makers = [{r.producer for r in plan.inputs_of[g.id] if r.producer in parts} for g in gathers]
    assert sorted(map(len, makers)) == [1] * len(parts)
    assert set().union(*makers) == parts


@pytest.mark.slow
def test_parts_are_put_off_until_all_gradients_have_left_but_for_those_that_send_something() -> None:
    for layout, waits in ((DATA, True), (ZERO_1, False)):
        plan = cut(WIDE, layout, hardware=Hardware(bytes_per_s=5e8))
        order = next(o.actors for o in plan.orders if (o.rank, o.queue) == (0, "compute"))
        kinds = [plan.actor(a).kind for a in order]
        first = kinds.index(ActorKind.OPTIMIZER)
        assert (ActorKind.BACKWARD not in kinds[first:]) == waits


def test_one_device_runs_its_optimizer_at_once() -> None:
    assert len(optimizers(cut(WIDE, Layout(1)))) == 1


@pytest.mark.slow
def test_what_a_norm_of_all_gradients_scales_is_one_part() -> None:
    plan = cut(replace(WIDE, clip=1.0), DATA)
    *norms, last = optimizers(plan)
    assert len(norms) > 4
    assert not any(updates(plan, a) for a in norms)  # they only reduce gradients
    assert updates(plan, last) == {v.name for v in plan.variables if v.kind == "parameter"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(WIDE, clip=1.0), marks=pytest.mark.slow),
        pytest.param(replace(WIDE, **SCALED), marks=pytest.mark.slow),
        replace(WIDE, clip=1.0, **SCALED, optimizer=lambda m: RMSprop(m.parameters(), 1e-3)),
    ],
    ids=["clipped", "scaled", "scaled and clipped, by an optimizer of many ops"],
)
def test_no_part_keeps_gradients_for_another(case: Case) -> None:
    plan = cut(case, DATA)
    parts = {a.id for a in plan.actors if a.kind == "optimizer" and a.rank == 0}
    passed = [
        r.nbytes for r in plan.registers if r.producer in parts and any(read.actor in parts for read in r.readers)
    ]
    assert sum(passed) < 4096  # numbers, such as norms


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", [DATA, ZERO_1, Layout(4, 2, pipeline=True)], ids=["dp", "z1", "stages"])
@pytest.mark.parametrize(
    "case",
    [
        replace(CASES["mlp"], optimizer=lambda m: AdamW(m.parameters(), 1e-3, amsgrad=True), clip=0.1),
        replace(CASES["mlp"], optimizer=lambda m: SGD(m.parameters(), 0.05, momentum=0.9, nesterov=True)),
        replace(CASES["mlp"], optimizer=lambda m: RMSprop(m.parameters(), 1e-3, momentum=0.5), **SCALED),
        CASES["gpt"],
        narrow(CASES["gpt"]),
        narrow(replace(CASES["gpt"], clip=0.5, **SCALED)),
    ],
    ids=["amsgrad, clipped", "sgd with momentum", "rmsprop, scaled", "gpt", "autocast", "autocast, scaled, clipped"],
)
@pytest.mark.usefixtures("small_buckets")
def test_parts_compute_bit_for_bit_what_one_computes(
    case: Case, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, state, plan = train_planned(case, layout, [8] * 3)
    monkeypatch.setattr(segment, "optimizer_parts", in_one_part)
    expected, whole, before = train_planned(case, layout, [8] * 3)
    assert len(optimizers(plan)) > len(optimizers(before))
    assert losses == expected
    torch.testing.assert_close(state, whole, rtol=0, atol=0)
