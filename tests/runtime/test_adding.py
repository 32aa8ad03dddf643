"""Products that add up over micro-batches go straight into their sums, and no others do."""

from __future__ import annotations

import torch

from actorflow.runtime.bodies.adding import adding, products
from actorflow.runtime.bodies.kernels import Kernels
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput, OfPiece
from runtime.programs import MM, V0, V1, V2, V3, V4, V5, Program, body, on, spec, step

HERE = on(0)
# x times piece; its products: one for outside alone, one that is read again, one that leaves twice
BUSY = body(
    3,
    step("aten.mul.Tensor", V0, V2, outs=[3]),
    step("aten.mm.default", V3, V1, outs=[4]),
    step("aten.mm.default", V1, V3, outs=[5]),
    step("aten.relu.default", V5, outs=[6]),
    step("aten.bmm.default", V3, V4, outs=[7]),
    outputs=[4, 5, 6, 7, 7],
)


def test_only_products_that_nobody_else_holds_are_made_in_their_sums() -> None:
    twice = body(2, step("aten.mm.default", V0, V1, outs=[2]), outputs=[2, 2])
    batched = body(2, step("aten.bmm.default", V0, V1, outs=[2]), outputs=[2])
    assert products(MM, [0]) == (0,)
    assert products(MM, []) == ()
    assert products(batched, [0]) == (0,)
    assert products(twice, [0, 1]) == ()
    assert products(BUSY, range(5)) == ()  # the bmm reads the first, the relu the second, the last leaves twice


def test_a_product_is_added_to_the_operand_that_holds_its_sum() -> None:
    a, b, sum_ = torch.randn(2, 3), torch.randn(3, 2), torch.randn(2, 2)
    expected = sum_ + a @ b
    (got,) = Kernels(torch.device("cpu"), {}).kernel(adding(MM, [0]))([a, b, sum_])
    assert got is sum_
    torch.testing.assert_close(got, expected)


def test_sums_of_products_and_of_others_are_those_of_torch_token_after_token() -> None:
    """One sum is of a product and one of something else; a second token begins anew, and results stay as they were."""
    of = body(
        3,
        step("aten.mul.Tensor", V0, V2, outs=[3]),
        step("aten.relu.default", V3, outs=[4]),
        step("aten.mm.default", V3, V1, outs=[5]),
        step("aten.mm.default", V1, V3, outs=[6]),
        outputs=[4, 6, 5],
    )
    p = Program(pieces=4)
    out = [spec(2, 3, combine="sum"), spec(3, 3, combine="sum"), spec(2, 2, combine="sum")]
    made = p.actor("F", OfInput("x"), OfInput("w"), OfPiece(), body=of, out=out, rate=4, fill=4, slots=2)
    for token, shape in zip(made, [(2, 3), (3, 3), (2, 2)], strict=True):
        p.result(token, HERE, (B,), shape)
    with LocalCluster(p.plan(), library={}) as cluster:
        called = []
        for _ in range(3):
            x, w = torch.randn(2, 3), torch.randn(3, 2)
            called.append((x, w, cluster.run({"x": x, "w": w})))
    for x, w, (plain, wx, xw) in called:
        torch.testing.assert_close(plain, sum(torch.relu(x * i) for i in range(4)))
        torch.testing.assert_close(wx, w @ x * 6)
        torch.testing.assert_close(xw, x @ w * 6)


def test_a_register_that_is_filled_several_times_in_an_iteration_gets_sums_of_its_own_firings() -> None:
    of = body(3, step("aten.mul.Tensor", V0, V2, outs=[3]), step("aten.mm.default", V3, V1, outs=[4]), outputs=[4])
    p = Program(pieces=4)
    (y,) = p.actor(
        "F", OfInput("x"), OfInput("w"), OfPiece(), body=of, out=[spec(2, 2, combine="sum")], rate=4, fill=2, slots=2
    )
    (joined,) = p.actor("join", y, out=[spec(4, 2, combine="cat:0")], rate=2, fill=2)
    p.result(joined, HERE, (B,), (4, 2))
    x, w = torch.randn(2, 3), torch.randn(3, 2)
    with LocalCluster(p.plan(), library={}) as cluster:
        (got,) = cluster.run({"x": x, "w": w})
    torch.testing.assert_close(got, torch.cat([x @ w * 1, x @ w * 5]))
