"""Plans of all shapes, legal or not, go through protobuf and JSON and come back as they were."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import ITEM_BYTES, Arg, Ref, Symbol
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P, Split
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import (
    LAST,
    SUM,
    Actor,
    ActorKind,
    Body,
    Box,
    Collective,
    CollectiveKind,
    Combine,
    CombineKind,
    Constant,
    Exchange,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Order,
    Plan,
    Plane,
    RankBytes,
    Read,
    Register,
    Result,
    Send,
    Step,
    Summary,
    TensorSpec,
    ToResult,
    Variable,
    VariableKind,
)
from actorflow_compiler.plan.proto import from_bytes, to_bytes, to_proto
from actorflow_compiler.plan.summary import plan_digest
from actorflow_compiler.plan.text import from_json, to_json
from fewer import fewer

RANK_0 = [{"first": 0, "count": 1}]
SUM_OF = {"kind": "all_reduce", "plane": "gloo"}
FORMS = [
    pytest.param(lambda plan: from_bytes(to_bytes(plan)), id="protobuf"),
    pytest.param(lambda plan: from_json(to_json(plan)), id="json"),
]

word = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
small = st.integers(0, 9)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
shape = st.lists(u64, max_size=3).map(tuple)
dtype = st.sampled_from(sorted(ITEM_BYTES))


def tuples(of: st.SearchStrategy[object], most: int = 3) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(of, max_size=most).map(tuple)


arg = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | word | word.map(Symbol) | u32.map(Ref),
    tuples,
    max_leaves=6,
)
step = st.builds(Step, word, tuples(arg), tuples(st.tuples(word, arg)), tuples(st.integers(-1, 2**31 - 1)))
body = st.builds(Body, u32, tuples(step), tuples(u32))
box = st.builds(Box, shape, shape)
exchange = st.builds(Exchange, tuples(tuples(box)), tuples(tuples(box)), st.booleans())
plane = st.sampled_from(Plane)
comm = st.builds(Send, u32, u32, u32, plane) | st.builds(
    Collective, st.sampled_from(CollectiveKind), u32, tuples(u32), tuples(exchange), plane
)
in_register = st.builds(FromRegister, u32, u32)
variable_name = word.map(OfVariable)
operand = in_register | variable_name | word.map(OfScalar) | st.just(OfPiece()) | word.map(OfInput)
target = in_register | variable_name | u32.map(ToResult)
actor = st.builds(
    Actor, u32, word, u32, word, st.sampled_from(ActorKind), u32, st.none() | small, tuples(operand), tuples(target),
    st.none() | comm, st.floats(), u32,
)  # fmt: skip
combine = st.sampled_from([LAST, SUM]) | st.builds(Combine, st.just(CombineKind.CAT), small)
spec = st.builds(TensorSpec, shape, dtype, word, combine, word)
register = st.builds(Register, u32, u32, tuples(st.builds(Read, u32, u32)), tuples(spec), u32, u32, u32)
sbp = st.just(B) | st.just(P) | st.builds(Split, st.integers(-3, 3), st.integers(1, 4), st.integers(1, 16))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Placement, tuple[object, ...]]:
    hierarchy = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    ranks = draw(st.permutations(range(math.prod(hierarchy))))
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    return Placement(kind, tuple(ranks), hierarchy), tuple(draw(sbp) for _ in hierarchy)


@st.composite
def variables(draw: st.DrawFn) -> Variable:
    return Variable(draw(word), draw(shape), draw(dtype), *draw(layouts()), draw(st.sampled_from(VariableKind)))  # type: ignore[arg-type]


@st.composite
def results(draw: st.DrawFn) -> Result:
    return Result(draw(u64), draw(shape), draw(dtype), *draw(layouts()))  # type: ignore[arg-type]


summary = st.builds(
    Summary, tuples(word), u32, st.floats(), st.floats(0, 1), tuples(st.builds(RankBytes, u32, u64, u64, u64)),
    tuples(st.tuples(word, u64)),
)  # fmt: skip
plans = st.builds(
    Plan, word, st.integers(1, 2**32 - 1), u32, tuples(body), tuples(actor), tuples(register), tuples(variables()),
    tuples(results()), tuples(st.builds(Order, u32, word, tuples(u32))),
    tuples(st.builds(Constant, word, shape, dtype, st.binary(max_size=9))), tuples(word), summary,
    tuples(st.integers(0, 2**31 - 1)), mode=st.sampled_from(Mode),
)  # fmt: skip


def with_args(*args: Arg) -> Plan:
    """The smallest plan whose only step has these arguments."""
    return Plan("p", 1, 1, (Body(0, (Step("aten.add.Tensor", args, (), (0,)),), (0,)),), (), ())


@pytest.mark.parametrize("through", FORMS)
@settings(max_examples=fewer(40), deadline=None)
@given(plan=plans)
def test_any_plan_comes_back_as_it_was(through: object, plan: Plan) -> None:
    assert callable(through)
    back = through(plan)
    assert repr(back) == repr(plan)  # tells 1 from 1.0 and True, -0.0 from 0.0, and accepts NaN
    if "nan" not in repr(plan):
        assert back == plan


@pytest.mark.parametrize("through", FORMS)
@pytest.mark.parametrize(
    "value",
    [
        0, 1, True, False, None, 0.0, -0.0, 1.0, 5e-324, 0.1, math.inf, -math.inf, math.nan, 2**53 + 1, 2**63 - 1,
        -(2**63), "", "None", "é\0\n", Symbol("torch.float32"), "torch.float32", Ref(0), (), ((),),
        (None, (Ref(1), (True,))),
    ],
    ids=repr,
)  # fmt: skip
def test_an_argument_keeps_its_type_and_value(through: object, value: Arg) -> None:
    assert callable(through)
    back = through(with_args(value)).bodies[0].steps[0].args
    assert repr(back) == repr((value,))


@pytest.mark.parametrize("through", FORMS)
def test_an_actor_without_body_or_communication_stays_without(through: object) -> None:
    assert callable(through)
    bare = Actor(0, "a", 0, "compute", "forward")
    first = replace(bare, id=1, body=0, comm=Send(0, 0, 1))
    back = through(Plan("p", 2, 1, (Body(0, (), ()),), (bare, first), ()))
    assert back.actors == (bare, first)
    assert back.actors[0].body is None
    assert back.actors[0].comm is None


@pytest.mark.parametrize("value", [2**63, [1], {"a": 1}, 1j, b"x", Ref(-1), "\ud800"], ids=repr)
def test_what_a_message_cannot_carry_is_refused_by_name(value: Arg) -> None:
    with pytest.raises(PlanError, match=r"plan 'p' holds a value that a message cannot carry: ."):
        to_bytes(with_args(value))


@settings(max_examples=fewer(50), deadline=None)
@given(data=st.binary(max_size=60))
def test_bytes_that_are_no_plan_never_raise_anything_but_a_plan_error(data: bytes) -> None:
    with contextlib.suppress(PlanError):
        from_bytes(data)


@settings(max_examples=fewer(50), deadline=None)
@given(plan=plans, at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_byte_gives_a_plan_or_a_plan_error(plan: Plan, at: int, byte: int) -> None:
    data = bytearray(to_bytes(plan))
    data[at % len(data)] = byte
    with contextlib.suppress(PlanError):
        from_bytes(bytes(data))


def test_a_plan_takes_no_more_bytes_for_more_ranks() -> None:
    """Of 2 stages of 1,024 × 8 ranks, each variable and each collective names thousands."""
    ranks = tuple(range(8 * 1024, 16 * 1024))
    found = Placement("cuda", ranks, (1024, 8))
    comms = [Collective(CollectiveKind.ALL_REDUCE, 0, group) for group in (ranks[::8], ranks[:8], ranks)]
    plan = replace(
        with_args(1),
        world=16 * 1024,
        actors=tuple(Actor(k, "a", ranks[0], "compute", "boxing", comm=comm) for k, comm in enumerate(comms)),
        variables=(Variable("w", (8, 8), "bool", found, (Split(0), B), VariableKind.PARAMETER),),
    )
    assert from_bytes(to_bytes(plan)) == plan
    assert len(to_bytes(plan)) < 1000


@pytest.mark.parametrize("data", [b"", b"\xff", b"not a plan", to_bytes(with_args(1))[:-1]], ids=repr)
def test_bytes_that_are_no_plan_raise_a_plan_error(data: bytes) -> None:
    with pytest.raises(PlanError):
        from_bytes(data)


def test_a_field_of_another_version_is_refused_at_any_depth() -> None:
    message = to_proto(with_args(1))
    message.bodies[0].MergeFromString(b"\xf8\x3f\x01")  # field 1023
    with pytest.raises(PlanError, match="same version"):
        from_bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("operand", lambda m: m.actors[0].operands.add()),
        ("target", lambda m: m.actors[0].targets.add()),
        ("argument", lambda m: m.bodies[0].steps[0].args.add()),
        ("dtype", lambda m: m.constants.add(name="c", dtype="float31")),
        ("bodies: unknown mode 'fast'; known: eager, inductor", lambda m: setattr(m, "mode", "fast")),
        (
            "combine 'cat:x'",
            lambda m: m.registers.add().tensors.add(dtype="bool", combine="cat:x"),
        ),
        ("actor b: unknown kind 'dance'", lambda m: m.actors.add(name="b", kind="dance")),
        (
            "variable w: unknown kind 'state'",
            lambda m: m.variables.add(
                name="w", dtype="bool", kind="state", placement_type="cpu", ranks=RANK_0, hierarchy=[1], sbp="B"
            ),
        ),
        (
            "one entry",
            lambda m: m.results.add(dtype="bool", placement_type="cpu", ranks=RANK_0, hierarchy=[1], sbp="[B,B]"),
        ),
        ("SBP", lambda m: m.results.add(dtype="bool", placement_type="cpu", ranks=RANK_0, hierarchy=[1], sbp="[B,x]")),
        ("mesh", lambda m: m.results.add(dtype="bool", placement_type="cpu", ranks=RANK_0, hierarchy=[2], sbp="B")),
        (
            "actor a: 4,294,967,295 ranks",
            lambda m: m.actors.add(name="a", kind="boxing", comm={**SUM_OF, "group": [{"count": 2**32 - 1}]}),
        ),
        (
            "actor a: ranks below 0",
            lambda m: m.actors.add(
                name="a", kind="boxing", comm={**SUM_OF, "group": [{"first": 1, "step": -1, "count": 3}]}
            ),
        ),
        (
            "actor a: exchange 7 was found, the plan has 0",
            lambda m: m.actors.add(name="a", kind="boxing", comm={**SUM_OF, "exchanges": [7]}),
        ),
    ],
)
def test_a_message_with_a_missing_or_odd_part_raises_a_plan_error_that_names_it(path: str, change: object) -> None:
    assert callable(change)
    message = to_proto(replace(with_args(1), actors=(Actor(0, "a", 0, "compute", "forward"),)))
    change(message)
    with pytest.raises(PlanError, match=path):
        from_bytes(message.SerializeToString())


@pytest.mark.parametrize(
    "text",
    ["", "{", "5", "[]", "[" * 100_000, '{"world": 1, "bodies": 5}', '{"world": 1, "layers": []}', '{"world": NaN}'],
    ids=lambda text: text[:22],
)
def test_json_that_is_no_plan_raises_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError):
        from_json(text)


@settings(max_examples=fewer(30), deadline=None)
@given(plan=plans)
def test_json_opens_with_a_complete_summary(plan: Plan) -> None:
    found = json.loads(to_json(plan))
    assert next(iter(found)) == "summary"
    assert list(found["summary"]) == ["stages", "actors", "flops", "redundant_flops", "memory", "moved"]
    assert found["summary"]["redundant_flops"] == plan.summary.redundant_flops
    assert found["summary"]["moved"] == [{"kind": kind, "bytes": count} for kind, count in plan.summary.moved]


@settings(max_examples=fewer(30), deadline=None)
@given(plan=plans.filter(lambda plan: "nan" not in repr(plan)))  # JSON has one NaN, floats have many
def test_a_digest_follows_the_plan_alone(plan: Plan) -> None:
    assert plan_digest(from_json(to_json(plan))) == plan_digest(plan)
    assert plan_digest(replace(plan, pieces=plan.pieces ^ 1)) != plan_digest(plan)
    assert len(plan_digest(plan)) == 64


def test_equal_boxes_of_a_plan_that_was_read_are_one_object() -> None:
    def box() -> Box:
        return Box((0, 4), (1, 2))

    comms = [
        Collective(CollectiveKind.ALL_TO_ALL, at, (0, 1), (Exchange(((box(),), (box(),)), ((box(),), (box(),))),))
        for at in range(2)
    ]
    actors = tuple(Actor(at, f"a{at}", 0, "comm", ActorKind.BOXING, comm=comm) for at, comm in enumerate(comms))
    plan = from_bytes(to_bytes(Plan("p", 2, 1, (), actors, ())))
    assert plan.actors == actors
    found = [
        id(box)
        for actor in plan.actors
        if isinstance(actor.comm, Collective)
        for exchange in actor.comm.exchanges
        for boxes in (*exchange.send, *exchange.receive)
        for box in boxes
    ]
    assert len(found) == 8
    assert len({*found}) == 1
    assert len(to_proto(plan).exchanges) == 1, "it is sent once"
