"""Ranks join, agree, and hear of plans, drops and failures over a tree, from neighbours alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.control import step_agreement
from actorflow.control.cluster import Cluster
from actorflow.control.drops import DropSet, drop_set
from actorflow.control.link import PeerLink
from actorflow.control.tree import Tree, common, spans_of
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.settings import Settings
from actorflow.transport.abandon import Decision, Failed, Hold, Order, Vote
from actorflow_compiler.core.errors import CallError, ClusterError
from actorflow_protos import runtime_pb2 as pb
from cluster.ranks import LIMIT, Ranks, Word

Joined = Callable[..., Ranks]
SHAPES = [(3, 1), (7, 2), (10, 3)]  # ranks, and how many each passes messages on to


# -- the tree --------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 20))
def test_every_rank_but_the_first_is_below_one_parent(world: int, fan_out: int) -> None:
    trees = [Tree(rank, world, fan_out) for rank in range(world)]
    below = [child for tree in trees for child in tree.children]
    assert below == list(range(1, world))  # each once
    for tree in trees:
        assert all(tree.parent_of(child) == tree.rank for child in tree.children)
        assert tree.is_leaf(tree.rank) == (not tree.children)
        ranks = [rank for first, end in tree.subtree for rank in range(first, end)]
        assert ranks == sorted({tree.rank}.union(*(_all_below(trees, child) for child in tree.children)))
        for child in tree.children:
            assert {r for r in range(world) if tree.holds(child, r)} == _all_below(trees, child)


def _all_below(trees: list[Tree], rank: int) -> set[int]:
    return {rank}.union(*(_all_below(trees, child) for child in trees[rank].children))


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_ranks_in_common_are_those_that_are_in_both(a: set[int], b: set[int]) -> None:
    found = common(spans_of(sorted(a)), spans_of(sorted(b)))
    assert [rank for first, end in found for rank in range(first, end)] == sorted(a & b)


# -- joining ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
def test_ranks_keep_links_to_their_neighbours_alone_and_know_all_addresses(
    joined: Joined, world: int, fan_out: int
) -> None:
    ranks = joined(world, fan_out=fan_out)
    for cluster in ranks.clusters:
        plane = cluster._control_plane
        assert len(plane.tickets) == world
        tree = Tree(cluster.rank, world, fan_out)
        assert sorted(plane.links) == sorted({tree.parent, *tree.children} - {-1})
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * world


def test_ranks_that_a_plan_names_are_linked_also_to_rank_0_which_they_have_left(joined: Joined) -> None:
    ranks = joined(6, fan_out=2)
    assert ranks.each(lambda cluster: cluster.connect(range(6))) == [None] * 6
    for cluster in ranks.clusters:
        assert sorted(cluster._control_plane.links) == sorted({*range(6)} - {cluster.rank})
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 6
    assert all(cluster.failure is None for cluster in ranks.clusters)


def test_ranks_that_do_not_agree_on_the_fan_out_are_refused(ranks: Ranks, settings: Callable[..., Settings]) -> None:
    for rank in range(3):
        ranks.make(settings(rank, 3, fan_out=16 - rank // 2))
    for error in ranks.each(lambda cluster: cluster.join()):
        assert isinstance(error, ClusterError)
        assert "ranks do not agree on the ranks that each passes messages on to (ACTORFLOW_FAN_OUT):" in str(error)


def test_a_rank_that_does_not_reach_the_one_above_it_says_so(
    ranks: Ranks, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        ranks.make(settings(rank, 4, fan_out=2))
    plane = ranks.clusters[3]._control_plane
    reach = plane._reach

    async def nowhere(peer: int, address: str, deadline: float) -> None:
        if peer:
            address, deadline = "127.0.0.1:9", plane._loop.time() + 0.5
        await reach(peer, address, deadline)

    monkeypatch.setattr(plane, "_reach", nowhere)
    for error in ranks.each(lambda cluster: (cluster.join(), cluster.goodbye())):
        assert isinstance(error, ClusterError)
        assert f"could not connect within {LIMIT:g} s, though both reached the master" in str(error)


# -- steps, payloads, drops ------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
def test_payloads_go_up_and_down_the_tree_whatever_their_size(joined: Joined, world: int, fan_out: int) -> None:
    ranks = joined(world, fan_out=fan_out)
    sizes = [0, 1, (1 << 20) - 1, 1 << 20, (1 << 21) + 5]
    sent = [bytes([rank]) * sizes[rank % len(sizes)] for rank in range(world)]

    def work(cluster: Cluster) -> tuple[list[bytes] | None, bytes, bytes]:
        up = cluster.gather("up", sent[cluster.rank])
        down = cluster.scatter("down", None if cluster.rank else sent)
        return up, down, cluster.scatter("to all", None if cluster.rank else [b"same"] * world)

    found = ranks.each(work)
    assert found == [(sent if rank == 0 else None, sent[rank], b"same") for rank in range(world)]


def test_what_many_ranks_get_alike_goes_once_to_each_neighbour(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = joined(13, fan_out=3)
    sent: Counter[tuple[int, int]] = Counter()

    def count(cluster: Cluster) -> None:
        for link in cluster._control_plane.links.values():
            monkeypatch.setattr(link, "put", _counted(link, cluster.rank, sent))

    ranks.each(count)
    payloads = [b"odd" if rank % 2 else b"even" for rank in range(13)]
    assert ranks.each(lambda c: c.scatter("plan", None if c.rank else payloads)) == payloads
    # rank 3 has ranks 10, 11 and 12 below it; a rank at the end gets one, and one with others below both
    assert +sent == {(0, 1): 2, (0, 2): 2, (0, 3): 2, **{(low, 3 * low + k): 1 for low in (1, 2, 3) for k in (1, 2, 3)}}


def _counted(link: PeerLink, rank: int, sent: Counter[tuple[int, int]]) -> Callable[[pb.Item], None]:
    put = link.put

    def note(item: pb.Item) -> None:
        sent[rank, link.peer] += item.WhichOneof("kind") == "part"
        put(item)

    return note


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
def test_a_rank_hears_of_many_calls_from_its_neighbours_alone_and_at_once_where_one_waits(
    joined: Joined, monkeypatch: pytest.MonkeyPatch, world: int, fan_out: int
) -> None:
    monkeypatch.setattr(step_agreement, "SPACING", 2 * LIMIT)  # no time of its own comes for a rank to tell
    ranks = joined(world, fan_out=fan_out)
    heard: list[tuple[int, int, str]] = []
    known = [threading.Event() for _ in range(world)]

    def hear(cluster: Cluster) -> None:
        plane = cluster._control_plane
        for kind, handle in plane._items.items():
            plane._items[kind] = lambda link, item, kind=kind, handle=handle: (
                heard.append((cluster.rank, link.peer, kind)), handle(link, item)
            )  # fmt: skip
        cluster.on_call_agreed(lambda call, _: known[cluster.rank].set() if call == 499 else None)

    ranks.each(hear)
    ranks.each(lambda cluster: [cluster.announce_call(call, "d", "step()") for call in range(500)])
    assert not any(kind == "steps" for _, _, kind in heard)
    ranks.clusters[-1].want_agreement()
    assert all(event.wait(LIMIT) for event in known)
    by_kind = Counter(kind for _, _, kind in heard if kind != "beat")
    assert {*by_kind} <= {"steps", "hurry", "alike"}
    assert by_kind["alike"] == world - 1
    assert by_kind["steps"] <= 2 * (world - 1)  # a wish may come before the steps
    for rank, peer, _ in heard:
        tree = Tree(rank, world, fan_out)
        assert peer in (tree.parent, *tree.children)


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
@pytest.mark.parametrize("culprit", [0, 1, -1])
def test_a_call_that_differs_ends_all_ranks_with_the_culprit_named(
    joined: Joined, world: int, fan_out: int, culprit: int
) -> None:
    ranks = joined(world, fan_out=fan_out)
    odd = culprit % world

    def work(cluster: Cluster) -> None:
        cluster.announce_call(0, "d", "step()")
        cluster.announce_call(1, str(cluster.rank == odd), f"step({cluster.rank == odd})")
        cluster.gather("after", b"")
        cluster.goodbye()

    for error in ranks.each(work):
        assert isinstance(error, CallError)
        assert f"rank {odd} made call 2: step(True)" in str(error)
        assert "made call 2: step(False)" in str(error)


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
def test_a_gather_of_something_else_far_below_is_an_error_and_gives_no_payload(
    joined: Joined, world: int, fan_out: int
) -> None:
    ranks = joined(world, fan_out=fan_out)
    last = world - 1
    found = ranks.each(lambda cluster: cluster.gather("mine" if cluster.rank == last else "ours", b"x"))
    assert isinstance(found[0], CallError)
    assert f"rank {last} is at gather 'mine'" in str(found[0])


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
def test_drops_are_agreed_on_when_all_have_released_and_not_before(joined: Joined, world: int, fan_out: int) -> None:
    ranks = joined(world, fan_out=fan_out)
    known: list[SimpleQueue[tuple[int, DropSet]]] = [SimpleQueue() for _ in range(world)]
    for cluster in ranks.clusters:
        cluster.on_call_agreed(lambda call, dropped, rank=cluster.rank: known[rank].put((call, dropped)))

    def call(number: int, of: Callable[[int], DropSet]) -> list[DropSet]:
        ranks.each(lambda c: (c.announce_call(number, "d", "step()", of(c.rank)), c.want_agreement()))
        found = []
        for queue in known:
            at, dropped = -1, drop_set([], [])
            while at < number:
                at, more = queue.get(timeout=LIMIT)
                dropped |= more
            found.append(dropped)
        return found

    last = world - 1
    assert call(0, lambda rank: drop_set([1], ["a"] if rank != last else [])) == [drop_set([1], [])] * world
    assert call(1, lambda rank: drop_set([], ["a"] if rank == last else [])) == [drop_set([], ["a"])] * world
    assert call(2, lambda _: drop_set([], ["a"])) == [drop_set([], ["a"])] * world  # another one of that name
    assert call(3, lambda rank: drop_set([], ["b"] if rank else [])) == [drop_set([], [])] * world


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
@pytest.mark.parametrize("culprit", [0, 1, -1])
def test_a_failure_anywhere_comes_to_all(joined: Joined, world: int, fan_out: int, culprit: int) -> None:
    ranks = joined(world, fan_out=fan_out)
    failed = culprit % world
    ranks.clusters[failed].abort(FailureKind.RAISED, "raised ValueError: boom")
    for cluster in ranks.clusters:
        assert cluster.failed.wait(LIMIT)
        assert cluster.failure is not None
        assert (cluster.failure.rank, cluster.failure.cause) == (failed, "raised ValueError: boom")
        assert cluster._control_plane.told.wait(LIMIT)


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
def test_a_rank_that_is_gone_is_known_to_those_above_and_below_it(joined: Joined, world: int, fan_out: int) -> None:
    """Also to those that it stood between."""
    ranks = joined(world, fan_out=fan_out)
    gone = ranks.clusters[1]
    gone._control_plane._done = True  # it says nothing
    gone._loop.call_soon_threadsafe(gone._control_plane._over.set)
    others = [cluster for cluster in ranks.clusters if cluster is not gone]
    for cluster in others:
        assert cluster.failed.wait(LIMIT)
        assert cluster.failure is not None
        assert cluster.failure.rank == 1


@pytest.mark.parametrize(("world", "fan_out"), SHAPES)
def test_a_call_that_has_failed_far_below_is_held_voted_on_and_given_up_by_all(
    joined: Joined, world: int, fan_out: int
) -> None:
    ranks = joined(world, fan_out=fan_out)
    orders: list[SimpleQueue[Order]] = [SimpleQueue() for _ in range(world)]
    for cluster in ranks.clusters:
        cluster.on_order(orders[cluster.rank].put)
    failed = Failed(3, "boom", "ValueError", "boom", "train.py:3")
    ranks.clusters[-1].say(failed)
    assert [one.get(timeout=LIMIT) for one in orders] == [Hold(3, "train.py:3")] * world
    for cluster in ranks.clusters:
        cluster.say(Vote(3, "it is late" if cluster.rank == 1 else ""))
    assert [one.get(timeout=LIMIT) for one in orders] == [Decision(failed, "rank 1: it is late")] * world


def test_who_asks_another_rank_far_away_is_answered(joined: Joined) -> None:
    ranks = joined(7, fan_out=2)
    ranks.clusters[6].serve(Word, lambda asked: [asked.word.encode()])
    found = ranks.apart(lambda: ranks.clusters[3].pull(6, Word("weights")))
    assert found == [b"weights"]
