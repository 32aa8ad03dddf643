"""Bodies of plans are run on torch's meta device: what they make lies on the device of their rank, not where torch
makes tensors when nothing is said.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actorflow.runtime.bodies.kernels import Kernels
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.library import OPS
from actorflow_compiler.plan.plan import Actor, FromRegister, OfVariable, Operand, Plan
from actorflow_compiler.plan.summary import variable_shape
from models import CASES
from trained import LAYOUTS, Layout, in_float64, plan_of

META = torch.device("meta")
UPDATES = dict.fromkeys(["add_", "adam_", "sgd_"], lambda *args: None)  # in place; they make nothing
SPLIT = {
    "tensor 2": Layout(2, goal=Goal(("tensor",))),
    "data 2 × tensor 2": Layout(4, goal=Goal(("data", "tensor"), mesh=(2, 2))),
    "ZeRO 3, 2 ranks": Layout(2, 2, prepare=lambda model: zero(model, 3)),
    "ZeRO 3, 4 ranks": Layout(4, prepare=lambda model: zero(model, 3)),
}


def value(plan: Plan, actor: Actor, operand: Operand) -> Any:
    """What takes the place of an operand; None for one whose shape is not in the plan."""
    match operand:
        case FromRegister(register, index):
            spec = plan.register(register).tensors[index]
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=META)
        case OfVariable(name):
            held = plan.variable(name) or next(c for c in plan.constants if c.name == name)
            shape = held.shape if plan.variable(name) is None else variable_shape(held, actor.rank)  # type: ignore[arg-type]
            return torch.empty(shape, dtype=getattr(torch, held.dtype), device=META)
    return None


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("cnn", layout) for layout in ("data 2", "output layer split", "data 2, pipeline 2", "ZeRO 3, 4 ranks")),
        *(("mlp", layout) for layout in ("four micro-batches", *SPLIT)),
        *(("clipped gpt", layout) for layout in ("pipeline 2", "data 2, pipeline 2", "tensor 2", "data 2 × tensor 2")),
    ],
)  # fmt: skip
def test_what_bodies_make_lies_on_the_device_of_their_rank(name: str, layout: str) -> None:
    plan, *_ = plan_of(in_float64(CASES[name]), (LAYOUTS | SPLIT)[layout], 16)
    kernels, run = Kernels(META, OPS | UPDATES), 0
    for actor in plan.actors:
        if actor.body is None or actor.kind == "source":
            continue
        operands = [value(plan, actor, operand) for operand in actor.operands]
        with torch.no_grad():
            outputs = kernels.kernel(plan.bodies[actor.body])([0 if o is None else o for o in operands])
        assert {out.device.type for out in outputs} <= {"meta"}, actor.name
        run += 1
    assert run
