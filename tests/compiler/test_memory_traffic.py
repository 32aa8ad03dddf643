"""What the ops of a body read and write, one by one and fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.cutting.traffic import MemoryTraffic, memory_traffic
from actorflow_compiler.plan.plan import ActorKind, Body, Step
from models import CASES, Batch, Case
from trained import Layout, plan_of

RELU, ADD, MM = "aten.relu.default", "aten.add.Tensor", "aten.mm.default"


def step(op: str, out: int, *reads: int) -> Step:
    return Step(op, tuple(map(Ref, reads)), (), (out,))


@pytest.mark.parametrize(
    ("body", "nbytes", "each", "fused"),
    [
        (Body(1, (step(RELU, 1, 0), step(RELU, 2, 1)), (2,)), (8, 8, 8), 32, 16),
        (Body(1, (step(RELU, 1, 0), step(RELU, 2, 1)), (1, 2)), (8, 8, 8), 32, 24),
        (Body(2, (step(RELU, 2, 0), step(RELU, 3, 1), step(ADD, 4, 2, 3)), (4,)), (8,) * 5, 56, 24),
        (Body(1, (step(RELU, 1, 0), step(ADD, 2, 1, 0)), (2,)), (8, 8, 8), 40, 16),
        (Body(2, (step(MM, 2, 0, 1),), (2,)), (8, 8, 8), 0, 0),
        (Body(2, (step(RELU, 2, 0), step(MM, 3, 2, 1), step(RELU, 4, 3)), (4,)), (8,) * 5, 32, 32),
        (Body(2, (step(RELU, 2, 0), step(MM, 3, 2, 1), step(ADD, 4, 3, 2)), (4,)), (8,) * 5, 40, 32),
        (Body(1, (step("aten.t.default", 1, 0),), (1,)), (8, 8), 0, 0),
        (Body(1, (step(RELU, 1, 0), step("aten.t.default", 2, 1), step(RELU, 3, 2)), (3,)), (8,) * 4, 32, 16),
        (Body(2, (step("aten.embedding.default", 2, 0, 1),), (2,)), (800, 16, 32), 80, 80),
        (Body(0, (step("aten.arange.default", 0),), (0,)), (8,), 8, 8),
        (Body(1, (Step("aten.native_layer_norm.default", (Ref(0),), (), (1, -1, 2)),), (1, 2)), (8, 8, 2), 18, 18),
    ],
    ids=[
        "a chain", "its first result is needed", "two branches", "an operand twice", "a product", "around a product",
        "past a product", "a view", "through a view", "a lookup", "no operand", "a result that nobody needs",
    ],
)  # fmt: skip
def test_traffic_of_small_bodies(body: Body, nbytes: tuple[int, ...], each: int, fused: int) -> None:
    assert memory_traffic(body, nbytes) == MemoryTraffic(each, fused)


def test_actors_know_their_traffic_in_parts_of_each_device() -> None:
    def batches(sizes: object) -> list[Batch]:
        assert isinstance(sizes, list)
        return [(torch.zeros(n, 16), torch.zeros(n, 16)) for n in sizes]

    case = Case(
        lambda: torch.nn.Linear(16, 16, bias=False), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), batches,
        ("", ""),
        loss=lambda m, x, y: F.mse_loss(m(x).sin().cos(), y),
    )  # fmt: skip
    found = {}
    for world in (1, 2):
        plan = plan_of(case, Layout(world), 8)[0]
        forward = [a for a in plan.actors if a.kind is ActorKind.FORWARD and a.flops]
        assert len(forward) == world
        found[world] = {(a.traffic, a.fused_traffic) for a in forward}
    ((each, fused),) = found[1]
    values = 8 * 16 * 4  # bytes of one tensor
    assert each >= 6 * values  # sine and cosine, and what the loss reads
    assert fused < each
    ((half, half_fused),) = found[2]
    assert (half, half_fused) == pytest.approx((each / 2, fused / 2), rel=0.1)


def test_a_larger_batch_has_larger_traffic() -> None:
    total, twice = (
        sum(a.traffic for a in plan_of(CASES["gpt"], Layout(1), size)[0].actors if a.kind is not ActorKind.OPTIMIZER)
        for size in (8, 16)
    )
    assert 1.5 * total < twice <= 2 * total
