"""Kernels made from bodies compute what the same torch calls compute."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch

from actorflow.runtime.bodies.kernels import Kernels, culprit, resolve
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Symbol
from actorflow_compiler.plan.plan import Body
from runtime.programs import V0, V1, V2, V3, V4, body, step

CPU = torch.device("cpu")


def run(of: Body, *inputs: object, **library: object) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return Kernels(CPU, library).kernel(of)(list(inputs))  # type: ignore[arg-type]


def test_a_kernel_computes_what_the_same_torch_calls_compute() -> None:
    of = body(
        3,
        step("aten.addmm.default", V0, V1, V2, outs=[3], beta=0.5, alpha=2),
        step("aten.relu.default", V3, outs=[4]),
        step("aten.sum.dim_IntList", V4, (0, -1), True, outs=[5]),
        outputs=[4, 5, 0],
    )
    b, x, w = torch.randn(3), torch.randn(4, 5), torch.randn(5, 3)
    hidden, total, same = run(of, b, x, w)
    expected = torch.relu(torch.addmm(b, x, w, beta=0.5, alpha=2))
    assert torch.equal(hidden, expected)
    assert torch.equal(total, expected.sum((0, -1), True))
    assert same is b


@pytest.mark.parametrize(
    "number", [0.1, 1e-45, -0.0, math.pi, 1.7976931348623157e308, math.inf, -math.inf, 3, -(2**62), True]
)
def test_numbers_reach_the_op_exactly(number: float) -> None:
    got: list[object] = []
    run(body(0, step("actorflow.keep", number, outs=[0]), outputs=[0]), keep=got.append)
    assert got == [number]
    assert type(got[0]) is type(number)
    assert math.copysign(1, got[0]) == math.copysign(1, number)


def test_not_a_number_reaches_the_op() -> None:
    got: list[float] = []
    run(body(0, step("actorflow.keep", math.nan, outs=[0]), outputs=[0]), keep=got.append)
    assert math.isnan(got[0])


def test_symbols_name_dtypes_layouts_memory_formats_and_the_ranks_own_device() -> None:
    of = body(
        0,
        step(
            "aten.full.default",
            (2, 3),
            7.5,
            outs=[0],
            dtype=Symbol("torch.float64"),
            layout=Symbol("torch.strided"),
            device=Symbol("device:cuda:3"),
            pin_memory=False,
        ),
        step("aten.clone.default", V0, outs=[1], memory_format=Symbol("torch.contiguous_format")),
        outputs=[1],
    )
    (made,) = run(of)
    assert torch.equal(made, torch.full((2, 3), 7.5, dtype=torch.float64))
    assert made.device == CPU


def test_lists_of_tensors_and_missing_indices_are_arguments() -> None:
    of = body(
        3,
        step("aten.cat.default", (V0, V1), 1, outs=[3]),
        step("aten.index.Tensor", V3, (None, V2), outs=[4]),
        outputs=[4],
    )
    a, b, at = torch.randn(2, 3), torch.randn(2, 1), torch.tensor([3, 0])
    assert torch.equal(run(of, a, b, at)[0], torch.cat([a, b], 1)[:, at])


def test_outputs_that_nobody_uses_are_dropped() -> None:
    of = body(
        3,
        step("aten.native_layer_norm.default", V0, (4,), V1, V2, 1e-5, outs=[3, -1, 5]),
        outputs=[3, 5],
    )
    x, w, b = torch.randn(2, 4), torch.randn(4), torch.randn(4)
    normal, spread = run(of, x, w, b)
    expected = torch.native_layer_norm(x, (4,), w, b, 1e-5)
    assert torch.equal(normal, expected[0])
    assert torch.equal(spread, expected[2])


def test_a_list_of_one_tensor_is_unpacked() -> None:
    of = body(1, step("aten.split.Tensor", V0, 8, outs=[1]), step("aten.neg.default", V1, outs=[2]), outputs=[2])
    x = torch.randn(3)
    assert torch.equal(run(of, x)[0], -x)


def test_an_op_may_work_in_place_and_give_nothing() -> None:
    x = torch.ones(2)
    assert run(body(1, step("aten.add_.Tensor", V0, 2, outs=[]), outputs=[]), x) == ()
    assert torch.equal(x, torch.full((2,), 3.0))


def test_an_argument_named_like_a_keyword_is_passed() -> None:
    of = body(1, step("aten.uniform.default", V0, outs=[1], **{"from": 2.0, "to": 2.0}), outputs=[1])
    assert torch.equal(run(of, torch.zeros(3))[0], torch.full((3,), 2.0))


def test_every_value_dies_at_its_last_use() -> None:
    alive: list[list[bool]] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append([ref() is not None for ref in seen])
        seen.append(weakref.ref(x))
        return x + 1

    of = body(
        2,
        step("actorflow.look", V0, outs=[2]),
        step("actorflow.look", V2, outs=[3]),
        step("actorflow.look", V3, outs=[4]),
        outputs=[4],
    )
    unused = torch.zeros(1)
    seen.append(weakref.ref(unused))
    inputs = [torch.zeros(1), unused]
    del unused
    with torch.no_grad():
        Kernels(CPU, {"look": look}).kernel(of)(inputs)
    assert inputs == []
    assert alive == [[False], [False, False], [False, False, False]]


def test_equal_bodies_share_a_kernel() -> None:
    kernels = Kernels(CPU, {})
    first = kernels.kernel(body(1, step("aten.neg.default", V0, outs=[1]), outputs=[1]))
    assert kernels.kernel(body(1, step("aten.neg.default", V0, outs=[1]), outputs=[1])) is first
    assert kernels.kernel(body(1, step("aten.abs.default", V0, outs=[1]), outputs=[1])) is not first


def test_a_kernel_that_nothing_holds_is_forgotten_at_once() -> None:
    kernels = Kernels(CPU, {})
    kernel = kernels.kernel(body(1, step("aten.neg.default", V0, outs=[1]), outputs=[1]))
    gone = weakref.ref(kernel)
    assert kernels.kernel(body(1, step("aten.neg.default", V0, outs=[1]), outputs=[1])) is kernel
    del kernel
    assert gone() is None


@pytest.mark.parametrize(
    "op",
    [
        "aten.no_such_op.default",
        "aten.mm",
        "aten.mm.no_such_overload",
        "aten.mm.default.more",
        "os.system.default",
        "prim.Print.default",
        "aten.from_file.default",
        "aten.__class__.default",
        "aten.mm.default); import os; (",
        "",
        "actorflow.unknown",
    ],
)
def test_an_op_that_is_not_allowed_is_refused_by_name(op: str) -> None:
    with pytest.raises(PlanError) as caught:
        run(body(1, step(op, V0, outs=[1]), outputs=[1]), torch.zeros(1))
    assert repr(op) in str(caught.value)


@pytest.mark.parametrize("symbol", ["torch.load", "torch.no_such", "os.system", "float32", "torch.__name__"])
def test_a_symbol_can_only_be_a_value_of_torchs_enumerations(symbol: str) -> None:
    with pytest.raises(PlanError, match="symbol"):
        run(body(1, step("aten.to.dtype", V0, Symbol(symbol), outs=[1]), outputs=[1]), torch.zeros(1))


def test_strings_never_become_source() -> None:
    text = "floor'); __import__('os').abort(); ('"
    got: list[str] = []
    run(body(0, step("actorflow.keep", text, outs=[0]), outputs=[0]), keep=got.append)
    assert got == [text]
    with pytest.raises(PlanError, match="argument name"):
        run(body(1, step("aten.neg.default", V0, outs=[1], **{"x=1) or (y": 1}), outputs=[1]), torch.zeros(1))


def test_ops_that_the_scripts_imports_registered_are_allowed() -> None:
    library: Any = torch.library.Library("actorflow_test_kernels", "DEF")  # type: ignore[no-untyped-call]
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        of = body(1, step("actorflow_test_kernels.twice.default", V0, outs=[1]), outputs=[1])
        assert torch.equal(run(of, torch.ones(2))[0], torch.full((2,), 2.0))
        assert resolve("actorflow_test_kernels.twice.default", {}) is torch.ops.actorflow_test_kernels.twice.default
    finally:
        library._destroy()


def test_the_op_that_raised_is_named() -> None:
    of = body(
        2,
        step("aten.neg.default", V0, outs=[2]),
        step("aten.mm.default", V2, V1, outs=[3]),
        step("aten.abs.default", V3, outs=[4]),
        outputs=[4],
    )
    with pytest.raises(RuntimeError) as caught:
        run(of, torch.zeros(2, 3), torch.zeros(2, 3))
    found = culprit(of, caught.value)
    assert found is not None
    assert of.steps[found].op == "aten.mm.default"
    assert culprit(of, ValueError("from elsewhere")) is None


def test_a_step_must_name_every_output_of_its_op() -> None:
    of = body(3, step("aten.native_layer_norm.default", V0, (4,), V1, V2, 1e-5, outs=[3]), outputs=[3])
    with pytest.raises(PlanError, match="returns 3"):
        run(of, torch.zeros(2, 4), torch.ones(4), torch.zeros(4))


def test_library_ops_may_return_tuples() -> None:
    of = body(1, step("actorflow.both", V0, outs=[1, 2]), step("aten.add.Tensor", V1, V2, outs=[5]), outputs=[5])
    assert run(of, torch.ones(1), both=lambda x: (x * 2, x * 3))[0].item() == 5.0
