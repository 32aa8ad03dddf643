"""What a signature is, how cuts follow through groups of indices, and that a wrong line is caught."""

from __future__ import annotations

import pytest
import torch

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.core.sbp import B, P, Split, parse
from actorflow_compiler.library import OPS
from actorflow_compiler.signatures import (
    OpCall,
    derive,
    local_op,
    notation,
    shard,
    signatures,
    table,
    term_matching,
    unshard,
)
from actorflow_compiler.signatures.notation import parse as parse_term
from signature_checks import Collector, failures, instance
from signature_models import Gpt, classes, step_graph
from signature_samples import f, n


def shown(call: OpCall, parts: int, *wanted: str) -> set[str]:
    cuts = [s for s in map(parse, wanted) if isinstance(s, Split)]
    return {str(s) for s in signatures(call, parts, wanted=cuts)}


def test_the_first_signature_is_all_broadcast() -> None:
    first = signatures(instance("aten.mm.default", [f(4, 6), f(6, 8)]).call, 2)[0]
    assert (first.ins, first.outs, first.letter) == ((B, B), (B,), None)


def test_a_product_of_matrices_has_three_splits_and_two_sums() -> None:
    assert shown(instance("aten.mm.default", [f(4, 6), f(6, 8)]).call, 2) == {
        "B, B -> B",
        "S(0), B -> S(0)",
        "B, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "P, B -> P",
        "B, P -> P",
    }


def test_an_op_without_a_line_has_the_broadcast_signature_only() -> None:
    call = OpCall("somebody.elses.op", (Ref(0),), (), (Meta((4,), "float32"),), (Meta((4,), "float32"),))
    assert shown(call, 2) == {"B -> B"}
    assert notation(call) == "->"
    assert local_op(call, signatures(call, 2)[0], 2, 1) == (call.op, call.args, (), (Meta((4,), "float32"),))


def test_random_ops_are_broadcast() -> None:
    call = instance("aten.bernoulli.p", [f(4, 4), 0.5]).call
    assert shown(call, 2) == {"B -> B"}


def test_an_op_whose_shapes_do_not_fit_its_line_is_broadcast_only() -> None:
    call = OpCall(
        "aten.mm.default", (Ref(0), Ref(1)), (), (Meta((4, 4, 4), "float32"),) * 2, (Meta((4, 4, 4), "float32"),)
    )
    assert shown(call, 2) == {"B, B -> B"}


def test_whole_numbers_are_never_sums_of_terms() -> None:
    assert shown(instance("aten.sum.dim_IntList", [n(4, 6, below=9), [0]]).call, 2) == {"B -> B", "S(1) -> S(0)"}


def test_adding_a_number_does_not_let_a_sum_of_terms_pass() -> None:
    assert "P -> P" in shown(instance("aten.add.Tensor", [f(4), 0]).call, 2)
    assert "P -> P" not in shown(instance("aten.add.Tensor", [f(4), 1.5]).call, 2)


def test_an_uneven_batch_goes_through_a_view_in_units_of_rows() -> None:
    call = instance("aten.view.default", [f(5, 6, 4), [30, 4]]).call
    assert "S(0) -> S(0,1,6)" in shown(call, 2)
    assert "S(0) -> S(0)" in shown(instance("aten.view.default", [f(4, 6, 4), [24, 4]]).call, 2)


def test_equal_cuts_have_equal_descriptions() -> None:
    call = instance("aten.view.default", [f(24, 4), [4, 6, 4]]).call
    assert "S(0) -> S(0)" in shown(call, 2, "S(0,1,6)")


def test_blocks_spread_from_a_fused_projection_to_its_weight() -> None:
    split = instance("aten.split.Tensor", [f(5, 24), 8, 1]).call
    assert "S(1,3) -> S(1), S(1), S(1)" in shown(split, 2)
    product = instance("aten.mm.default", [f(5, 6), f(6, 24)]).call
    assert "B, S(1,3) -> S(1,3)" not in shown(product, 2)
    assert "B, S(1,3) -> S(1,3)" in shown(product, 2, "S(1,3)")


def test_units_spread_from_heads_to_the_weight_that_makes_them() -> None:
    heads = instance("aten.view.default", [f(5, 12), [5, 3, 4]]).call
    assert "S(1,1,4) -> S(1)" in shown(heads, 2)
    assert "B, S(1,1,4) -> S(1,1,4)" in shown(instance("aten.mm.default", [f(5, 6), f(6, 12)]).call, 2, "S(1,1,4)")


def test_blocks_within_an_index_of_a_group_multiply() -> None:
    call = instance("aten.view.default", [f(2, 12, 5), [24, 5]]).call
    assert "S(1,3) -> S(0,6)" in shown(call, 2, "S(1,3)")
    assert "S(1,3) -> S(0,6)" in shown(call, 2, "S(0,6)")


def test_a_granularity_that_nobody_has_is_not_generated() -> None:
    call = instance("aten.mm.default", [f(4, 6), f(6, 8)]).call
    assert shown(call, 2, "S(2,3)", "S(0,5)", "S(0,1,7)") == shown(call, 2)


def test_a_dim_of_size_one_is_not_split() -> None:
    assert shown(instance("aten.relu.default", [f(1, 4)]).call, 2) == {"B -> B", "S(1) -> S(1)"}


def test_an_output_that_nobody_uses_does_not_limit_the_others() -> None:
    args = [f(5, 7), torch.tensor([0, 1, 2, 3, 4]), None, 2, -100]
    used = instance("aten.nll_loss_forward.default", args, used=[True, False])
    (split,) = [s for s in signatures(used.call, 2) if s.letter == "n"]
    assert split.outs == (P, None)
    assert len(local_op(used.call, split, 2, 0)[3]) == 1


def test_device_sizes_stand_in_the_arguments() -> None:
    call = instance("aten.expand.default", [f(1, 3), [5, 3]]).call
    split = next(s for s in signatures(call, 2) if s.outs == (Split(0),))
    assert [local_op(call, split, 2, i)[1][1] for i in range(2)] == [(3, 3), (2, 3)]


def test_views_become_reshapes_because_parts_may_have_other_strides() -> None:
    call = instance("aten.view.default", [f(4, 6), [24]]).call
    op, args, kwargs, metas = local_op(call, signatures(call, 2)[0], 2, 0)
    assert (op, args, kwargs, metas) == ("aten.reshape.default", (Ref(0), (24,)), (), (Meta((24,), "float64"),))


def test_a_vocabulary_that_is_split_looks_up_by_the_offset_of_each_part() -> None:
    call = instance("aten.embedding.default", [f(7, 4), n(3, 5, below=7)]).call
    split = next(s for s in signatures(call, 3) if s.letter == "v")
    assert str(split) == "S(0), B -> P"
    assert [local_op(call, split, 3, i)[:2] for i in range(3)] == [
        ("actorflow.embedding_part", (Ref(0), Ref(1), at, 7)) for at in (0, 3, 5)
    ]


@pytest.mark.parametrize("index", [-1, 7, 99])
def test_an_index_that_a_vocabulary_has_not_fails_in_every_part_of_it(index: int) -> None:
    for first, rows in ((0, 3), (3, 2), (5, 2)):
        with pytest.raises(IndexError):
            OPS["embedding_part"](torch.randn(rows, 4), torch.tensor([2, index]), first, 7)


def test_a_signature_serves_the_parts_that_an_earlier_axis_made() -> None:
    whole = instance("aten.view.default", [f(5, 6, 4), [30, 4]]).call
    first = next(s for s in signatures(whole, 2) if s.ins == (Split(0),))
    for index, batch in enumerate((3, 2)):
        op, args, kwargs, outs = local_op(whole, first, 2, index)
        local = OpCall(op, args, kwargs, (Meta((batch, 6, 4), "float64"),), outs)
        second = next(s for s in signatures(local, 2) if s.ins == (Split(2),))
        assert local_op(local, second, 2, 1)[1] == (Ref(0), (batch * 6, 2))


@pytest.mark.parametrize("text", ["S(0)", "S(1)", "S(1,3)", "S(1,1,4)", "S(1,3,2)", "B", "P"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16])
def test_a_tensor_comes_back_from_its_parts(text: str, parts: int) -> None:
    whole = f(5, 12)
    for generator in (None, torch.Generator().manual_seed(1)):
        pieces = shard(whole, parse(text), parts, generator)
        assert len(pieces) == parts
        torch.testing.assert_close(unshard(pieces, parse(text)), whole)


def test_a_cut_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not fit"):
        shard(f(5, 12), Split(0, 2), 2)


@pytest.mark.parametrize("text", ["ab", "a$->a", "a(b->a", "a<1>->a"])
def test_a_term_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"->|dim|operand"):
        parse_term(text)


MUTANTS = {
    "gelu is not linear": ("aten.gelu.default", ".+->.", [f(5, 4)]),
    "both factors cannot be sums": ("aten.mul.Tensor", ".+,.+->.", [f(5, 4), f(5, 4)]),
    "a divisor is not linear": ("aten.div.Tensor", ".+,.+->.", [f(5, 4), f(5, 4, low=0.5)]),
    "softmax needs its whole dim": ("aten._softmax.default", ".->.", [f(5, 4), 1, False]),
    "a maximum is no sum": ("aten.amax.default", ".,@->/", [f(5, 4), [0]]),
    "a running sum needs its whole dim": ("aten.cumsum.default", ".+,_->.", [f(5, 4), 1]),
    "the bias is added once": ("aten.addmm.default", "mn,mk*,kn*->mn", [f(3), f(5, 4), f(4, 3)]),
    "rows and columns are not the same": ("aten.t.default", "ab+->ab", [f(4, 4)]),
    "the height of an image": ("aten.avg_pool2d.default", ".chW+->.chX", [f(2, 3, 4, 5), [3, 3], [1, 1], [1, 1]]),
    "layer norm is over all of its dim": (
        "aten.native_layer_norm.default",
        ".n,_,n,n->.n,.1,.1",
        [f(5, 4), [4], f(4), f(4), 1e-5],
    ),
    "the order of a group": ("aten.view.default", "abc+,#->(ba)c", [f(4, 6, 2), [24, 2]]),
    "columns of a table": ("aten.embedding.default", "dv+,.<v>->.d", [f(4, 4), n(5, below=4)]),
    "an offset is added once": ("aten.add.Scalar", ".+,_->.", [f(5, 4), 1.0]),
    "a selected dim": ("aten.select.int", "ab+->b", [f(5, 4), 0, 1]),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_wrong_line_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, line, args = MUTANTS[what]
    case = instance(op, args)
    assert not list(failures(case, 2))
    monkeypatch.setitem(table.TABLE, op, line)
    forget()
    try:
        assert list(failures(case, 2))
    finally:
        monkeypatch.undo()
        forget()


def forget() -> None:
    term_matching.index_call.cache_clear()
    derive._signatures.cache_clear()


def test_the_signatures_of_an_op_are_derived_once() -> None:
    tokens = torch.randint(0, 11, (5, 6))
    module, inputs = step_graph(Gpt("where"), classes, tokens, tokens)
    collector = Collector(module)
    collector.run(*inputs)
    forget()
    for _ in range(3):
        for call in collector.calls.values():
            signatures(call, 2, wanted=(Split(0, 3), Split(1, 3), Split(2, 3)))
    known = derive._signatures.cache_info()
    assert known.misses == known.currsize <= len(collector.calls)
    assert known.hits >= 2 * known.misses
