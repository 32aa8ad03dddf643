"""Each actor knows the dtype of most of its arithmetic, by which a forecast knows how fast a GPU computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorflow_compiler.core.hardware import GPU
from actorflow_compiler.plan.plan import ActorKind
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler.cost import flops_per_s
from models import CASES
from trained import Layout, plan_of


def half(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", [Layout(1), Layout(1, variant=Variant(joined=True))], ids=["apart", "in one"])
def test_arithmetic_under_autocast_is_of_the_narrow_dtype_whatever_passes_between_actors(layout: Layout) -> None:
    plan, *_ = plan_of(replace(CASES["gpt"], loss=half), layout, 8)
    plan = from_bytes(to_bytes(plan))
    computing = [a for a in plan.actors if a.flops]
    assert computing
    assert {a.flops_dtype for a in computing} == {"bfloat16"}
    assert {flops_per_s(plan, a, GPU) for a in computing} == {GPU.flops_per_s}
    assert not any(a.flops_dtype for a in plan.actors if a.kind is ActorKind.SOURCE)


def test_arithmetic_in_float32_is_of_float32() -> None:
    plan, *_ = plan_of(CASES["mlp"], Layout(1), 8)
    assert {a.flops_dtype for a in plan.actors if a.flops} == {"float32"}
