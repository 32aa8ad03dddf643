"""Torch's own samples of operators give on parts what they give on one device; the judge of that can tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import actorflow.eager.tensor_methods  # noqa: F401 -- so that global tensors know their ops
from opinfo_runs import PASSED, Ours, cases, judge, operators

SOME = (
    "add", "addmm", "amax", "argsort", "bmm", "cat", "clamp", "cumsum", "diagonal", "einsum", "expand", "gather",
    "index_add", "index_select", "linalg.cholesky", "linalg.vector_norm", "logsumexp", "masked_fill", "matmul", "mean",
    "nn.functional.conv2d", "nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.gelu",
    "nn.functional.layer_norm", "nn.functional.max_pool2d", "nn.functional.pad.constant",
    "nn.functional.scaled_dot_product_attention", "permute", "prod", "reshape", "roll", "scatter_add", "softmax",
    "sort", "split", "std", "sum", "topk", "tril", "unfold", "var_mean", "where",
)  # fmt: skip
IN_PLACE = (
    "add_", "clamp_", "index_add_", "masked_fill_", "polygamma_.polygamma_n_0", "scatter_", "sqrt_", "tril_", "xlogy_",
)  # fmt: skip


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    made = Ours()
    yield made
    made.close()


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("name", SOME)
def test_an_operator_of_torch_gives_on_four_ranks_what_it_gives_on_one(ours: Ours, name: str) -> None:
    found = list(cases(operators()[name], samples=2, layouts=2))
    assert found
    for case in found:
        forward, backward = judge(ours, case)
        assert forward == PASSED, forward.why
        assert backward.kind in ("passed", "none"), backward.why


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_operator_that_changes_its_operand_changes_it_on_every_rank(ours: Ours, name: str) -> None:
    found = list(cases(operators(in_place=True)[name], samples=2, layouts=2))
    assert found
    for case in found:
        forward, backward = judge(ours, case)
        assert forward == PASSED, forward.why
        assert backward.kind in ("passed", "none"), backward.why


@pytest.mark.parametrize("name", ["add", "matmul", "softmax", "sum", "nn.functional.layer_norm", "cumsum", "reshape"])
def test_an_operator_gives_the_same_on_a_mesh(name: str) -> None:
    system = Ours(axes=2)
    for case in cases(operators()[name], samples=2, layouts=3, axes=2):
        forward, backward = judge(system, case)
        assert forward == PASSED, forward.why
        assert backward.kind in ("passed", "none"), backward.why
    system.close()


class Off(Ours):
    """A system that is wrong."""

    def whole(self, x: Any) -> Any:
        return super().whole(x) * 1.01


class Loud(Ours):
    """A system that has no rule for what a rank holds."""

    def whole(self, x: Any) -> Any:
        raise NotImplementedError("no rule")


def test_what_is_wrong_and_what_is_refused_are_told_apart() -> None:
    case = next(cases(operators()["mm"], samples=1, layouts=1))
    for system, kind in ((Off(), "wrong"), (Loud(), "refused")):
        forward, backward = judge(system, case)
        assert (forward.kind, backward.kind) == (kind, kind)
        system.close()


def test_random_operators_are_not_judged() -> None:
    assert list(cases(operators()["bernoulli"], samples=2, layouts=1)) == []
