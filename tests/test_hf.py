"""Unmodified models of ``transformers`` train under a plan as they do eagerly on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.placement import placement
from actorflow_compiler.plan.plan import Plan
from hf import DECODER, FURTHER, LOOKS_AT_VALUES, PROMISED, T, exact
from trained import Layout, differences, plan_of, train_eagerly, train_planned

ALL = {**PROMISED, **FURTHER}
LAYOUTS = {
    "one device": Layout(1),
    "four micro-batches": Layout(1, 4),
    "data 2": Layout(2),
    "data 3, uneven": Layout(3),
    "pipeline 2": Layout(2, 4, pipeline=True),
    "data 2, pipeline 2": Layout(4, 4, pipeline=True),
    "mesh 2 × 2": Layout(4, mesh=placement("cpu", [[0, 1], [2, 3]])),
}
SIZE = 8  # samples in a batch
MOST_REDUNDANT = 0.05  # of all FLOPs under data parallelism


def check(name: str, layout: Layout, steps: int, dropout: float = 0.0) -> Plan:
    """Compare with eager training; with dropout, with the one-device plan."""
    case, bound = exact(name, ALL[name](dropout))
    sizes = [SIZE] * steps
    expected = train_planned(case, LAYOUTS["one device"], sizes)[:2] if dropout else train_eagerly(case, sizes, 1)
    losses, state, plan = train_planned(case, layout, sizes)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5, atol=0)
    worst = max(differences(state, expected[1]).items(), key=lambda item: item[1])
    assert worst[1] <= bound, worst
    return plan


@pytest.mark.slow
@pytest.mark.matrix(every=6)
@pytest.mark.parametrize("name", PROMISED)
def test_a_batch_split_over_two_devices_trains_as_on_one(name: str) -> None:
    plan = check(name, LAYOUTS["data 2"], 2)
    assert plan.summary.redundant_flops <= MOST_REDUNDANT
    ops = {step.op for body in plan.bodies for step in body.steps}
    assert not [op for op in ops if op.startswith(("aten.sort", "transformers."))]  # experts get tokens where these are


@pytest.mark.parametrize("name", ["t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "mixtral"))])
def test_micro_batches_through_two_stages_train_as_the_whole_batch(name: str) -> None:
    plan = check(name, LAYOUTS["pipeline 2"], 2)
    assert plan.pieces == 4
    assert not [note for note in plan.notes if "cannot be split" in note]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("vit", marks=pytest.mark.slow), "mixtral"])
def test_dropout_inside_a_library_drops_the_same_elements_under_every_plan(name: str) -> None:
    check(name, LAYOUTS["data 2"], 2, dropout=0.2)


def test_a_model_that_looks_at_values_is_refused_with_the_line_of_its_library() -> None:
    with pytest.raises(CaptureError, match=r"inside transformers/models/longformer/\S+:\d+: is_global.*item\(\)"):
        plan_of(LOOKS_AT_VALUES(0.0), Layout(1), SIZE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROMISED)
def test_the_promised_models_train_twenty_steps_under_every_plan(name: str, layout: str, dropout: float) -> None:
    check(name, LAYOUTS[layout], 20, dropout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["four micro-batches", "data 2", "data 3, uneven"])
@pytest.mark.parametrize("name", FURTHER)
def test_further_architectures_train_as_well(name: str, layout: str) -> None:
    plan = check(name, LAYOUTS[layout], 3)
    assert plan.summary.redundant_flops <= MOST_REDUNDANT


RECORDED = {"output_hidden_states": True}


def by_keyword(model: nn.Module, x: Tensor) -> Tensor:
    out = model(input_ids=x, labels=x, output_hidden_states=True)
    return out.loss + out.hidden_states[1].square().mean()


def by_a_dictionary(model: nn.Module, x: Tensor) -> Tensor:
    out = model(input_ids=x, labels=x, **RECORDED)
    return out.loss + out.hidden_states[1].square().mean()


def by_configuration(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss  # with that of the routers


@pytest.mark.parametrize("loss_of", [by_keyword, by_a_dictionary, by_configuration], ids=lambda way: way.__name__)
def test_what_a_model_records_by_hooks_is_there_from_the_first_step_on(loss_of: Callable[..., Tensor]) -> None:
    def trained(decorate: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        config = T.MixtralConfig(**DECODER, num_local_experts=4, output_router_logits=loss_of is by_configuration)
        model = T.MixtralForCausalLM(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @decorate
        def step(x: Tensor) -> Tensor:
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [float(step(torch.randint(3, 200, (4, 9)))) for _ in range(3)]

    torch.testing.assert_close(trained(flow.global_function), trained(lambda step: step), rtol=1e-5, atol=0)


def test_a_model_gets_no_hooks_for_outputs_that_no_one_asks_for() -> None:
    model = T.LlamaForCausalLM(T.LlamaConfig(**DECODER))

    @flow.global_function(type="predict")
    def loss(x: Tensor) -> Tensor:
        return by_configuration(model, x)

    loss(torch.randint(3, 200, (4, 9)))
    assert not any(module._forward_hooks for module in model.modules())
