"""Gradients of parameters are computed by actors of their own, which nothing but the optimizer waits for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actorflow_compiler.plan.plan import FromRegister, Plan
from actorflow_compiler.plan.summary import plan_digest
from actorflow_compiler.plan.variant import PLAIN
from trained import Layout, differences, laid_of
from variants import BOTH, WEIGHTS, case_of, eager, layers, ops, plan, run, steps

MODELS = ["mlp", "cnn", "gpt", pytest.param("llama", marks=pytest.mark.slow), "t5"]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_of_a_weight_is_computed_by_a_weight_actor(name: str) -> None:
    linear = layers(name, nn.Linear)
    whole, split = ops(plan(name), "backward"), plan(name, variant=WEIGHTS)
    backward, weight = ops(split, "backward"), ops(split, "weight")
    assert weight["mm"] == linear
    assert backward["mm"] == whole["mm"] - linear
    assert weight["convolution_backward"] == layers(name, nn.Conv2d)
    assert weight["native_layer_norm_backward"] == layers(name, nn.LayerNorm)
    assert not ops(plan(name), "weight")


@pytest.mark.parametrize(("op", "name", "others"), [("convolution", "cnn", 1), ("native_layer_norm", "gpt", 5)])
def test_a_fused_backward_op_is_run_once_for_its_input_and_once_for_its_parameters(
    op: str, name: str, others: int
) -> None:
    split = plan(name, variant=WEIGHTS)
    masks = {
        kind: [s.args[-1] for _, s in steps(split, kind) if s.op == f"aten.{op}_backward.default"]
        for kind in ("backward", "weight")
    }
    assert masks["backward"] == [(True, False, False)] * others  # the first convolution's input needs no gradient
    assert len(masks["weight"]) == layers(name, nn.Conv2d, nn.LayerNorm)
    assert {mask[:2] for mask in masks["weight"]} == {(False, True)}


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_the_split_adds_no_work(name: str) -> None:
    def done(of: Plan) -> float:
        return sum(a.flops * a.rate for a in of.actors)

    whole, split = plan(name), plan(name, variant=WEIGHTS)
    assert done(split) == pytest.approx(done(whole), rel=1e-12)
    assert 0.25 < sum(a.flops * a.rate for a in split.actors if a.kind == "weight") / done(split) < 0.5


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", MODELS)
def test_the_split_changes_no_bit_of_the_training(name: str) -> None:
    whole, split = run(name), run(name, variant=WEIGHTS)
    assert split.losses == whole.losses
    assert split.state.keys() == whole.state.keys()
    for key, value in whole.state.items():
        assert torch.equal(split.state[key], value), key


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "pipeline 2") for name in ("mlp", "cnn", "gpt", "t5")),
        pytest.param("llama", "pipeline 2", marks=pytest.mark.slow),
        *((name, "data 2, pipeline 2") for name in ("mlp", "cnn", "gpt")),
        *((name, "tensor 2, pipeline 2") for name in ("mlp", "gpt")),
        ("gpt", "four stages on two ranks"),
        ("gpt", "ZeRO 2, pipeline 2"),
    ],
)
def test_a_plan_with_weight_actors_trains_as_the_eager_script_does(name: str, layout: str) -> None:
    found, (losses, state) = run(name, layout, WEIGHTS), eager(name)
    assert any(a.kind == "weight" for a in found.plan.actors)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(losses), rtol=1e-5, atol=0)
    assert max(differences(found.state, state).values()) <= case_of(name)[1]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", ["pipeline 2", "data 2, pipeline 2", "tensor 2, pipeline 2", "ZeRO 2, pipeline 2"])
def test_no_micro_batch_waits_for_a_weight_actor(layout: str) -> None:
    split = plan("gpt", layout, WEIGHTS)
    for actor in split.actors:
        if actor.kind == "weight":
            waiting = [actor]
            for one in waiting:  # what reduces gradients of each micro-batch passes them on
                readers = [split.actor(r.actor) for register in split.outputs_of[one.id] for r in register.readers]
                assert readers
                waiting += [r for r in readers if r.rate > 1]
            assert {a.queue for a in waiting[1:]} <= {"comm"}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["pipeline 2", "data 2, pipeline 2", "tensor 2, pipeline 2", "ZeRO 2, pipeline 2"])
def test_each_stage_has_one_weight_actor_on_each_rank_that_fires_for_every_micro_batch(layout: str) -> None:
    split = plan("gpt", layout, WEIGHTS)
    found = [(a.rank, a.stage, a.rate, a.queue) for a in split.actors if a.kind == "weight"]
    half = split.world // 2
    assert sorted(found) == [(rank, rank // half, 4, "compute") for rank in range(split.world)]


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_no_state_is_kept_for_an_actor_that_does_not_use_it(name: str) -> None:
    split = plan(name, variant=WEIGHTS)
    alone: set[tuple[str, ...]] = set()
    for register in split.registers:
        kinds = {split.actor(r.actor).kind for r in register.readers}
        if register.tensors and kinds <= {"backward", "weight"}:
            for read in register.readers:
                operands = split.actor(read.actor).operands
                used = {o.index for o in operands if isinstance(o, FromRegister) and o.register == register.id}
                assert used == set(range(len(register.tensors)))
            alone.add(tuple(sorted(kinds)))
    assert alone >= {("backward",), ("weight",)}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["data 2, pipeline 2", "ZeRO 2, pipeline 2"])
def test_gradients_of_weight_actors_are_reduced_as_those_of_the_backward_pass_are(layout: str) -> None:
    def reduced(of: Plan) -> list[tuple[str, int, int]]:
        comms = [a for a in of.actors if a.comm is not None and a.rate == 1]
        return sorted((a.comm.label, a.rank, len(a.targets)) for a in comms if a.comm is not None)

    whole, split = plan("gpt", layout), plan("gpt", layout, WEIGHTS)
    assert split.summary.moved == whole.summary.moved
    assert reduced(split) == reduced(whole)


@pytest.mark.slow
def test_the_gradient_of_a_tied_parameter_travels_once_and_not_with_every_micro_batch() -> None:
    split = plan("t5", variant=WEIGHTS)
    largest = max(split.variables, key=lambda v: v.shape[0] if v.kind == "parameter" else 0)  # the embedding
    found = [
        (split.actor(register.producer).rate, register.producer)
        for register in split.registers
        if split.actor(register.producer).kind == "send" and largest.shape in [t.shape for t in register.tensors]
    ]
    assert {rate for rate, _ in found} == {1}


def test_without_micro_batches_nothing_is_split() -> None:
    laid, _, _ = laid_of(case_of("mlp")[0], Layout(2), 8)
    assert plan_digest(laid.cut(PLAIN)) == plan_digest(laid.cut(BOTH))
