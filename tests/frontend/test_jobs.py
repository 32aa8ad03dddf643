"""Whole jobs on one device, in this process: equal to eager PyTorch."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import actorflow as flow
from actorflow.standins.lazy_tensor import LazyTensor
from actorflow.standins.owned_tensor import OwnedTensor

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD with dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=random), torch.randint(0, 4, (size,), generator=random)) for _ in range(count)
    ]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_eager_training(kind: str):
    model, eager = mlp(), mlp()
    optimizer, eager_optimizer = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](eager.parameters())
    step, eager_step = flow.global_function(train_step(model, optimizer)), train_step(eager, eager_optimizer)
    losses = [step(x, y) for x, y in batches(4)]
    expected = [eager_step(x, y).item() for x, y in batches(4)]
    torch.testing.assert_close([float(loss) for loss in losses], expected, rtol=1e-5, atol=1e-6)
    close(model.state_dict(), eager.state_dict())


def test_schedulers_a_shorter_last_batch_and_predictions_between_steps_equal_eager():
    model, eager = mlp(), mlp()
    optimizer, eager_optimizer = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["AdamW"](eager.parameters())
    step, eager_step = flow.global_function(train_step(model, optimizer)), train_step(eager, eager_optimizer)
    predict = flow.global_function(type="predict")(lambda x: model(x).argmax(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        eager_schedule = torch.optim.lr_scheduler.ExponentialLR(eager_optimizer, 0.5)
        losses, expected = [], []
        for x, y in [*batches(3), *batches(1, 5), *batches(1)]:
            losses.append(step(x, y))
            expected.append(eager_step(x, y).item())
            schedule.step()
            eager_schedule.step()
            assert torch.equal(predict(x), eager(x).argmax(-1))
    torch.testing.assert_close([float(loss) for loss in losses], expected, rtol=1e-5, atol=1e-6)
    assert len(step.plans) == 2
    assert len(predict.plans) == 2
    close(model.state_dict(), eager.state_dict())


def test_a_call_returns_handles_that_keep_no_more_than_their_own_value():
    model = mlp()
    optimizer = OPTIMIZERS["SGD"](model.parameters())

    @flow.global_function
    def step(x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, logits

    kept = []
    for x, y in batches(8):
        loss, logits = step(x, y)
        assert isinstance(loss, LazyTensor)
        assert (loss.shape, logits.shape) == ((), (12, 4))
        kept.append((loss, weakref.ref(logits._promise)))
        del loss, logits
    gc.collect()
    assert all(ref() is None for _, ref in kept)
    assert all(float(loss) > 0 for loss, _ in kept)


@dataclass
class Output:
    loss: Any
    more: Any


def test_arguments_and_results_are_trees():
    model = mlp()
    scale = torch.tensor(2.0)

    @flow.global_function(type="predict")
    def job(batch: dict[str, Any], *, factor: float, names: list[str]) -> Any:
        out = model(batch["x"]) * factor * scale + batch["bias"]
        return Output(out.sum(), {"out": [out, None, 3], "names": names, "same": batch["x"]})

    x, _ = batches(1)[0]
    got = job({"x": x.numpy(), "bias": np.ones(4, dtype=np.float32)}, factor=0.5, names=["a"])
    assert isinstance(got, Output)
    assert got.more["names"] == ["a"]
    assert got.more["out"][1:] == [None, 3]
    expected = mlp()(x) * 0.5 * 2 + 1
    torch.testing.assert_close(got.more["out"][0].detach(), expected.detach())
    assert torch.equal(got.more["same"], x)
    scale.fill_(4)  # a tensor that the job reads stays with the script
    got = job({"x": x.numpy(), "bias": np.ones(4, dtype=np.float32)}, factor=0.5, names=["a"])
    torch.testing.assert_close(got.more["out"][0].detach(), (mlp()(x) * 2 + 1).detach())


def test_a_tensor_that_the_job_changes_belongs_to_the_plan():
    count = torch.zeros(())
    model = mlp()

    @flow.global_function
    def job(x: Tensor) -> Tensor:
        count.add_(1)
        out: Tensor = model(x).sum() * 0 + count
        return out

    x, _ = batches(1)[0]
    assert [float(job(x)) for _ in range(3)] == [1, 2, 3]
    assert isinstance(count, OwnedTensor)
    assert count.detach() == 3


def test_batch_norm_statistics_and_modes_follow_eager():
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (model, optimizer), (eager, eager_optimizer) = make(), make()
    step, eager_step = flow.global_function(train_step(model, optimizer)), train_step(eager, eager_optimizer)
    predict = flow.global_function(type="predict")(lambda x: model(x))
    for x, y in batches(3):
        torch.testing.assert_close(float(step(x, y)), eager_step(x, y).item(), rtol=1e-5, atol=1e-6)
    close(model.state_dict(), eager.state_dict())
    with pytest.raises(flow.StateError, match=r"running_mean|num_batches|running_var"):
        predict(x)
    model.eval()
    eager.eval()
    torch.testing.assert_close(predict(x).detach(), eager(x).detach())


def test_state_can_be_saved_and_loaded_between_calls():
    model, eager = mlp(), mlp()
    optimizer, eager_optimizer = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["AdamW"](eager.parameters())
    step, eager_step = flow.global_function(train_step(model, optimizer)), train_step(eager, eager_optimizer)
    for x, y in batches(2):
        step(x, y)
        eager_step(x, y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    reference = eager_optimizer.state_dict()
    assert saved["optimizer"]["param_groups"] == reference["param_groups"]
    for index, values in reference["state"].items():
        close(saved["optimizer"]["state"][index], values)
    for x, y in batches(2):
        step(x, y)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert isinstance(optimizer.state[next(iter(model.parameters()))]["exp_avg"], OwnedTensor)
    for x, y in batches(3):
        torch.testing.assert_close(float(step(x, y)), eager_step(x, y).item(), rtol=1e-5, atol=1e-6)
    assert len(step.plans) == 1


def test_an_optimizer_state_that_was_loaded_before_the_first_call_is_taken_over():
    eager, model = mlp(), mlp()
    eager_optimizer = OPTIMIZERS["AdamW"](eager.parameters())
    eager_step = train_step(eager, eager_optimizer)
    for x, y in batches(2):
        eager_step(x, y)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    model.load_state_dict(eager.state_dict())
    optimizer.load_state_dict(eager_optimizer.state_dict())
    step = flow.global_function(train_step(model, optimizer))
    for x, y in batches(3):
        torch.testing.assert_close(float(step(x, y)), eager_step(x, y).item(), rtol=1e-5, atol=1e-6)


def test_a_prediction_before_training_and_an_optimizer_made_after_it_are_fine():
    model, eager = mlp(), mlp()
    predict = flow.global_function(type="predict")(lambda x: model(x))
    x, y = batches(1)[0]
    torch.testing.assert_close(predict(x).detach(), eager(x).detach())
    optimizer, eager_optimizer = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["AdamW"](eager.parameters())
    step, eager_step = flow.global_function(train_step(model, optimizer)), train_step(eager, eager_optimizer)
    for x, y in batches(2):
        torch.testing.assert_close(float(step(x, y)), eager_step(x, y).item(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(predict(x).detach(), eager(x).detach())


def test_freezing_a_part_between_calls_makes_another_plan():
    model, eager = mlp(), mlp()
    optimizer, eager_optimizer = OPTIMIZERS["SGD"](model.parameters()), OPTIMIZERS["SGD"](eager.parameters())
    step, eager_step = flow.global_function(train_step(model, optimizer)), train_step(eager, eager_optimizer)
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            model[0].requires_grad_(False)
            eager[0].requires_grad_(False)
        torch.testing.assert_close(float(step(x, y)), eager_step(x, y).item(), rtol=1e-5, atol=1e-6)
    assert len(step.plans) == 2
    close(model.state_dict(), eager.state_dict())


def test_two_jobs_share_a_discriminator_as_in_a_gan():
    def make() -> Any:
        torch.manual_seed(0)
        g, d = nn.Linear(8, 8), nn.Linear(8, 1)
        g_optimizer, d_optimizer = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.Adam(d.parameters(), lr=0.01)

        def d_step(x: Tensor) -> Tensor:
            loss = softplus(-d(x)).mean() + softplus(d(g(x).detach())).mean()
            loss.backward()
            d_optimizer.step()
            d_optimizer.zero_grad()
            return loss

        def g_step(x: Tensor) -> Tensor:
            loss = softplus(-d(g(x))).mean()
            loss.backward()
            g_optimizer.step()
            g_optimizer.zero_grad()
            d_optimizer.zero_grad()
            return loss

        return d_step, g_step, g, d

    d_step, g_step, g, d = make()
    e_d_step, e_g_step, e_g, e_d = make()
    d_job, g_job = flow.global_function(d_step), flow.global_function(g_step)
    for x, _ in batches(3):
        torch.testing.assert_close(float(d_job(x)), e_d_step(x).item(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(float(g_job(x)), e_g_step(x).item(), rtol=1e-5, atol=1e-6)
    close(g.state_dict(), e_g.state_dict())
    close(d.state_dict(), e_d.state_dict())


class Trainer:
    def __init__(self, width: int) -> None:
        self.model = nn.Linear(8, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @flow.global_function
    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_methods_are_jobs_of_their_objects():
    one, two = Trainer(2), Trainer(3)
    x, _ = batches(1)[0]
    first = float(one.step(x))
    assert float(one.step(x)) < first
    float(two.step(x))
    assert one.step.plan.variables[0].shape == (2, 8)
    assert two.step.plan.variables[0].shape == (3, 8)
    assert Trainer.step.plan is None


def test_a_job_inside_a_job_is_a_plain_function():
    model = mlp()
    inner = flow.global_function(type="predict")(lambda x: model(x))
    outer = flow.global_function(type="predict")(lambda x: inner(x) * 2)
    x, _ = batches(1)[0]
    torch.testing.assert_close(outer(x).detach(), inner(x).detach() * 2)


def test_replaced_parameters_are_taken_over():
    model = mlp()
    predict = flow.global_function(type="predict")(lambda x: model(x))
    x, _ = batches(1)[0]
    predict(x)
    model[0].weight = nn.Parameter(torch.zeros(16, 8))
    with torch.no_grad():
        other = mlp()
        other[0].weight.zero_()
    torch.testing.assert_close(predict(x).detach(), other(x).detach())
    model.load_state_dict({k: v * 0 for k, v in other.state_dict().items()}, assign=True)
    assert predict(x).abs().sum() == 0
    model[0].weight = nn.Parameter(torch.zeros(16, 9))
    with pytest.raises(flow.CallError, match=r"test_jobs\.py:\d+: predict = (.|\n)*\[12, 8\] X \[9, 16\]"):  # as eager
        predict(x)
    model[0].weight, model[0].bias = nn.Parameter(torch.ones(5, 8)), nn.Parameter(torch.ones(5))
    model[2].weight = nn.Parameter(torch.ones(4, 5))
    wanted = (5 * (x.sum(1, keepdim=True) + 1).relu()).expand(-1, 4)
    torch.testing.assert_close(predict(x).detach(), wanted)


def test_an_lstm_predicts_and_a_copy_of_it_is_real():
    torch.manual_seed(0)
    model = nn.LSTM(8, 4, batch_first=True)
    eager = copy.deepcopy(model)
    predict = flow.global_function(type="predict")(lambda x: model(x[:, None, :])[0])
    for x, _ in batches(2):
        torch.testing.assert_close(predict(x).detach(), eager(x[:, None, :])[0].detach())
    close(copy.deepcopy(model).state_dict(), eager.state_dict())


def test_a_parameter_that_the_step_does_not_use_stays_with_the_script():
    model = nn.ModuleDict({"used": nn.Linear(8, 2), "unused": nn.Linear(8, 2)})
    predict = flow.global_function(type="predict")(lambda x: model["used"](x))
    x, _ = batches(1)[0]
    predict(x)
    assert isinstance(model["used"].weight, OwnedTensor)
    assert not isinstance(model["unused"].weight, OwnedTensor)
    model["unused"](x)


# -- bad input -------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_each_other_show_the_users_line_and_all_shapes():
    model = mlp()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    step = flow.global_function(train_step(model, optimizer))
    with pytest.raises(flow.CallError) as caught:
        step(torch.randn(8, 8), torch.zeros(6, dtype=torch.long))
    text = str(caught.value)
    assert "test_jobs.py" in text
    assert "loss = cross_entropy(model(x), y)" in text
    assert "x: float32[8,8] (batch)" in text
    assert "y: int64[6]" in text
    float(step(*batches(1)[0]))  # a call that failed does no harm to those after it


def test_arguments_that_do_not_fit_the_model_show_the_users_line():
    model = mlp()
    predict = flow.global_function(type="predict")(lambda x: model(x))
    with pytest.raises(flow.CallError, match=r"model\(x\)"):
        predict(torch.randn(8, 9))


def test_a_data_dependent_branch_shows_the_users_line():
    model = mlp()

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        if out.sum() > 0:
            return out
        return -out

    with pytest.raises(flow.CaptureError, match=r"if out\.sum\(\) > 0"):
        job(torch.randn(2, 8))


def test_a_value_that_is_read_inside_of_a_job_shows_the_users_line():
    model = mlp()

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        int(out.sum())
        return out

    with pytest.raises(flow.CaptureError, match=r"test_jobs\.py:\d+: int\(out\.sum\(\)\)\n  the step looks at"):
        job(torch.randn(2, 8))


def test_more_placements_than_devices_name_both_numbers():
    model = mlp()
    flow.place(model, {r"2": flow.placement("cpu", [5])})
    predict = flow.global_function(type="predict")(lambda x: model(x))
    with pytest.raises(flow.LayoutError, match=r"rank 5.*1 device"):
        predict(torch.randn(2, 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_cuda_placement_without_cuda_is_refused():
    model = mlp()
    flow.place(model, {r"2": flow.placement("cuda", [0])})
    predict = flow.global_function(type="predict")(lambda x: model(x))
    with pytest.raises(flow.LayoutError, match="no CUDA"):
        predict(torch.randn(2, 8))


def test_an_sbp_that_does_not_fit_its_tensor_names_it():
    with pytest.raises(flow.LayoutError, match=r"2\.weight"):
        flow.distribute(mlp(), {r"2\.weight": flow.sbp.split(2)})


def test_a_result_that_cannot_travel_is_refused():
    model = mlp()
    predict = flow.global_function(type="predict")(lambda x: (model(x), object()))
    with pytest.raises(flow.CallError, match="object"):
        predict(torch.randn(2, 8))


def test_eager_use_after_the_first_call_is_read_and_a_backward_pass_points_to_a_job():
    model = mlp()
    predict = flow.global_function(type="predict")(lambda x: model(x))
    x = torch.randn(2, 8)
    wanted = predict(x)
    found = model(x)
    torch.testing.assert_close(found, wanted, check_dtype=False, rtol=1e-5, atol=1e-6)
    with pytest.raises(flow.StateError, match=r"expected: backward\(\) in a job"):
        found.sum().backward()


def test_settings_of_a_job_are_checked():
    with pytest.raises(flow.CallError, match="predict"):
        flow.global_function(type="test")(mlp)
    with pytest.raises(flow.CallError, match="micro_batches=0"):
        flow.global_function(micro_batches=0)(mlp)


def test_broadcast_and_partial_sum_may_be_called():
    assert flow.sbp.broadcast == flow.sbp.broadcast()
    assert flow.sbp.partial_sum == flow.sbp.partial_sum()
    assert flow.sbp.broadcast != flow.sbp.partial_sum
    assert {flow.sbp.broadcast(): 1}[flow.sbp.broadcast] == 1
    assert (str(flow.sbp.broadcast), str(flow.sbp.partial_sum), str(flow.sbp.split(1))) == ("B", "P", "S(1)")


def test_what_the_run_is_can_be_asked():
    assert (flow.env.rank(), flow.env.world_size(), flow.env.is_master(), flow.env.node_count()) == (0, 1, True, 1)
    assert isinstance(flow.explain(), str)
