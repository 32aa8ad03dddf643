"""Observers and fake quantisation of ``torch.ao`` in a step keep the ranges that they keep eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization as q

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao will have all of it one day
Models = Callable[[], nn.Module]


def layers(*between: nn.Module) -> nn.Module:
    first, second, third = between
    torch.manual_seed(0)
    return nn.Sequential(first, nn.Linear(6, 8), second, nn.ReLU(), nn.Linear(8, 4), third)


def prepared(backend: str) -> nn.Module:
    model = layers(q.QuantStub(), nn.Identity(), q.DeQuantStub())
    model.qconfig = q.get_default_qat_qconfig(backend)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q.prepare_qat(model.train(), inplace=True)
    return model


def convolution() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model.qconfig = q.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return q.prepare_qat(q.fuse_modules_qat(model.train(), [["1", "2", "3"]]))


def symmetric() -> nn.Module:
    kind = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
    return q.FakeQuantize(q.MinMaxObserver, quant_min=-128, quant_max=127, **kind)


MODELS: dict[str, Models] = {
    "smallest and largest": lambda: layers(q.MinMaxObserver(), q.MovingAverageMinMaxObserver(), q.FakeQuantize()),
    "symmetric": lambda: layers(symmetric(), q.default_fake_quant(), nn.Identity()),
    "x86": lambda: prepared("x86"),
    "qnnpack": lambda: prepared("qnnpack"),
    "a convolution with its norm": convolution,
}


def trained(decorate: Callable[[Any], Any], make: Models, switch: bool = False) -> tuple[Tensor, Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @decorate
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    g = torch.Generator().manual_seed(1)
    losses = []
    for number in range(7):
        if switch and number == 2:
            model.apply(q.disable_observer)
        if switch and number == 4:
            model.apply(q.disable_fake_quant)
        if switch and number == 5:
            model.apply(q.enable_observer)
            model.apply(q.enable_fake_quant)
        losses.append(float(step(torch.randn(8, 6, generator=g) * (1 + number / 3)).detach()))
    state = [torch.as_tensor(t.detach().tolist()).reshape(-1).double() for t in model.state_dict().values()]
    return torch.tensor(losses), torch.cat(state)


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize("switch", [False, True], ids=["on", "switched"])
@pytest.mark.parametrize("kind", MODELS)
def test_ranges_follow_as_eagerly(kind: str, switch: bool) -> None:
    wanted = trained(lambda f: f, MODELS[kind], switch)
    for one, other in zip(trained(flow.global_function, MODELS[kind], switch), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [q.PerChannelMinMaxObserver, q.MovingAveragePerChannelMinMaxObserver])
def test_an_observer_of_channels_that_has_seen_values_goes_on(kind: Any) -> None:
    def make() -> nn.Module:
        model = layers(kind(ch_axis=1), nn.Identity(), nn.Identity())
        model(torch.ones(2, 6))
        return model

    wanted = trained(lambda f: f, make)
    for one, other in zip(trained(flow.global_function, make), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_an_observer_of_channels_that_has_seen_none_is_refused() -> None:
    def make() -> nn.Module:
        return layers(q.PerChannelMinMaxObserver(ch_axis=1), nn.Identity(), nn.Identity())

    with pytest.raises(CaptureError, match="called before the first call of the job"):
        trained(flow.global_function, make)


def test_histograms_are_refused_with_what_to_use() -> None:
    with pytest.raises(CaptureError, match="MovingAverageMinMaxObserver"):
        trained(flow.global_function, lambda: layers(q.HistogramObserver(), nn.Identity(), nn.Identity()))
