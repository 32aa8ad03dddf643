"""Iterations of a pipeline overlap as far as the mathematics allows, and nothing of the mathematics changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.custom_ops.optimizers import SCALARS
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.plan.plan import Actor, OfVariable, Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler.timeline import Span, simulate
from models import CASES, Case, Mlp, setting
from trained import Layout, plan_of

VARIANTS = {"whole backward": Variant(), "weight gradients apart": Variant(weights=True)}


class Wide(Mlp):
    """So many outputs that the last stage is still at its optimizer when the first one is done."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4000)


CASE = replace(CASES["mlp"], make=Wide)
CLIPPED = replace(CASE, clip=0.5)  # by the norm of the gradients of all stages


def plan(case: Case, variant: str) -> Plan:
    found, *_ = plan_of(case, Layout(2, 4, pipeline=True, variant=VARIANTS[variant]), 16)
    return found


def updates(plan: Plan, actor: Actor) -> bool:
    """Whether an optimizer's actor changes variables."""
    body = plan.bodies[actor.body] if actor.body is not None else None
    inside = any(not step.outs for step in body.steps) if body is not None else False
    return actor.kind == "optimizer" and (inside or any(isinstance(t, OfVariable) for t in actor.targets))


def before(plan: Plan, actors: Iterable[int], initial: bool) -> set[int]:
    """The actors that fill registers which some actors read: with or without tokens from the call before."""
    wanted = set(actors)
    return {
        r.producer for r in plan.registers if bool(r.initial) is initial and wanted & {read.actor for read in r.readers}
    }


def all_before(plan: Plan, actors: Iterable[int]) -> set[int]:
    """All that must have fired in the same iteration."""
    found = set(actors)
    while not (more := before(plan, found, False)) <= found:
        found |= more
    return found


def of_kind(plan: Plan, rank: int, *kinds: str) -> set[int]:
    return {a.id for a in plan.actors if a.rank == rank and a.kind in kinds}


def spans(plan: Plan, found: Iterable[Span], actors: Iterable[int], iteration: int) -> list[Span]:
    wanted = set(actors)
    return [s for s in found if s.actor in wanted and s.firing // plan.actor(s.actor).rate == iteration]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_stage_goes_on_while_the_last_one_is_still_at_the_call_before(variant: str) -> None:
    streamed = plan(CASE, variant)
    forward, last = (
        of_kind(streamed, 0, "forward"),
        {a.id for a in streamed.actors if a.rank == 1 and updates(streamed, a)},
    )
    assert last
    back = before(streamed, all_before(streamed, forward), True)  # what a call waits for of the call before
    assert back
    assert not all_before(streamed, back) & last
    found = simulate(streamed, 3, CPU_CORE).spans
    for iteration in range(2):
        goes_on = min(s.start for s in spans(streamed, found, forward, iteration + 1))
        ended = max(s.end for s in spans(streamed, found, last, iteration))
        assert goes_on < ended


@pytest.mark.matrix
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("clipped", [False, True])
def test_only_a_norm_over_all_gradients_lets_every_optimizer_wait_for_every_backward_pass(
    variant: str, clipped: bool
) -> None:
    made = plan(CLIPPED if clipped else CASE, variant)
    last = {a.id for a in made.actors if a.rank == 1 and updates(made, a)}
    first = of_kind(made, 0, "backward", "weight")
    assert (first <= all_before(made, last)) is clipped
    far = replace(CPU_CORE, latency_s=1e-3)  # gradients are long under way to the first stage
    found = simulate(made, 3, far).spans
    for iteration in range(3):
        begun = min(s.start for s in spans(made, found, last, iteration))
        ended = max(s.end for s in spans(made, found, first, iteration))
        assert (begun >= ended) is clipped


@pytest.mark.parametrize("case", [pytest.param(CASE, marks=pytest.mark.slow), CLIPPED], ids=["free", "clipped"])
def test_calls_that_nobody_waits_for_give_the_same_losses(case: Case) -> None:
    made, values, optimizer = plan_of(case, Layout(2, 4, pipeline=True), 16)
    group = optimizer.param_groups[0]
    scalars = {f"optimizer.0.{key}": setting(group, key) for key in SCALARS["actorflow.adam"]}
    batches = [dict(zip(CASE.names, batch, strict=True)) for batch in CASE.batches([16] * 6)]
    runs = []
    for waits in (True, False):
        with LocalCluster(made, variables=values) as cluster:
            calls = []
            for number, batch in enumerate(batches):
                calls.append(cluster.issue(batch, {**scalars, SEED: number}))
                if waits:
                    cluster.results(calls[-1])
            losses = [cluster.results(call)[0] for call in calls]
            for part in calls[-1]:
                part.wait(100.0)  # a loss is there before the optimizers are done
            runs.append([*losses, *(cluster.variable(v.name) for v in made.variables)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
