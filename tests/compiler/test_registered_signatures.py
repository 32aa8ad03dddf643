"""Signatures that users give: checked when given, tried when first used, and then as good as the table's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow_compiler.core.errors import SignatureError
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.signatures import OpCall, local_op, notation, signatures
from actorflow_compiler.signatures import registration as registry
from signature_checks import failures, instance


@torch.library.custom_op("registered_test::rotate", mutates_args=())
def rotate(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    """(batch, heads, sequence) by (sequence)."""
    return x.flip(-1) * angles * scale


@rotate.register_fake
def _(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("registered_test::flat", mutates_args=())
def flat(x: Tensor, n: int) -> Tensor:
    assert x.shape[0] == n
    return x.reshape(n * x.shape[1]).clone()


@flat.register_fake
def _(x: Tensor, n: int) -> Tensor:
    return x.new_empty(n * x.shape[1])


@torch.library.custom_op("registered_test::fill", mutates_args=("x",))
def fill(x: Tensor) -> None:
    x.zero_()


@pytest.fixture(autouse=True)
def _none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def case(op: str, *args: Any) -> Any:
    return instance(f"registered_test.{op}.default", args)


X, ANGLES = torch.randn(4, 6, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
SQUARE = torch.randn(5, 5, 5, dtype=torch.float64)


@pytest.mark.parametrize("op", [rotate, "registered_test::rotate", "registered_test.rotate.default"])
def test_a_registered_signature_is_used_and_right(op: Any) -> None:
    flow.register_signature(op, "bhS*,S*->bhS")
    found = case("rotate", X, ANGLES)
    texts = ["B, B -> B", "S(0), B -> S(0)", "S(1), B -> S(1)", "P, B -> P", "B, P -> P"]
    made = signatures(found.call, 2)
    assert list(map(str, made)) == texts
    assert {s.source for s in made[1:]} == {"registered"}
    assert [line for parts in (2, 3) for line in failures(found, parts)] == []


def test_an_op_of_torchs_namespaces_is_named_by_itself() -> None:
    flow.register_signature(torch.ops.registered_test.rotate, "bhS,S->bhS")
    flow.register_signature(torch.ops.registered_test.rotate.default, "bHS,S->bHS")
    assert [str(s) for s in signatures(case("rotate", X, ANGLES).call, 2)[1:]] == ["S(0), B -> S(0)"]


def test_several_terms_add_up_and_a_function_may_choose() -> None:
    flow.register_signature(rotate, "bHS,S->bHS", "BhS*,S->BhS")
    assert len(signatures(case("rotate", X, ANGLES).call, 2)) == 4
    assert notation(case("rotate", X, ANGLES).call) == "bHS,S->bHS | BhS*,S->BhS"

    def by_rank(call: OpCall) -> str | None:
        return "bHS,S->bHS" if len(call.ins[0].shape) == 3 else None

    flow.register_signature(rotate, by_rank)
    assert len(signatures(case("rotate", X, ANGLES).call, 2)) == 2
    assert len(signatures(case("rotate", X[0], ANGLES).call, 2)) == 1


def test_sizes_among_the_arguments_are_made_local() -> None:
    flow.register_signature(flat, "ab+,#a->(ab)")
    found = case("flat", torch.randn(6, 5, dtype=torch.float64), 6)
    (by_row,) = (s for s in signatures(found.call, 3) if s.ins == (Split(0),))
    assert local_op(found.call, by_row, 3, 0)[1][1] == 2
    assert [line for parts in (2, 3) for line in failures(found, parts)] == []


@pytest.mark.parametrize(
    ("term", "layout"),
    [
        ("bhs,s->bhs", "S(2), S(0) -> S(2)"),
        ("bhS+,S+->bhS", "P, P -> P"),
        ("bhS,S->hbS", "S(0), B -> S(1)"),
    ],
)
def test_a_registered_signature_that_is_wrong_is_named_with_the_layout_that_shows_it(term: str, layout: str) -> None:
    flow.register_signature("registered_test::rotate", term)
    with pytest.raises(SignatureError) as caught:
        signatures(case("rotate", SQUARE, ANGLES).call, 2)
    for part in (repr(term), "registered_test.rotate.default", layout, f"{__file__}:", "float64["):
        assert part in str(caught.value)
    with pytest.raises(SignatureError):  # still
        signatures(case("rotate", SQUARE, ANGLES).call, 2)


def test_who_asks_for_no_check_gets_none() -> None:
    flow.register_signature(rotate, "bhs,s->bhs", verify=False)
    assert "S(2), S(0) -> S(2)" in map(str, signatures(case("rotate", X, ANGLES).call, 2))


@pytest.mark.parametrize(
    ("op", "terms", "said"),
    [
        ("registered_test::nothing", [".->."], "has to be defined before"),
        ("rotate", [".->."], "'rotate'"),
        (torch.nn.functional.gelu, [".->."], "an op was expected"),
        ("aten::mm", ["mk,kn->mn"], "actorflow knows all"),
        ("aten::mm.wrong", ["mk,kn->mn"], "which of its overloads"),
        (fill, [".->"], "changes its arguments"),
        (rotate, [], "at least one"),
        (rotate, ["bhS,S"], "no '->'"),
        (rotate, ["b?,S->b"], "is no"),
        (rotate, ["a,b,_,c->a"], "4 arguments; the op has 3"),
        (rotate, ["a,b,c->a"], "'scale'"),
        (rotate, ["a,@->a"], "'angles'"),
        (rotate, ["a,b->a,b"], "2 outputs; the op has 1"),
        (rotate, [3], "a int was found"),
        (lambda: None, [".->."], "an op was expected"),
    ],
)
def test_what_cannot_be_registered_is_refused_at_once(op: Any, terms: list[Any], said: str) -> None:
    with pytest.raises(SignatureError, match=said.replace("?", r"\?")):
        flow.register_signature(op, *terms)


def test_a_function_that_gives_no_term_is_named_when_it_is_called() -> None:
    flow.register_signature(rotate, lambda call: "nonsense")
    with pytest.raises(SignatureError, match="nonsense"):
        signatures(case("rotate", X, ANGLES).call, 2)
