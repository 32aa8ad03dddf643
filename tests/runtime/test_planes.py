"""Which plane a plan's communications take, by where its ranks are."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from actorflow.runtime.collective_order import nccl_calls
from actorflow.session.planes import RankLocation, choose_planes, meet_groups, rank_locations, share, unshare
from actorflow_compiler.plan.plan import Collective, Plan
from actorflow_compiler.plan.text import to_text
from actorflow_compiler.plan.verify import verify
from models import CASES
from trained import Layout, plan_of

GPUS = [RankLocation("a", "GPU-0", nccl=True), RankLocation("a", "GPU-1", nccl=True)]


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    """Two stages of two replicas: sends between ranks 0, 1 and 2, 3, and all-reduces inside of each pair."""
    plan, *_ = plan_of(CASES["mlp"], Layout(4, 4, pipeline=True), 8)
    return plan


def planes(plan: Plan) -> Counter[tuple[str, str]]:
    """(Kind of communication, plane) → how many move something that way."""
    moving = [a.comm for a in plan.actors if a.comm is not None and (a.operands or isinstance(a.comm, Collective))]
    return Counter(("collective" if isinstance(c, Collective) else "send", c.plane) for c in moving)


def test_gpus_of_one_rank_each_use_nccl_for_all_even_what_is_small(pipeline: Plan) -> None:
    spots = [*GPUS, RankLocation("b", "GPU-0", nccl=True), RankLocation("b", "GPU-1", nccl=True)]
    spots = [replace(spot, gpu=f"{spot.machine} {spot.gpu}") for spot in spots]
    found = verify(choose_planes(pipeline, spots))
    assert {plane for _, plane in planes(found)} == {"nccl"}
    assert [order.rank for order in found.calls] == [0, 1, 2, 3]
    assert nccl_calls(found, 0) == nccl_calls(found.for_rank(0), 0) != ()
    assert "  calls     nccl: " in to_text(found)
    assert "  calls     nccl: " in to_text(found.for_rank(3))


def test_ranks_that_share_a_gpu_go_through_host_memory(pipeline: Plan) -> None:
    shared = [RankLocation("a", "GPU-0", nccl=True)] * 4
    found = verify(choose_planes(pipeline, shared))
    assert set(planes(found)) == {("send", "shared"), ("collective", "gloo")}
    assert found.calls == ()
    apart = verify(choose_planes(pipeline, [replace(spot, machine="") for spot in shared]))
    assert {plane for _, plane in planes(apart)} <= {"gloo", "inline"}


def test_two_gpus_that_each_hold_a_pair_of_ranks_use_nccl_only_between_different_ones(pipeline: Plan) -> None:
    found = verify(choose_planes(pipeline, [GPUS[0], GPUS[0], GPUS[1], GPUS[1]]))
    assert set(planes(found)) == {("send", "nccl"), ("collective", "gloo")}
    assert all(call.kind in ("send", "receive") for rank in range(4) for call in nccl_calls(found, rank))


def test_processors_and_gpus_in_one_plan_meet_in_host_memory(pipeline: Plan) -> None:
    found = verify(choose_planes(pipeline, [*GPUS, RankLocation("a"), RankLocation("b")]))
    by_group = {a.comm.ranks: a.comm.plane for a in pipeline_comms(found)}
    assert by_group[0, 1] == "nccl"
    assert by_group[2, 3] == "gloo"
    assert by_group[0, 2] == "shared"
    assert by_group[1, 3] in ("gloo", "inline")


def pipeline_comms(plan: Plan) -> list:  # type: ignore[type-arg]
    return [a for a in plan.actors if a.comm is not None and (a.operands or isinstance(a.comm, Collective))]


def test_a_gpu_without_nccl_goes_through_host_memory(pipeline: Plan) -> None:
    found = choose_planes(pipeline, [replace(spot, nccl=False) for spot in GPUS * 2])
    assert "nccl" not in {plane for _, plane in planes(found)}


def test_without_gpus_nothing_changes(pipeline: Plan) -> None:
    assert choose_planes(pipeline, [RankLocation("a")] * 4) == share(pipeline, ["a"] * 4)
    assert choose_planes(pipeline, [RankLocation()] * 4) == pipeline


def test_what_is_shared_with_a_rank_that_has_no_socket_goes_over_gloo_and_nccl_stays(pipeline: Plan) -> None:
    found = choose_planes(pipeline, [*GPUS, RankLocation("a"), RankLocation("a")])
    for rank in range(4):
        alone = verify(unshare(found, rank, ()))
        assert ("collective", "nccl") in planes(alone)
        assert alone.calls == found.calls
    assert ("send", "shared") in planes(found)


def test_a_group_shares_memory_only_if_all_of_its_ranks_can(pipeline: Plan) -> None:
    plan = share(pipeline, ["a"] * 4)
    groups = {a.comm.ranks for a in plan.actors if isinstance(a.comm, Collective)}
    assert groups == {(0, 1), (2, 3)}
    near = ({1, 2, 3}, {0, 2, 3}, {0, 1}, {0, 1, 2})  # rank 2 has no socket with rank 3, which does not know
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rank: meet_groups(plan, rank, near[rank], lambda: store), range(4)))
    assert found == [{(0, 1)}, {(0, 1)}, set(), set()]
    assert meet_groups(plan.for_rank(0), 0, near[0], lambda: store) == {(0, 1)}, "they are asked again for another plan"
    assert meet_groups(pipeline, 0, near[0], lambda: pytest.fail("there is nothing to ask")) == set()


def test_spots_are_made_of_what_ranks_report() -> None:
    found = rank_locations(["a", "a", ""], ["cuda", "cpu", "cuda"], ["GPU-0", "GPU-1", "GPU-2"], ["2.27", "2.27", ""])
    assert found == [RankLocation("a", "GPU-0", nccl=True), RankLocation("a"), RankLocation("", "GPU-2")]
