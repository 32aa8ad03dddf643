"""Which ranks show each other that they have made the same call, and which plans may begin before all have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Sbp, Split
from actorflow_compiler.plan.plan import (
    Box,
    Collective,
    CollectiveKind,
    Exchange,
    OfVariable,
    Plan,
    Variable,
    VariableKind,
)
from actorflow_compiler.plan.stamping import (
    FEW,
    begins_freely,
    stamp_peers,
    stamps_before,
    stamps_from,
    stamps_to,
    whole_everywhere,
)
from plans import Sketch


def variable(name: str, *ranks: int, sbp: Sbp = B) -> Variable:
    return Variable(name, (4,), "float32", Placement("cpu", ranks, (len(ranks),)), (sbp,), VariableKind.PARAMETER)


def with_variables(sketch: Sketch, *variables: Variable) -> Plan:
    return replace(sketch.plan(), variables=variables)


def test_each_of_a_small_group_asks_all_others_and_each_of_a_large_one_its_neighbour() -> None:
    small = Collective(CollectiveKind.ALL_REDUCE, 0, (2, 0, 1))
    assert stamps_before(small, 0) == (2, 1)
    large = Collective(CollectiveKind.ALL_REDUCE, 0, tuple(range(FEW + 1)))
    assert [stamps_before(large, rank) for rank in (0, 1, FEW)] == [(FEW,), (0,), (FEW - 1,)]


@given(st.lists(st.permutations(range(12)).flatmap(lambda p: st.integers(2, 12).map(lambda n: p[:n])), max_size=3))
def test_a_rank_sends_its_stamp_to_those_that_wait_for_it(groups: list[list[int]]) -> None:
    s = Sketch()
    s.send(s.actor("F", rank=3), s.actor("G", rank=7), to=7)
    s.actor("last", rank=11)
    for group in groups:
        s.collective(group)
    plan = s.plan({(r, q): () for r in range(12) for q in ("comm", "compute")})
    for rank in range(12):
        own = plan.for_rank(rank)
        assert stamps_to(own, rank) == stamps_to(plan, rank)
        assert stamps_from(own, rank) == stamps_from(plan, rank)
        for other in range(12):
            assert (other in stamps_to(plan, rank)) == (rank in stamps_from(plan, other))
            assert (other in stamp_peers(plan, rank)) == (rank in stamp_peers(plan, other))


@given(st.integers(2, 40), st.data())
def test_where_ranks_of_a_group_differ_some_rank_waits_for_ever(size: int, data: st.DataObject) -> None:
    """So a collective that needs what all bring does not end."""
    histories = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    group = Collective(CollectiveKind.ALL_REDUCE, 0, tuple(range(size)))
    joins = [all(histories[r] == histories[o] for o in stamps_before(group, r)) for r in range(size)]
    assert all(joins) == (len(set(histories)) == 1)


def data_parallel(size: int, kind: CollectiveKind = CollectiveKind.ALL_REDUCE, empty: bool = False) -> Plan:
    """Each rank's gradient meets the others', and then it changes its own variable."""
    s = Sketch()
    grads = [s.actor("B", "backward", rank=rank) for rank in range(size)]
    comms = s.collective(range(size))
    for rank, comm in enumerate(comms):
        s.join(grads[rank], comm)
        s.join(comm, s.actor("U", "optimizer", rank=rank, targets=(OfVariable(f"w{rank}"),)))
    boxes = ((Box((0,), (0 if empty else 1,)),),) * size
    for number, actor in enumerate(s.actors):
        if isinstance(actor.comm, Collective):
            comm_of = replace(actor.comm, kind=kind, exchanges=(Exchange(boxes, boxes),))
            s.actors[number] = replace(actor, comm=comm_of)
    return replace(s.plan(_orders(s)), variables=tuple(variable(f"w{rank}", rank) for rank in range(size)))


def _orders(s: Sketch) -> dict[tuple[int, str], tuple[int, ...]]:
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    for actor in s.actors:
        found[actor.rank, actor.queue] = (*found.get((actor.rank, actor.queue), ()), actor.id)
    return found


@pytest.mark.parametrize("size", [2, FEW, FEW + 1, 20])
def test_changes_that_follow_a_sum_over_all_ranks_follow_the_calls_of_all(size: int) -> None:
    assert begins_freely(data_parallel(size))


def test_a_collective_in_which_nothing_passes_between_some_ranks_of_a_large_group_shows_only_the_neighbour() -> None:
    kind = CollectiveKind.ALL_TO_ALL
    assert begins_freely(data_parallel(FEW + 1, kind))
    assert begins_freely(data_parallel(FEW, kind, empty=True))
    assert not begins_freely(data_parallel(FEW + 1, kind, empty=True))


def pipeline(first_changes_by_itself: bool, whole: bool = False, initial: int = 0) -> Plan:
    """Two stages: the first sends to the second, and what comes back, or nothing, lets it change its variable."""
    s = Sketch()
    forward = s.actor("F", rank=0)
    change = s.actor("U", "optimizer", rank=0, targets=(OfVariable("w"),))
    backward = s.actor("B", "backward", rank=1)
    s.send(forward, backward, to=1)
    if first_changes_by_itself:
        s.join(forward, change)
    else:
        s.send(backward, change, to=0)
        if initial:
            s.registers[-1] = replace(s.registers[-1], initial=initial, slots=2)
    held = variable("w", 0, 1) if whole else variable("w", 0)
    return replace(s.plan(_orders(s)), variables=(held,))


def test_a_change_that_follows_nothing_of_another_rank_waits_for_its_call() -> None:
    assert begins_freely(pipeline(False))
    assert not begins_freely(pipeline(True))


def test_a_change_of_what_every_rank_of_the_plan_holds_waits_for_none() -> None:
    assert begins_freely(pipeline(True, whole=True))


def test_what_came_in_the_call_before_shows_nothing_of_this_one() -> None:
    assert not begins_freely(pipeline(False, initial=1))


def test_a_rank_that_only_gets_arguments_is_not_waited_for() -> None:
    s = Sketch()
    s.actor("U", "optimizer", targets=(OfVariable("w"),))
    s.actor("source", "source", rank=1, queue="source")
    assert begins_freely(with_variables(s, variable("w", 0)))
    s.actor("F", rank=1)  # it has a part now
    assert not begins_freely(with_variables(s, variable("w", 0)))


def test_what_is_whole_on_every_rank_is_asked_of_none() -> None:
    assert whole_everywhere(variable("w", 0, 1, 2), 3)
    assert not whole_everywhere(variable("w", 0, 1), 3)
    assert not whole_everywhere(variable("w", 0, 1, 2, sbp=Split(0)), 3)
