"""Gradients leave in buckets, each as soon as it is complete, and what they move is what the table says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, P, Split
from actorflow_compiler.cutting.buckets import BUCKET
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.timeline import simulate
from boxed_plans import boxed_plan
from comms import Communication, buckets, communications
from gpt import GPT
from models import CASES, CONTEXT
from trained import Layout, plan_of

WIDE = replace(CASES["gpt"], make=lambda: GPT(layers=4, width=384, heads=4, context=CONTEXT))
GRADIENTS = sum(p.numel() * p.element_size() for p in WIDE.model().parameters())
COUNT = len(list(WIDE.model().parameters()))
LARGEST = max(p.numel() * p.element_size() for p in WIDE.model().parameters())


@pytest.fixture(scope="module")
def data_parallel() -> Plan:
    return plan_of(WIDE, Layout(2), 256)[0]


def backward(found: list[Communication], kind: str) -> list[list[Communication]]:
    """The buckets of gradients."""
    return buckets([c for c in found if c.phase == "backward" and c.kind == kind])


def check_few_and_full(found: list[list[Communication]], per_byte: float) -> None:
    """Every gradient is in one bucket; all buckets but one are full, none is much more than full."""
    assert sum(map(len, found)) == COUNT
    sizes = sorted(sum(c.nbytes for c in bucket) / per_byte for bucket in found)
    assert len(sizes) <= GRADIENTS / BUCKET + 1
    assert sizes[1] >= BUCKET
    assert sizes[-1] < BUCKET + LARGEST


def test_data_parallel_gradients_are_reduced_in_a_few_full_buckets(data_parallel: Plan) -> None:
    found = communications(data_parallel)
    check_few_and_full(backward(found, "all_reduce"), per_byte=2)
    assert sum(c.nbytes for c in found if c.phase == "backward") == 2 * GRADIENTS
    assert dict(data_parallel.summary.moved) == {"all_reduce": sum(c.nbytes for c in found)}


def test_a_bucket_waits_only_for_the_parts_of_the_backward_pass_that_make_it(data_parallel: Plan) -> None:
    passes = {a.id for a in data_parallel.actors if a.kind == "backward" and a.rank == 0}
    waits = [waited_for(data_parallel, a.id) & passes for a in data_parallel.actors if is_bucket(data_parallel, a.id)]
    waits.sort(key=len)
    assert len(waits) > GRADIENTS / BUCKET - 1
    assert waits[-1] == passes
    for before, after in itertools.pairwise(waits):
        assert before < after
        assert len(after) == len(before) + 1  # one part more


def test_buckets_leave_while_the_backward_pass_goes_on(data_parallel: Plan) -> None:
    spans = [s for s in simulate(data_parallel, 1, Hardware()).spans if s.rank == 0]
    computing = max(s.end for s in spans if data_parallel.actor(s.actor).kind == "backward")
    leaving = [s.start for s in spans if is_bucket(data_parallel, s.actor)]
    assert sum(start < computing for start in leaving) >= len(leaving) - 1


def test_sharded_gradients_and_parameters_move_in_buckets_as_well() -> None:
    plan, _, _ = plan_of(WIDE, Layout(2, prepare=lambda model: zero(model, 1)), 256)
    found = communications(plan)
    check_few_and_full(backward(found, "reduce_scatter"), per_byte=1)
    gathers = buckets([c for c in found if c.kind == "all_gather"])
    assert sum(map(len, gathers)) == COUNT
    assert max(sum(c.nbytes for c in bucket) for bucket in gathers) < BUCKET + LARGEST
    assert len(gathers) <= GRADIENTS / BUCKET + 1
    for kind in ("reduce_scatter", "all_gather"):
        assert sum(c.nbytes for c in found if c.kind == kind) == GRADIENTS


def test_what_a_pass_gathers_in_one_chunk_is_one_bucket() -> None:
    """Also what the first layers read in the backward pass, for whose results nothing but the optimizer waits."""
    plan, _, _ = plan_of(CASES["gpt"], Layout(2, prepare=lambda model: zero(model, 3)), 64)
    gathers = buckets([c for c in communications(plan) if c.kind == "all_gather"])
    assert sorted(bucket[0].phase for bucket in gathers) == ["backward", "forward"]
    assert all({c.phase for c in bucket} == {bucket[0].phase} for bucket in gathers)


def test_small_sums_that_are_ready_at_different_times_leave_together_if_only_the_optimizer_waits() -> None:
    mesh = placement("cpu", [[0, 1], [2, 3]])
    early = [(mesh, (B, B)), (mesh, (B, Split(0))), (mesh, (P, Split(0))), (mesh, (P, Split(0)))]
    late = [(mesh, (B, B)), (mesh, (B, Split(0))), (mesh, (P, Split(1))), (mesh, (P, Split(0)))]
    ends = [(mesh, (B, Split(0)))] * 2
    found = communications(boxed_plan(4, [((8, 8), early + ends), ((4, 4), late + ends)], "float32"))
    sums = buckets([c for c in found if c.kind == "all_reduce"])
    assert sorted((b[0].ranks, len(b)) for b in sums) == [((0, 2), 2), ((1, 3), 2)]
    assert sum(c.nbytes for b in sums for c in b) == 2 * 4 * (64 + 16)


def is_bucket(plan: Plan, id: int) -> bool:
    """Whether an actor of rank 0 reduces gradients."""
    actor = plan.actor(id)
    return actor.rank == 0 and actor.comm is not None and actor.name.startswith("all_reduce0B")


def waited_for(plan: Plan, id: int) -> set[int]:
    """All actors whose firing in the same iteration this one needs."""
    found: set[int] = set()
    left = [id]
    while left:
        for register in plan.inputs_of[left.pop()]:
            if not register.initial and register.producer not in found:
                found.add(register.producer)
                left.append(register.producer)
    return found
