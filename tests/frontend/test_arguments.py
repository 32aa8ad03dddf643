"""Taking a call's arguments apart, and what a job returns."""

from __future__ import annotations

import inspect
from collections import namedtuple
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.script_state import tree
from actorflow.script_state.arguments import checksum, flatten, shapes_text
from actorflow_compiler.core.errors import CallError

Pair = namedtuple("Pair", ["loss", "extra"])


@dataclass
class Output:
    loss: Any
    logits: Any = None


def function(x: Any, batch: Any = None, *more: Any, flag: bool = True, **named: Any) -> None: ...


SIGNATURE = inspect.signature(function)


def test_tensors_that_share_the_first_ones_dim_0_are_the_batch():
    call = flatten(
        "job", SIGNATURE, (torch.ones(4, 2), {"ids": np.ones(4), "table": torch.ones(7, 4)}, torch.ones(())), {}
    )
    assert [(s.name, s.shape, s.batch) for s in call.specs] == [
        ("x", (4, 2), True), ("batch.ids", (4,), True), ("batch.table", (7, 4), False), ("more.0", (), False),
    ]  # fmt: skip
    assert "batch.table: float32[7,4]" in shapes_text(call.specs)


def test_the_arguments_come_back_as_they_were_with_other_tensors():
    call = flatten("job", SIGNATURE, (torch.ones(4), {"a": [1, torch.zeros(4)]}), {"flag": False, "z": torch.ones(4)})
    assert call.restore(["A", "B", "C"]) == (("A", {"a": [1, "B"]}), {"flag": False, "z": "C"})  # type: ignore[list-item]
    assert call.spoken == "job(x: float32[4], batch.a.0: int, batch.a.1: float32[4], flag=False, z: float32[4])"


def test_the_key_follows_shapes_dtypes_and_plain_values_but_not_contents():
    def key(*args: Any, **kwargs: Any) -> Any:
        return flatten("job", SIGNATURE, args, kwargs).key

    x = torch.ones(4)
    assert key(x) == key(torch.zeros(4))
    assert hash(key(x)) == hash(key(torch.zeros(4)))
    different = [
        key(x), key(torch.ones(5)), key(x.double()), key(x, 1), key(x, 1.0), key(x, True), key(x, "1"),
        key(x, flag=False), key(x, [1]),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    unhashable = np.random.default_rng()
    assert key(x, unhashable) == key(x, unhashable)


class Text(str):
    def __repr__(self) -> str:
        return "the same"


class Factor(float):
    scale = 1.0


class Named:
    __slots__ = ("name", "scale")

    def __init__(self, name: str, scale: Any) -> None:
        self.name, self.scale = name, scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Power:
    by: Any
    scale: Any = field(default=1.0, compare=False)


def scaled(scale: float) -> Factor:
    made = Factor(1.0)
    made.scale = scale
    return made


class Row(tuple):
    tag: Any = None


class Dims(frozenset):
    tag: Any = None


class Span(timedelta):
    tag: Any = None

    def __copy__(self) -> Span:
        return tagged(Span(self.days), self.tag)  # type: ignore[no-any-return]


def tagged(made: Any, tag: Any) -> Any:
    made.tag = tag
    return made


@pytest.mark.parametrize(
    "different",
    [
        [Power(1), Power(True), Power(1.0), Power((1,)), Power((True,)), Power(Power(1)), Power(Power(True)),
         Power(-0.0), Power(0.0), Power(frozenset([1])), Power(frozenset([True])), Power(Row([1])), Power(Row([True]))],
        [Named("a", 1.0), Named("b", 1.0), Named(1, 1.0), Named(True, 1.0)],
        [frozenset([1]), frozenset([True]), frozenset([1.0])],
        [Text("a"), Text("ab"), "a", Factor(1.0), 1.0, scaled(1.0), scaled(2.0)],
        [tagged(Row([1]), "a"), tagged(Row([2]), "a"), tagged(Row([2]), "b"), Row([1]), Row([True])],
        [tagged(Dims([1]), "a"), tagged(Dims([2]), "a"), tagged(Dims([2]), 1), tagged(Dims([2]), True)],
        [tagged(Span(1), "a"), tagged(Span(2), "a"), tagged(Span(1), "b"),
         Power(tagged(Row([1]), 1)), Power(tagged(Row([2]), 1))],
    ],
    ids=["dataclass", "class", "frozenset", "plain", "tuple", "dims", "span"],
)  # fmt: skip
def test_arguments_that_their_classes_call_equal_may_be_told_apart(different: list[Any]) -> None:
    keys = [flatten("job", SIGNATURE, (torch.ones(4), one), {}).key for one in different]
    assert len(set(keys)) == len(keys)
    assert [flatten("job", SIGNATURE, (torch.ones(4), copy(one)), {}).key for one in different] == keys


@pytest.mark.parametrize("equal", [[Power(1, 1.0), Power(1, 2.0)], [Named("a", 1.0), Named("a", [2])]])
def test_what_the_equality_of_a_class_leaves_out_makes_no_difference(equal: list[Any]) -> None:
    first, second = [flatten("job", SIGNATURE, (torch.ones(4), one), {}).key for one in equal]
    assert first == second


def test_a_large_argument_counts_as_its_class_says() -> None:
    def key(argument: Any) -> Any:
        return flatten("job", SIGNATURE, (torch.ones(4), argument), {}).key

    nodes = [Row([number]) for number in range(30)]
    for one in nodes:
        one.tag = nodes
    assert [key(one) for one in nodes] == [key(one) for one in nodes]
    assert len({key(one) for one in nodes}) == len(nodes)
    assert key(Power((1,) * 1000)) == key(Power((1,) * 1000)) != key(Power((2,) * 1000))
    text = Text("a")
    text.tag = [*range(1000)]  # type: ignore[attr-defined]
    assert key(text) == key(text) != key(copy(text))


def test_an_argument_of_a_class_of_its_own_is_read_with_its_attributes() -> None:
    @flow.global_function(type="predict")
    def step(x: torch.Tensor, by: Any) -> Any:
        return x * by.scale

    first, second = scaled(1.0), scaled(2.0)
    assert [float(step(torch.ones(1), one)) for one in (first, second, first)] == [1, 2, 1]
    plans = len(step.plans)
    assert [float(step(torch.ones(1), scaled(factor))) for factor in (1.0, 2.0)] == [1, 2]
    assert len(step.plans) == plans
    first.scale = 3.0
    assert float(step(torch.ones(1), first)) == 3


def test_the_script_may_reuse_its_tensors_and_arrays():
    x, y = torch.ones(2), np.ones(2)
    call = flatten("job", SIGNATURE, (x, y), {})
    x.zero_()
    y[:] = 0
    assert all((t == 1).all() for t in call.tensors)


def test_arrays_of_another_byte_order_are_taken_as_numbers():
    call = flatten("job", SIGNATURE, (np.arange(3.0).astype(">f8"), np.arange(3).astype(">i4")), {})
    assert [(t.dtype, t.tolist()) for t in call.tensors] == [(torch.float64, [0, 1, 2]), (torch.int32, [0, 1, 2])]


def test_arguments_that_fit_no_parameter_are_an_error_that_shows_the_signature():
    with pytest.raises(CallError, match=r"job\(a\).*too many"):
        flatten("job", inspect.signature(lambda a: a), (1, 2), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_sees_every_change(dtype: torch.dtype):
    x = torch.zeros(3, 2, dtype=dtype)
    before = checksum([x])
    assert before == checksum([torch.zeros(3, 2, dtype=dtype).T.contiguous().T])
    x[2, 1] = 1
    assert checksum([x]) != before


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1), None, 3, "text", [torch.ones(1), 2.5], (torch.ones(1),),
        {"loss": torch.ones(1), "n": {1: (True, None)}},
        Output(torch.ones(1), [torch.zeros(2)]), Pair(torch.ones(1), "x"),
    ],
    ids=["tensor", "none", "number", "text", "list", "tuple", "dict", "dataclass", "named tuple"],
)  # fmt: skip
def test_what_a_job_returns_is_rebuilt_from_json(value: Any):
    import json

    tensors: list[Tensor] = []
    shape = json.loads(json.dumps(tree.describe(value, tensors)))
    again = tree.rebuild(shape, tensors, globals())
    assert again == value
    assert type(again) is type(value)


def test_what_cannot_travel_is_refused_with_its_type():
    with pytest.raises(CallError, match="Generator"):
        tree.describe([np.random.default_rng()], [])
    with pytest.raises(CallError, match="key"):
        tree.describe({(1, 2): 3}, [])


def test_only_dataclasses_and_named_tuples_can_be_rebuilt():
    with pytest.raises(CallError, match="os:system"):
        tree.rebuild({"class": "os:system", "fields": []}, [])
    with pytest.raises(CallError, match="subprocess:Popen"):
        tree.rebuild({"class": "subprocess:Popen", "fields": [["args", {"value": "true"}]]}, [])


@pytest.mark.parametrize(
    "x", [torch.arange(6.0).view(2, 3).t(), torch.tensor([True, False]), torch.tensor(3), torch.ones(3, 1).expand(3, 4)]
)
def test_tensors_are_copied_to_where_the_device_reads_them(x: torch.Tensor) -> None:
    rooms: list[torch.Tensor] = []

    def room(nbytes: int) -> torch.Tensor:
        rooms.append(torch.empty(nbytes, dtype=torch.uint8))
        return rooms[-1]

    (copy,) = flatten("job", inspect.signature(lambda a: a), (x,), {}, room).tensors
    assert torch.equal(copy, x)
    assert copy.is_contiguous()
    (used,) = rooms
    assert copy.untyped_storage().data_ptr() == used.untyped_storage().data_ptr()
    assert used.numel() == x.numel() * x.element_size()
    empty = flatten("job", inspect.signature(lambda a: a), (torch.ones(0, 3),), {}, room).tensors[0]
    assert empty.shape == (0, 3)
