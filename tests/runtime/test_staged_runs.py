"""Trainings on processors and on devices that run ahead together: what they exchange goes through host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from actorflow.devices import Cpu, Device
from actorflow.session.planes import RankLocation, choose_planes
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.plan.plan import Plan
from models import CASES
from runtime.fake_device import Bench, staged
from trained import Layout, plan_of, train, train_planned

STEPS = 3
SHARED = RankLocation("here", "GPU 0", nccl=True)  # two ranks on one GPU: NCCL refuses them


def mixed(bench: Bench) -> Callable[[int], Device]:
    return lambda rank: bench.device(rank) if rank % 2 else Cpu()


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("layout", "device", "spots"),
    [
        (Layout(2, 4, pipeline=True), mixed, (RankLocation("here"), SHARED)),
        (Layout(2, 4, pipeline=True), mixed, (RankLocation("here"), RankLocation("there", "GPU 0", nccl=True))),
        (Layout(2), mixed, (RankLocation("here"), SHARED)),
        (Layout(2), lambda bench: bench.device, (SHARED, SHARED)),
    ],
    ids=["pipeline, near", "pipeline, far", "data", "data, on one GPU"],
)
def test_a_training_gives_the_same_numbers_on_any_mixture_of_devices(
    layout: Layout,
    device: Callable[[Bench], Callable[[int], Device]],
    spots: tuple[RankLocation, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, state, _ = train_planned(CASES["mlp"], layout, [8] * STEPS)
    plan, values, optimizer = plan_of(CASES["mlp"], layout, 8)
    bench = Bench(seed=5)

    def chosen(plan: Plan, machines: object) -> Plan:
        made = choose_planes(plan, spots)
        assert not made.calls, "something goes over NCCL"
        return made

    monkeypatch.setattr("trained.LocalCluster", functools.partial(LocalCluster, stage=staged))
    monkeypatch.setattr("trained.share", chosen)
    losses, found = train(CASES["mlp"], plan, values, optimizer, [8] * STEPS, device(bench))
    assert losses == pytest.approx(wanted, rel=1e-5)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
    assert not bench.wrongs
    assert not bench.syncs
