"""Stand-ins for tensors that a plan owns."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actorflow.standins.owned_tensor import OwnedTensor
from actorflow_compiler.core.errors import StateError


class Values:
    """Holds the values, as a plan would."""

    capturing = False

    def __init__(self) -> None:
        self.now: dict[str, Tensor] = {}
        self.moment = 0

    def share(self, name: str, copy: Tensor) -> None:
        pass

    def tie(self, owned: OwnedTensor, data: Tensor | None) -> None:
        pass

    def read(self, name: str) -> Tensor:
        return self.now[name].clone()

    def write(self, name: str, value: Tensor) -> None:
        self.now[name] = value.clone()
        self.moment += 1


values = Values()


@pytest.fixture
def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for module in made.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                assert tensor is not None
                name = f"{type(module).__name__}.{key}"
                values.now[name] = tensor.detach().clone()
                tensors[key] = OwnedTensor.of(tensor, name, values)  # type: ignore[assignment]
    return made


def test_it_tells_what_a_tensor_without_memory_can_tell(model: Any):
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(model[1].running_mean, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.numel(), weight.requires_grad, weight.is_leaf) == (
        (3, 2),
        torch.float32,
        6,
        True,
        True,
    )
    assert weight.grad is None
    assert [n for n, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert sum(p.numel() for p in model.parameters()) == 15


def test_printing_it_tells_that_a_plan_owns_it(model: Any):
    assert "Linear.weight" in repr(model[0].weight)
    assert "owned by the plan" in str(model[0].weight)
    assert "Linear(in_features=2" in repr(model)


def test_state_dict_holds_values_and_can_be_saved_copied_and_loaded(model: Any):
    state = model.state_dict()
    assert all(type(v) is Tensor for v in state.values())
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    file.seek(0)
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other[0].weight, values.now["Linear.weight"])
    with torch.no_grad():
        other[0].weight.fill_(7)
    model.load_state_dict(other.state_dict())
    assert (values.now["Linear.weight"] == 7).all()
    assert isinstance(model[0].weight, OwnedTensor)


def test_a_deep_copy_or_a_pickle_of_the_model_is_a_real_model(model: Any):
    x = torch.randn(4, 2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0].weight) is nn.Parameter
        assert other[0].weight.requires_grad
        assert other(x).shape == (4, 3)


USES: dict[str, Callable[[Any], object]] = {
    "mul_": lambda m: m[0].weight.mul_(2),
    "numpy": lambda m: m[0].weight.numpy(),
    "grad": lambda m: torch.autograd.grad(m(torch.ones(2, 2)).sum(), m[0].weight, allow_unused=True),
    "add": lambda m: torch.add(m[0].weight, 1, out=torch.empty(3, 2)),
}
READINGS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda m: m(torch.ones(4, 2)),
    "sum": lambda m: m[0].weight.sum(),
    "clone": lambda m: m[0].weight.clone(),
    "cat": lambda m: torch.cat([m[0].weight, m[0].weight]),
    "exp": lambda m: m[0].weight.exp() * m[0].bias.detach()[:, None],
    "matmul": lambda m: torch.ones(5, 3) @ m[0].weight,
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m[0].parameters()),
    "a view, transposed": lambda m: m[0].weight[1:].t() @ torch.ones(2),
}


@pytest.mark.parametrize("named", USES)
def test_any_other_use_names_the_parameter_and_points_to_a_predict_job(model: Any, named: str):
    with pytest.raises(StateError, match=r"Linear\.weight") as caught:
        USES[named](model)
    assert named in str(caught.value)
    assert 'type="predict"' in str(caught.value)


@pytest.mark.parametrize("named", READINGS)
def test_what_is_computed_of_it_is_looked_at_and_takes_no_gradients(model: Any, named: str):
    wanted = READINGS[named](plain := copy.deepcopy(model))
    found = READINGS[named](model)
    assert found.requires_grad
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    with pytest.raises(StateError, match=r"a backward pass outside of jobs reaches \w+\.(weight|bias).*in a job"):
        found.square().sum().backward()
    assert model[0].weight.grad is None


def test_a_view_with_a_graph_shows_what_the_parameter_has_and_changes_it_as_in_pytorch(model: Any):
    plain = copy.deepcopy(model)
    found, wanted = model[0].weight[1:].t(), plain[0].weight[1:].t()
    assert found.requires_grad
    assert not found.is_leaf
    for weight, view in ((model[0].weight, found), (plain[0].weight, wanted)):
        with torch.no_grad():
            weight.mul_(2)
            view[0] += 1
        with pytest.raises(RuntimeError):
            view.add_(1)
    torch.testing.assert_close(found + 0, wanted + 0)
    torch.testing.assert_close(values.now["Linear.weight"], plain[0].weight.detach())


def test_gradients_of_inputs_go_through_it(model: Any):
    x = torch.randn(4, 2, requires_grad=True)
    model.eval()
    wanted = torch.autograd.grad(copy.deepcopy(model)(x).square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(model(x).square().sum(), x), wanted)


def test_where_no_gradient_goes_through_it_it_is_read_and_changed(model: Any):
    weight, mean = model[0].weight, model[1].running_mean
    before = values.now["Linear.weight"].clone()
    with torch.no_grad():
        assert weight.sum() == before.sum()
        assert weight.mul_(2) is weight
        weight[0] += 1
    weight.data.add_(weight.data)
    weight.data = weight.data - 1
    before[0] += 0.5
    torch.testing.assert_close(values.now["Linear.weight"], 4 * before - 1)
    nn.init.constant_(tensor=weight, val=3.0)
    assert (values.now["Linear.weight"] == 3).all()
    mean.zero_().add_(torch.ones(3, requires_grad=True).detach())
    assert (values.now["BatchNorm1d.running_mean"] == 1).all()
    assert model.cpu()[0].weight is weight
    assert isinstance(weight, OwnedTensor)


def test_what_would_lose_a_change_is_refused(model: Any):
    weight = model[0].weight
    with pytest.raises(StateError, match=r"Linear\.weight, torch\.float32\[3, 2\] on cpu, would become .*float32\[2\]"):
        weight.data = torch.zeros(2)
    with pytest.raises(StateError, match=r"Linear\.weight, .* would become torch\.float16\[3, 2\]"):
        model.half()
    with torch.no_grad(), pytest.raises(StateError, match="data_ptr"):
        weight.data_ptr()
    with pytest.raises(ValueError, match="read-only"):
        weight.data.numpy()[0] = 1


def test_tensors_can_be_made_like_it(model: Any):
    weight = model[0].weight
    full = torch.full_like(weight, 2.0, dtype=torch.float64)
    assert type(full) is Tensor
    assert full.equal(torch.full((3, 2), 2.0, dtype=torch.float64))
    assert torch.zeros_like(weight, device=None).equal(torch.zeros(3, 2))
    accumulating = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert accumulating.state[weight]["sum"].equal(torch.full((3, 2), 0.5))


def test_requires_grad_can_be_changed(model: Any):
    model[0].requires_grad_(False)
    assert not model[0].weight.requires_grad
    model[0].weight.requires_grad = True
    assert model[0].weight.requires_grad


def test_harmless_things_that_scripts_do_work(model: Any):
    model.train()
    model.eval()
    model.zero_grad()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.zero_grad()
    assert "Adam" in repr(optimizer)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_swapping_makes_every_reference_a_stand_in():
    linear = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = list(linear.parameters())
    torch.utils.swap_tensors(linear.weight, OwnedTensor.of(linear.weight, "w", values))
    assert isinstance(kept[0], OwnedTensor)
    assert kept[0] is linear.weight is optimizer.param_groups[0]["params"][0]
    assert kept[0] in optimizer.state


def test_a_number_that_is_no_parameter_can_be_read_and_set():
    values.now["scale"] = torch.tensor(4.0)
    scale = OwnedTensor.of(values.now["scale"], "scale", values)
    assert scale.item() == 4.0
    assert scale.fill_(8.0) is scale
    assert values.now["scale"].item() == 8.0
    values.now["bias"] = torch.tensor(1.0)
    bias = OwnedTensor.of(nn.Parameter(torch.tensor(1.0)), "bias", values)
    assert (bias.item(), float(bias), bias.tolist()) == (1.0, 1.0, 1.0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "mul_": lambda w: w.mul_(2),
    "an operator in place": lambda w: operator.iadd(w, 1.0),
    "an item": lambda w: operator.setitem(w, 1, 0.5),
    "a view": lambda w: w[0].add_(1),
    "a view of a view": lambda w: w.view(-1)[2:4].zero_(),
    "data": lambda w: w.data.mul_(0.5),
    "a view of data": lambda w: w.data[1].fill_(3),
    "data that is set": lambda w: setattr(w, "data", torch.full((3, 2), 4.0)),
    "out": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "an initialisation": lambda w: nn.init.constant_(w, 0.1),
    "lerp_ to itself": lambda w: w.lerp_(w * 2, 0.5),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_under_no_grad_is_changed(model: Any, change: str):
    plain = nn.Parameter(model[0].weight.detach().clone())
    with torch.no_grad():
        CHANGES[change](plain)
        CHANGES[change](model[0].weight)
    assert values.now["Linear.weight"].equal(plain.detach())
    assert type(model[0].weight) is OwnedTensor


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_read_under_no_grad_is_a_plain_value(model: Any, mode: Any):
    x = torch.randn(4, 2)
    other = copy.deepcopy(model)
    with mode():
        assert torch.equal(model(x), other(x))  # which changes the running mean, too
        assert model[0].weight.norm() == other[0].weight.norm()
        assert torch.equal(torch.cat([p.view(-1) for p in model.parameters()]), torch.cat(
            [p.view(-1) for p in other.parameters()]
        ))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_initialisations_and_data_need_no_no_grad(model: Any):
    nn.init.constant_(model[0].weight, 0.25)
    model[0].bias.data.fill_(0.5)
    assert torch.arange(6.0).view_as(model[0].weight).shape == (3, 2)
    assert (values.now["Linear.weight"] == 0.25).all()
    assert (values.now["Linear.bias"] == 0.5).all()


def test_data_of_another_dtype_is_refused(model: Any):
    with pytest.raises(StateError, match=r"Linear\.weight.*float16.*copy\.deepcopy"):
        model.half()
    model.to("cpu").float()
    assert type(model[0].weight) is OwnedTensor


def test_nothing_is_read_while_a_step_is_captured(model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Values, "capturing", True)
    with torch.no_grad(), pytest.raises(StateError, match=r"Linear\.weight"):
        model[0].weight.mul_(2)
