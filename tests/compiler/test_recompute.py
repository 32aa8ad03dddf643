"""A stage that computes its forward values again keeps its inputs only, and trains as one that keeps them all."""

from __future__ import annotations

import pytest
import torch

from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.plan.plan import Collective, CollectiveKind, Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler.timeline import simulate
from trained import differences
from variants import BOTH, RECOMPUTE, WEIGHTS, case_of, eager, kept, ops, plan, run, steps

MODELS = ["mlp", "cnn", "gpt", pytest.param("llama", marks=pytest.mark.slow), "t5", "dropout"]
TENSOR = pytest.param("tensor 2, pipeline 2", marks=pytest.mark.slow)


def done(of: Plan) -> float:
    """The FLOPs of an iteration."""
    return sum(a.flops * a.rate for a in of.actors)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("variant", [RECOMPUTE, BOTH], ids=["recompute", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_computing_forward_values_again_changes_no_bit_of_the_training(name: str, variant: Variant) -> None:
    plain, again = run(name), run(name, variant=variant)
    assert again.losses == plain.losses
    assert again.state.keys() == plain.state.keys()
    for key, value in plain.state.items():  # also the statistics of batch norm, and the number of batches they saw
        assert torch.equal(again.state[key], value), key


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "data 2, pipeline 2") for name in ("mlp", "cnn", "gpt")),
        *((name, "tensor 2, pipeline 2") for name in ("mlp", "gpt")),
        ("gpt", "four stages on two ranks"),
        ("gpt", "ZeRO 2, pipeline 2"),
    ],
)
@pytest.mark.parametrize("variant", [pytest.param(RECOMPUTE, marks=pytest.mark.slow), BOTH], ids=["recompute", "both"])
def test_hybrid_plans_that_compute_forward_values_again_train_as_the_eager_script_does(
    name: str, layout: str, variant: Variant
) -> None:
    found, (losses, state) = run(name, layout, variant), eager(name)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(losses), rtol=1e-5, atol=0)
    assert max(differences(found.state, state).values()) <= case_of(name)[1]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("variant", [RECOMPUTE, BOTH], ids=["recompute", "both"])
@pytest.mark.parametrize("layout", ["pipeline 2", "data 2, pipeline 2", "tensor 2, pipeline 2", "ZeRO 2, pipeline 2"])
def test_the_forward_pass_keeps_nothing_that_it_computed_for_the_backward_pass(layout: str, variant: Variant) -> None:
    assert "aten.addmm.default" in kept(plan("gpt", layout))
    put_together = {"actorflow.arrange", "actorflow.carve"}  # parts that were received, and of the batch
    assert set(kept(plan("gpt", layout, variant))) <= put_together


@pytest.mark.parametrize("layout", ["pipeline 2", "data 2, pipeline 2", TENSOR])
def test_computing_again_takes_less_memory_on_every_rank(layout: str) -> None:
    plain, again = (simulate(plan("gpt", layout, v), 1, CPU_CORE).peak_bytes for v in (Variant(), RECOMPUTE))
    assert all(again[rank] < plain[rank] for rank in plain)


def test_what_is_computed_again_is_computed_once_and_handed_to_the_weight_actors() -> None:
    forward, both = ops(plan("gpt"), "forward"), plan("gpt", variant=BOTH)
    weights = plan("gpt", variant=WEIGHTS)
    assert ops(both, "weight") == ops(weights, "weight")
    repeated = ops(both, "backward")["addmm"]
    assert 0 < repeated <= forward["addmm"]


def test_what_is_computed_again_counts_as_work_and_not_as_useful_work() -> None:
    plain, again = plan("gpt"), plan("gpt", variant=RECOMPUTE)
    assert again.summary.flops == plain.summary.flops == done(plain)
    assert again.summary.redundant_flops == plain.summary.redundant_flops == 0
    share = done(again) / done(plain) - 1
    assert 0.2 < share < 0.34  # the forward pass is a third of all, but for what no gradient looks at
    assert f"the backward pass of 2 stages computes forward values again from what the stage receives: {share:.1%} " \
           "more FLOPs" in again.notes  # fmt: skip


def test_the_statistics_of_batch_norm_move_on_in_the_forward_pass_alone() -> None:
    again = plan("cnn", variant=RECOMPUTE)
    moving = "aten._native_batch_norm_legit_functional.default"
    assert [a.kind for a, s in steps(again, "forward") if s.op == moving] == ["forward"] * 2
    repeated = [s.op for _, s in steps(again, "backward") if "batch_norm_legit" in s.op]
    assert repeated == ["aten._native_batch_norm_legit.no_stats"] * 2
    for actor, _ in steps(again, "backward"):
        names = [getattr(o, "name", "") for o in actor.operands]
        assert not [n for n in names if "running" in n or "num_batches" in n]


@pytest.mark.parametrize("variant", [RECOMPUTE, BOTH], ids=["recompute", "both"])
@pytest.mark.parametrize("layout", ["data 2, pipeline 2", TENSOR])
def test_no_communication_is_repeated(layout: str, variant: Variant) -> None:
    assert plan("gpt", layout, variant).summary.moved == plan("gpt", layout).summary.moved


def test_a_parameter_gathered_for_the_forward_pass_is_not_kept_to_compute_again() -> None:
    again = plan("gpt", "ZeRO 2, pipeline 2", RECOMPUTE)
    gathers = [a for a in again.actors if isinstance(a.comm, Collective) and a.comm.kind == CollectiveKind.ALL_GATHER]
    kinds = [
        {again.actor(read.actor).kind for register in again.outputs_of[a.id] for read in register.readers}
        & {"forward", "backward"}
        for a in gathers
    ]
    assert {"backward"} in kinds
    assert {"forward", "backward"} not in kinds
