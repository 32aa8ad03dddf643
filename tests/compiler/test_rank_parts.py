"""What ranks share of a plan, and what each class of them has of its own, give each rank its part of the plan."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.compile import compile_step
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Actor, Body, Order, Plan, Step
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.plan.rank_parts import join, split
from actorflow_compiler.plan.verify import verify
from actorflow_protos import plan_pb2 as pb
from actorflow_scheduler.schedule import schedule
from compiler.test_folded_compile import LONG, QUICK
from compiler.test_folded_compile import _mlp as mlp
from compiler.test_plan_round_trip import plans
from drawn_plans import meshes, pipelines
from fewer import fewer
from plans import pipeline

CASES: Mapping[str, Callable[[], StepRequest]] = {**QUICK, **LONG}


def planned(request: StepRequest) -> Plan:
    return schedule(compile_step(request).cut, request.devices.hardware)


def part_of(plan: Plan, rank: int) -> str:
    """A rank's part as it would come alone; a text tells 1 from 1.0 and True, -0.0 from 0.0, and accepts NaN."""
    return repr(from_bytes(to_bytes(plan.for_rank(rank))))


def check(plan: Plan) -> None:
    """Each rank's part comes back as it was, and ranks of a class have one message."""
    ranks = range(plan.world)
    parts = split(plan, ranks)
    for rank in ranks:
        found = join(parts.shared, parts.of(rank), rank)
        assert repr(found) == part_of(plan, rank)
        assert verify(found) == plan.for_rank(rank)
    assert {*parts.class_of.values()} == {*range(len(parts.classes))}


def sent(plan: Plan) -> int:
    """The bytes that leave the master for a plan, each message once."""
    parts = split(plan, range(1, plan.world))
    return len(parts.shared) + sum(map(len, parts.classes))


@settings(max_examples=fewer(60), deadline=None)
@given(pipelines() | meshes())
def test_the_parts_of_any_scheduled_plan_come_back_as_they_were(plan: Plan) -> None:
    check(schedule(plan))


@settings(max_examples=fewer(150), deadline=None)
@given(plans, st.integers(1, 3))
def test_parts_with_anything_in_them_come_back_as_they_were(plan: Plan, world: int) -> None:
    bodies = plan.bodies or (Body(0, (), ()),)
    plan = replace(
        plan,
        bodies=bodies,
        actors=tuple(
            replace(a, id=k, rank=a.rank % world, body=None if a.body is None else a.body % len(bodies))
            for k, a in enumerate(plan.actors)
        ),
        orders=tuple(replace(o, rank=o.rank % world) for o in plan.orders),
    )
    parts = split(plan, range(world))
    for rank in range(world):
        assert repr(join(parts.shared, parts.of(rank), rank)) == part_of(plan, rank)


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_the_parts_of_a_compiled_plan_come_back_as_they_were(case: str) -> None:
    check(planned(CASES[case]()))


def test_four_times_the_ranks_take_as_many_messages_and_hardly_more_bytes() -> None:
    few, many = (planned(mlp(world, 16, zero=1)) for world in (4, 16))
    assert len(split(few, range(4)).classes) == len(split(many, range(16)).classes)
    assert sent(many) < 1.2 * sent(few)
    one_by_one = [sum(len(to_bytes(plan.for_rank(rank))) for rank in range(plan.world)) for plan in (few, many)]
    assert one_by_one[1] > 4 * one_by_one[0], "what the messages to all ranks one by one would grow by"


def test_the_replicas_of_each_stage_are_one_class() -> None:
    parts = split(schedule(pipeline(3, pieces=4, replicas=5)), range(15))
    assert len(parts.classes) == 3
    assert [parts.class_of[rank] for rank in range(15)] == [0] * 5 + [1] * 5 + [2] * 5


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("a number of another kind", 1, 1.0),
        ("a sign of zero", 0.0, -0.0),
        ("a truth", True, False),
        ("a text in a body", "1", "2"),
        ("a number below zero", -1, 1),
        ("another count of items", (1,), (1, 1)),
    ],
)
def test_parts_that_differ_in_more_than_numbers_are_classes_of_their_own(
    name: str, first: object, second: object
) -> None:
    bodies = tuple(Body(0, (Step("aten.add.Tensor", (value,), (), (0,)),), (0,)) for value in (first, second))
    actors = tuple(Actor(rank, f"x@{rank}", rank, "compute", "forward", body=rank) for rank in range(2))
    orders = tuple(Order(rank, "compute", (rank,)) for rank in range(2))
    plan = Plan("p", 2, 1, bodies, actors, (), orders=orders)
    parts = split(plan, range(2))
    assert len(parts.classes) == 2
    for rank in range(2):
        assert repr(join(parts.shared, parts.of(rank), rank)) == part_of(plan, rank)


def test_a_rank_refuses_the_message_of_another_class() -> None:
    parts = split(schedule(pipeline(2, pieces=2, replicas=2)), range(4))
    with pytest.raises(PlanError, match=r"the part of rank 3 was expected.*they are for ranks 0-1"):
        join(parts.shared, parts.of(0), 3)


PIPELINE = split(schedule(pipeline(2, pieces=2, replicas=2)), range(4))


@settings(max_examples=fewer(300), deadline=None)
@given(st.booleans(), st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_byte_gives_a_part_or_a_plan_error(common: bool, at: int, byte: int) -> None:
    messages = [bytearray(PIPELINE.shared), bytearray(PIPELINE.of(1))]
    data = messages[0 if common else 1]
    data[at % len(data)] = byte
    with contextlib.suppress(PlanError):
        verify(join(bytes(messages[0]), bytes(messages[1]), 1))


@settings(max_examples=fewer(300), deadline=None)
@given(st.data())
def test_differences_at_any_place_give_a_part_or_a_plan_error(data: st.DataObject) -> None:
    message = pb.PlanClass()
    message.ParseFromString(PIPELINE.of(1))
    places = st.lists(st.integers(0, 20), max_size=6)
    for path, by in data.draw(st.lists(st.tuples(places, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=3)):
        message.differences.add(path=path, column=len(message.columns))
        message.columns.add(differences=[0, by])
    with contextlib.suppress(PlanError):
        verify(join(PIPELINE.shared, message.SerializeToString(), 1))


@pytest.mark.parametrize(
    ("where", "by", "why"),
    [
        ("actors 0 kind", 1, "a number was expected, ActorKind was found"),
        ("actors 0 flops", 1, "a number was expected, float was found"),
        ("actors 99 id", 1, "out of range"),
        ("actors 0 rank 1", 1, "a number was expected, int was found"),
        ("name 0", 1, "a number was expected, str was found"),
        ("", 1, "a number is there twice, or nowhere"),
        ("actors 0 rank", -1, "number 0 is changed by -1"),
        ("actors 0 rank", 2**63 - 1, "the slots are on rank 9223372036854775807"),
        ("pieces", 2**63 - 1, "number 2 is changed by 9223372036854775807"),
    ],
)
def test_a_difference_that_there_cannot_be_is_refused(where: str, by: int, why: str) -> None:
    fields = {"actors": 4, "kind": 4, "flops": 10, "id": 0, "rank": 2, "name": 0, "pieces": 2}
    message = pb.PlanClass()
    message.ParseFromString(PIPELINE.of(1))
    path = [fields[word] if word in fields else int(word) for word in where.split()]
    message.ClearField("differences")
    message.differences.add(path=path, column=len(message.columns))
    message.columns.add(differences=[0, by])
    with pytest.raises(PlanError, match=why):
        verify(join(PIPELINE.shared, message.SerializeToString(), 1))


def test_each_number_that_differs_alike_is_sent_once() -> None:
    message = pb.PlanClass()
    message.ParseFromString(PIPELINE.of(1))
    assert len(message.differences) > len(message.columns)
    assert len({tuple(column.differences) for column in message.columns}) == len(message.columns)
    assert from_bytes(message.part).ranks == (0,)
    assert all(any(column.differences) for column in message.columns)
    for one, other in itertools.pairwise(sorted(tuple(d.path) for d in message.differences)):
        assert other[: len(one)] != one, "no difference is inside of another"
