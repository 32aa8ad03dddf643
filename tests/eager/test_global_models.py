"""A model of ``transformers`` that is made global trains eagerly as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2Config, GPT2LMHeadModel

import actorflow as flow
from actorflow.testing.thread_ranks import ThreadRanks
from eager.ranks import MESH, PAIR, B, S, on, spread, value

# a rank of each pair has half of the heads, of the hidden units, and of the vocabulary
WEIGHTS = {
    r".*(c_attn|c_fc)\.weight": [B, S(1)],
    r".*(c_attn|c_fc)\.bias": [B, S(0)],
    r".*c_proj\.weight": [B, S(0)],
    r".*wte\.weight": [B, S(0)],
}


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    tiny = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=96, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(tiny).double()


def _train(model: Any, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_gpt2_trains_with_data_and_tensor_parallelism_as_on_one_device(four: ThreadRanks) -> None:
    model = _gpt2()
    batches = list(torch.randint(0, 96, (3, 4, 12), generator=torch.Generator().manual_seed(1)))
    plain = copy.deepcopy(model)
    wanted = _train(plain, batches)
    models = [copy.deepcopy(model) for _ in range(4)]

    def on_a_rank() -> Any:
        mine = models.pop()
        flow.to_global(mine, MESH, WEIGHTS)
        losses = _train(mine, [spread(b, MESH, [S(0), B]) for b in batches])
        held = mine.transformer.h[0].mlp.c_fc.weight.to_local().shape
        return losses, held, {name: value(p) for name, p in mine.state_dict().items()}

    losses, held, state = on(four, on_a_rank)
    assert held == (32, 64)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted))
    for name, p in plain.state_dict().items():
        torch.testing.assert_close(state[name], p, rtol=1e-5, atol=1e-7)


def test_fused_and_listed_optimizers_step_on_the_parts(two: ThreadRanks) -> None:
    torch.manual_seed(0)
    start = nn.Linear(6, 4)
    x = torch.randn(8, 6)

    def step(kind: Any, model: nn.Module, x: Tensor, **options: bool) -> None:
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    ways: list[tuple[Any, dict[str, bool]]] = [(torch.optim.Adagrad, {"fused": True})]
    ways += [(torch.optim.AdamW, options) for options in ({"fused": True}, {"foreach": True}, {"foreach": False})]
    for kind, options in ways:
        plain = copy.deepcopy(start)
        step(kind, plain, x, **options)

        def on_a_rank(kind: Any = kind, options: dict[str, bool] = options) -> Any:
            model = nn.Linear(6, 4)
            model.load_state_dict(start.state_dict())
            flow.to_global(model, PAIR, {"weight": S(0)})
            step(kind, model, spread(x, PAIR, S(0)), **options)
            return value(model.weight), value(model.bias)

        weight, bias = on(two, on_a_rank)
        torch.testing.assert_close(weight, plain.weight.detach())
        torch.testing.assert_close(bias, plain.bias.detach())


def test_a_checkpoint_drops_the_same_elements_again() -> None:
    flow.manual_seed(4)
    one = flow.placement("cpu", [0])
    model = flow.to_global(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), one, B)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    x = torch.ones(2, 4).to_global(one, S(0)).requires_grad_()
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    out.sum().backward()
    kept = int((out != 0).sum())
    assert 0 < kept < 128
    assert model[0].bias.grad.sum().item() == 2 * kept  # an element that is kept counts twice


@pytest.mark.slow
def test_gpt2_with_dropout_trains_alike_under_every_layout(four: ThreadRanks) -> None:
    torch.manual_seed(0)
    tiny = GPT2Config(
        n_layer=1, n_head=4, n_embd=32, vocab_size=96, n_positions=16, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    model = GPT2LMHeadModel(tiny).train()
    batches = list(torch.randint(0, 96, (2, 4, 12), generator=torch.Generator().manual_seed(1)))

    def trained(threads: ThreadRanks, placement: Any, weights: Any, sbp: Any) -> list[float]:
        models = [copy.deepcopy(model) for _ in range(4)]

        def on_a_rank() -> list[float]:
            flow.manual_seed(5)
            mine = flow.to_global(models.pop(), placement, weights)
            return _train(mine, [spread(b, placement, sbp) for b in batches])

        return on(threads, on_a_rank)

    whole = trained(four, flow.placement("cpu", [0]), B, B)
    plain = _train(copy.deepcopy(model).eval(), batches)
    torch.testing.assert_close(trained(four, MESH, WEIGHTS, [S(0), B]), whole, rtol=1e-4, atol=1e-4)
    assert abs(whole[0] - plain[0]) > 1e-3  # something was dropped


def _trained_with_scaler(model: nn.Sequential, batches: list[Tensor]) -> tuple[list[float], list[Any]]:
    """Losses and scales, and the parameters, of a training in which one element of a gradient overflows once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    told = []
    for number, x in enumerate(batches):
        loss = model(x).square().mean()
        if number == 2:
            loss = loss + model[2].weight[0, 0] * 1e38
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told += [loss.item(), scaler.get_scale()]
    return told, [value(p) for p in model.parameters()]


@pytest.mark.parametrize(
    "second", [[S(0), S(0)], pytest.param([B, S(1)], marks=pytest.mark.slow)], ids=["rows over all", "columns"]
)
def test_a_grad_scaler_skips_a_step_on_all_ranks_where_a_part_of_one_overflows(four: ThreadRanks, second: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
    batches = [torch.randn(8, 4) for _ in range(5)]
    wanted, parameters = _trained_with_scaler(copy.deepcopy(model), batches)
    assert wanted[1::2] == [8.0, 16.0, 8.0, 8.0, 16.0]  # scales: the third step was skipped
    models = [copy.deepcopy(model) for _ in range(4)]

    def on_a_rank() -> Any:
        mine = models.pop()
        flow.to_global(mine, MESH, {r"2\.weight": second})
        return _trained_with_scaler(mine, [spread(x, MESH, [S(0), B]) for x in batches])

    for told, found in four.run(on_a_rank):
        torch.testing.assert_close(told, wanted)
        torch.testing.assert_close(found, parameters)
