"""Bodies in parts, and bodies that inductor joins: they compute what the same ops compute one by one."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import metrics

from actorflow.devices import Cpu
from actorflow.runtime.bodies.divide import CHANGES, PLAIN, divide
from actorflow.runtime.bodies.kernels import Kernels
from actorflow.runtime.bodies.run import BodyCompiler
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.sbp import B
from actorflow_compiler.library import OPS
from actorflow_compiler.plan.modes import Mode, mode_of
from actorflow_compiler.plan.plan import Body, OfInput, OfScalar, Step
from actorflow_compiler.plan.text import from_json, to_json, to_text
from actorflow_compiler.plan.variant import Variant
from gpt import GPT
from models import CASES, CONTEXT, DROPOUT
from runtime.programs import V0, V1, V2, V3, Program, body, on, spec, step
from trained import LAYOUTS, Layout, differences, in_float64, plan_of, train, train_eagerly

CPU = torch.device("cpu")
STEPS = 3


def scaled(x: Tensor, number: float) -> Tensor:
    return x * number


def grow_(x: Tensor, other: Tensor) -> None:
    x.add_(other)


LIBRARY = {"scaled": scaled, "grow_": grow_, "sum": operator.add}


def does(of: Step) -> int:
    return PLAIN if of.outs else CHANGES


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Tensors 0 to 2 and number 3 are operands; steps add two values, scale one by the number, or grow an operand."""
    steps: list[Step] = []
    values = [0, 1, 2]
    for new in range(4, 4 + draw(st.integers(1, 8))):
        one, other = (Ref(draw(st.sampled_from(values))) for _ in range(2))
        kind = draw(st.sampled_from(["sum", "scaled", "grow_"]))
        if kind == "grow_":
            steps.append(Step("actorflow.grow_", (Ref(draw(st.integers(0, 2))), other), (), ()))
            continue
        args = (one, other) if kind == "sum" else (one, Ref(3))
        steps.append(Step(f"actorflow.{kind}", args, (), (new,)))
        values.append(new)
    made = [v for v in values if v > 3]
    outputs = draw(st.lists(st.sampled_from(made), unique=True)) if made else []
    return Body(4, tuple(steps), tuple(outputs))


@given(bodies())
def test_the_parts_of_a_body_compute_what_the_body_does(whole: Body) -> None:
    kernels = Kernels(CPU, LIBRARY)
    start = [torch.tensor([float(10**k)], dtype=torch.float64) for k in range(3)]
    ours, theirs = ([x.clone() for x in start] for _ in range(2))
    wanted = kernels.kernel(whole)([*theirs, 3.0])
    held: dict[int, Any] = dict(enumerate([*ours, 3.0]))
    parts = divide(whole, {3}, does)
    for part in parts:
        assert not part.inside or not any(v == 3 for v in part.reads)
        made = kernels.kernel(part.body)([held.pop(v) if v in part.last else held[v] for v in part.reads])
        held.update(zip(part.makes, made, strict=True))
    assert [held[v].item() for v in whole.outputs] == [x.item() for x in wanted]
    assert [x.item() for x in ours] == [x.item() for x in theirs]
    assert sum(part.inside for part in parts) <= 1


@pytest.mark.parametrize(
    ("said", "name"),
    [(None, "eager"), (False, "eager"), (True, "inductor"), ("default", "inductor"), *((str(m), m) for m in Mode)],
)
def test_modes_have_the_names_of_torch_compile(said: object, name: str) -> None:
    assert mode_of(said) == name


@pytest.mark.parametrize("said", ["fast", 1, ["inductor"]])
def test_another_mode_is_refused(said: object) -> None:
    with pytest.raises(CallError, match=r'compile=.* was found; True, False or one of .*"max-autotune"'):
        mode_of(said)


NOT_COMPILED = "error:torch's inductor cannot compile:UserWarning"
JOINED = Layout(1, variant=Variant(joined=True))
ONE_LAYER = replace(CASES["clipped gpt"], make=lambda: GPT(layers=1, width=32, heads=4, context=CONTEXT))


@pytest.mark.filterwarnings(NOT_COMPILED)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # which inductor takes long for; test_compiled_jobs.py has a joined one
        pytest.param("dropout", LAYOUTS["four micro-batches"], marks=pytest.mark.slow),
        pytest.param("mlp", JOINED, marks=pytest.mark.slow),
        pytest.param("dropout", JOINED, marks=pytest.mark.slow),
        pytest.param("mlp", LAYOUTS["data 2, pipeline 2"], marks=pytest.mark.slow),
        pytest.param("cnn", JOINED, marks=pytest.mark.slow),
        pytest.param("clipped gpt of one layer", JOINED, marks=pytest.mark.slow),
        pytest.param("clipped gpt", JOINED, marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.world} ranks, {x.micro_batches} pieces",
)  # fmt: skip
def test_joined_bodies_train_as_one_device_does(name: str, layout: Layout) -> None:
    attends = "gpt" in name  # in float64 torch 2.11 tells inductor another dtype of attention's sums than they have
    case = {**CASES, "dropout": DROPOUT, "clipped gpt of one layer": ONE_LAYER}[name]
    case = case if attends else in_float64(case)
    plan, values, optimizer = plan_of(case, layout, 8)
    metrics.reset()
    losses, found = train(case, replace(plan, mode=Mode.INDUCTOR), values, optimizer, [8] * STEPS)
    if name == "dropout":  # the one-device job draws as all plans do
        plan, values, optimizer = plan_of(case, Layout(1), 8)
        wanted, state = train(case, plan, values, optimizer, [8] * STEPS)
    else:
        wanted, state = train_eagerly(case, [8] * STEPS, layout.micro_batches)
    assert losses == pytest.approx(wanted, rel=1e-5 if attends else 1e-9)
    assert attends or max(differences(found, state).values()) <= 1e-8
    assert any(len(b.steps) > 1 for b in plan.bodies)


def test_inductor_makes_fewer_kernels_than_there_are_ops() -> None:
    p = Program(name="chain")
    (x,) = p.actor("x", OfInput("x"), out=[spec(64)], kind="source", queue="source")
    steps = [step("aten.add.Tensor", Ref(k), 1.0 + k, outs=[k + 1]) for k in range(5)]
    (y,) = p.actor("A", x, body=body(1, *steps, outputs=[5]), out=[spec(64)])
    p.result(y, on(0), (B,), (64,))
    metrics.reset()
    with LocalCluster(replace(p.plan(), mode=Mode.INDUCTOR)) as cluster:
        (found,) = cluster.run({"x": torch.zeros(64)})
        (again,) = cluster.run({"x": torch.zeros(128)[::2]})  # other strides than it was compiled for
    assert found.tolist() == again.tolist() == [15.0] * 64
    assert metrics.generated_kernel_count <= 1


def test_what_inductor_cannot_compile_runs_op_by_op_and_says_so() -> None:
    p = Program(name="values")
    (x,) = p.actor("x", OfInput("x"), out=[spec(4)], kind="source", queue="source")
    body_of = body(1, step("aten.neg.default", V0, outs=[1]), step("actorflow.positive", V1, outs=[2]), outputs=[2])
    (y,) = p.actor("A", x, body=body_of, out=[spec(4)])
    p.result(y, on(0), (B,), (4,))

    def positive(x: Tensor) -> Tensor:
        return x if x[0].item() > 0 else -x

    plan = replace(p.plan(), mode=Mode.INDUCTOR)

    def call() -> list[float]:
        with LocalCluster(plan, library={"positive": positive}) as cluster:
            found: list[float] = cluster.run({"x": torch.tensor([1.0, -2.0, 3.0, -4.0])})[0].tolist()
            return found

    with pytest.warns(UserWarning, match=r"inductor cannot compile A of 'values', launched op by op instead"):
        found = call()
    assert found == [1.0, -2.0, 3.0, -4.0]


def test_numbers_of_a_call_are_not_baked_in() -> None:
    p = Program(name="numbers")
    (x,) = p.actor("x", OfInput("x"), out=[spec(4)], kind="source", queue="source")
    of = body(
        2, step("actorflow.scaled", V0, V1, outs=[2]), step("aten.neg.default", V2, outs=[3]),
        step("aten.add.Tensor", V3, 1.0, outs=[4]), outputs=[4],
    )  # fmt: skip
    (y,) = p.actor("A", x, OfScalar("rate"), body=of, out=[spec(4)])
    p.result(y, on(0), (B,), (4,))
    with LocalCluster(replace(p.plan(), mode=Mode.INDUCTOR), library=LIBRARY) as cluster:
        for rate in (1.0, 2.0, 3.0):
            (found,) = cluster.run({"x": torch.ones(4)}, {"rate": rate})
            assert found.tolist() == [1.0 - rate] * 4


@pytest.mark.slow
@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", ["clipped gpt", "cnn"])
def test_most_of_a_model_is_what_can_be_compiled(name: str) -> None:
    plan, *_ = plan_of(CASES[name], JOINED, 8)
    runs = BodyCompiler(Cpu(), Kernels(CPU, OPS))
    (actor,) = (a for a in plan.actors if a.kind == "backward")
    assert actor.body is not None
    body_of = plan.bodies[actor.body]
    parts = divide(body_of, set(), runs._does)
    inside = sum(len(part.body.steps) for part in parts if part.inside)
    assert inside >= 0.95 * len(body_of.steps)  # all but counters of batches, say, which change in place


def test_a_body_compiled_for_one_actor_serves_others_whose_operands_are_two_tensors() -> None:
    p = Program(name="twice")
    (x,) = p.actor("x", OfInput("x"), out=[spec(4)], kind="source", queue="source")
    same = body(1, step("actorflow.identity", V0, outs=[1]), step("aten.neg.default", V0, outs=[2]), outputs=[0, 1])
    double = body(
        2, step("aten.mul.Tensor", V0, 2.0, outs=[2]), step("aten.add.Tensor", V2, V1, outs=[3]), outputs=[3]
    )  # fmt: skip
    one, other = p.actor("A", x, body=same, out=[spec(4), spec(4)])
    (first,) = p.actor("B", one, other, body=double, out=[spec(4)])
    (second,) = p.actor("C", one, first, body=double, out=[spec(4)])
    p.result(second, on(0), (B,), (4,))
    with LocalCluster(replace(p.plan(), mode=Mode.INDUCTOR), library={"identity": lambda x: x}) as cluster:
        (found,) = cluster.run({"x": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    assert found.tolist() == [5.0, 10.0, 15.0, 20.0]  # 2x + (2x + x)


def test_a_plan_from_before_there_were_modes_runs_op_by_op() -> None:
    p = Program(name="old")
    (x,) = p.actor("x", OfInput("x"), out=[spec(4)], kind="source", queue="source")
    p.result(x, on(0), (B,), (4,))
    old = {key: value for key, value in json.loads(to_json(p.plan())).items() if key != "mode"}
    plan = from_json(json.dumps(old))
    assert plan.mode == "eager"
    assert "plan old" in to_text(plan)
