"""Models whose values do not lie row by row in memory train under every plan as eagerly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import actorflow as flow
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.custom_ops.optimizers import SCALARS
from actorflow_compiler.hints.goal import Goal
from models import Batch, Case, reference, setting
from trained import Layout, differences, plan_of, train_eagerly, train_planned

SIZES = [4, 4]
LAYOUTS = {
    "one device": Layout(1),
    "two micro-batches": Layout(1, 2),
    "data 2": Layout(2),
    "tensor 2": Layout(2, goal=Goal(("tensor",))),
    "pipeline 2": Layout(2, 2, pipeline=True),
    "ZeRO 1": Layout(2, prepare=lambda model: flow.zero(model, stage=1)),
    "ZeRO 2": Layout(2, prepare=lambda model: flow.zero(model, stage=2)),
    "ZeRO 3": Layout(2, prepare=lambda model: flow.zero(model, stage=3)),
}


def check(case: Case, layout: Layout) -> None:
    """Compare with eager training in float64."""
    losses, parameters = train_eagerly(case, SIZES, 1)
    found, state, _ = train_planned(case, layout, SIZES)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-9, atol=1e-12)
    worst = max(differences(state, parameters).items(), key=lambda item: item[1])
    assert worst[1] <= 1e-9, worst


# ---- images and noise


class Block(nn.Module):
    """Group norms and convolutions around a time, as in a UNet of a diffusion model."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, out)
        self.conv_1, self.conv_2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.skip = nn.Linear(time, out), nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(h)))


class Attention(nn.Module):
    """Pixels attend to each other: what comes out lies with channels innermost."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(2, channels), nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(pixels).view(n, h * w, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).reshape(n, c, h, w)


class Denoiser(nn.Module):
    """Images float64[n, 3, 8, 8] and times int64[n] to noise like the images."""

    def __init__(self, width: int = 4, time: int = 8) -> None:
        super().__init__()
        self.time, self.enter = nn.Linear(time, time), nn.Conv2d(3, width, 3, padding=1)
        self.down, self.shrink = Block(width, 2 * width, time), nn.Conv2d(2 * width, 2 * width, 3, 2, padding=1)
        self.attention, self.middle = Attention(2 * width), Block(2 * width, 2 * width, time)
        self.grow, self.up = nn.Conv2d(2 * width, 2 * width, 3, padding=1), Block(4 * width, width, time)
        self.norm, self.leave = nn.GroupNorm(2, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        waves = times[:, None] * torch.exp(-math.log(100) * torch.arange(4) / 4)
        time = self.time(torch.cat([waves.sin(), waves.cos()], 1).to(x.dtype))
        wide = self.down(self.enter(x), time)
        small = self.middle(self.attention(self.shrink(wide)), time)
        large = self.grow(F.interpolate(small, scale_factor=2.0, mode="nearest"))
        out: Tensor = self.leave(F.silu(self.norm(self.up(torch.cat([large, wide], 1), time))))
        return out


def noisy_batches(sizes: Sequence[int]) -> list[Batch]:
    g = torch.Generator().manual_seed(0)

    def images(n: int) -> Tensor:
        return torch.randn(n, 3, 8, 8, generator=g, dtype=torch.float64)

    return [(images(n), torch.randint(0, 100, (n,), generator=g), images(n)) for n in sizes]


def noise_loss(model: nn.Module, x: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(model(x, times), noise)


def noise_loss_channels_last(model: nn.Module, x: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(model(x.to(memory_format=torch.channels_last), times), noise)


DENOISER = Case(
    lambda: Denoiser().double(),
    lambda m: AdamW(m.parameters(), lr=1e-2, eps=1e-3),
    noisy_batches,
    ("time|enter|down|shrink", "attention|middle|grow|up|norm|leave"),
    loss=noise_loss,
    names=("x", "times", "noise"),
)
CHANNELS_LAST = replace(
    DENOISER,
    make=lambda: Denoiser().double().to(memory_format=torch.channels_last),
    loss=noise_loss_channels_last,
)


@pytest.mark.slow
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", ["data 2", "tensor 2", "pipeline 2", "ZeRO 3"])
@pytest.mark.parametrize("case", [DENOISER, CHANNELS_LAST], ids=["row by row", "channels last"])
def test_a_diffusion_model_trains_as_eagerly(case: Case, layout: str) -> None:
    check(case, LAYOUTS[layout])


# ---- parameters


class Matrices(nn.Module):
    """Square matrices that lie column by column, or with gaps, under what linear algebra makes of them."""

    def __init__(self, make: Callable[[], Tensor], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.use = nn.Linear(4, 4), use
        self.weight = nn.Parameter(make())
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.middle(self.first(x))))
        return out

    def middle(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


def transposed() -> Tensor:
    return (torch.randn(4, 4, dtype=torch.float64) / 2 + 2 * torch.eye(4)).t()


def rotation() -> Tensor:
    return torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]


def gaps() -> Tensor:
    return (torch.randn(8, 9, dtype=torch.float64) / 2 + 2 * torch.eye(8, 9))[::2, ::2][:, :4]


def changed(x: Tensor, w: Tensor) -> Tensor:
    """A view of memory is written to."""
    own = w.contiguous() * 2
    own.as_strided((4,), (5,)).mul_(x.mean(0))
    return x @ own


MAKES = {"transposed": transposed, "rotation": rotation, "with gaps": gaps}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w,
    "det": lambda x, w: x * torch.det(w),
    "slogdet": lambda x, w: x @ w + torch.slogdet(w)[1],
    "logdet of a square": lambda x, w: x @ w + torch.logdet(w @ w.t() + torch.eye(4)),
    "solve": lambda x, w: torch.linalg.solve(w, x.t()).t(),
    "inv": lambda x, w: x @ torch.linalg.inv(w),
    "qr": lambda x, w: x @ torch.linalg.qr(w)[0],
    "cholesky": lambda x, w: x @ torch.linalg.cholesky(w @ w.t() + torch.eye(4)),
    "svd": lambda x, w: x @ w + torch.linalg.svdvals(w),
    "exponential": lambda x, w: x @ torch.linalg.matrix_exp(w),
    "view of the transposed": lambda x, w: x * w.t().reshape(-1)[:4] + w.flatten()[4:8],
    "diagonal": lambda x, w: x * w.as_strided((4,), (w.stride(0) + w.stride(1),)),
    "its memory": lambda x, w: x @ w.as_strided((4, 4), (4, 1)),
    "a change of its memory": changed,
    "a branch on strides": lambda x, w: x @ (w if w.is_contiguous() else 2 * w),
    "convolution": lambda x, w: F.conv2d(x.view(-1, 4, 1, 1), w.view(4, 4, 1, 1)).flatten(1),
}
ADAMW = lambda m: AdamW(m.parameters(), lr=1e-2, eps=1e-3)  # noqa: E731


def rows(sizes: Sequence[int]) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(n, 4, generator=g, dtype=torch.float64) for _ in range(2)) for n in sizes]


def row_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def matrices(make: str, use: str) -> Case:
    return Case(lambda: Matrices(MAKES[make], USES[use]).double(), ADAMW, rows, ("first", "head"), loss=row_loss)


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("layout", ["tensor 2", "pipeline 2"])
@pytest.mark.parametrize("use", USES)
def test_what_is_made_of_a_transposed_parameter_trains_as_eagerly(use: str, layout: str) -> None:
    check(matrices("transposed", use), LAYOUTS[layout])


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["one device", "data 2", "ZeRO 1", "ZeRO 2", "ZeRO 3"])
@pytest.mark.parametrize("use", ["product", "slogdet"])
@pytest.mark.parametrize("make", MAKES)
def test_a_parameter_trains_as_eagerly_however_it_lies(make: str, use: str, layout: str) -> None:
    check(matrices(make, use), LAYOUTS[layout])


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x * w.as_strided((4,), (20,)),  # beyond its last element
        lambda x, w: x * w.t()[1:].as_strided((4,), (1,), 0),  # before its first one
        lambda x, w: x * w[:2].as_strided((4,), (1,)),  # between its elements
    ],
    ids=["beyond", "before", "between"],
)
def test_a_view_of_memory_beside_a_tensor_is_refused(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    case = Case(lambda: Matrices(transposed, use).double(), ADAMW, rows, ("first", "head"), loss=row_loss)
    with pytest.raises(CaptureError, match=r"(?s)test_memory_layouts.py.*as_strided.*clone\(\)"):
        train_planned(case, Layout(1), SIZES)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": ADAMW,
    "adagrad": lambda m: Adagrad(m.parameters(), lr=0.1),
}
KEPT = {"sgd": "momentum_buffer", "adamw": "exp_avg", "adagrad": "sum"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_a_parameter_that_the_step_made_another_way_is_its_own(name: str) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model[1].weight.copy_((1.5 * model[1].weight).t())
        return row_loss(model, x, y)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()

    case = Case(make, OPTIMIZERS[name], rows, ("0", "1"), loss=loss)
    model = case.model()
    optimizer = case.optimizer(model)
    expected, _ = reference(model, optimizer, loss, rows(SIZES), 1)
    plan, values, planned = plan_of(case, Layout(1), SIZES[0])
    op = {"sgd": "actorflow.sgd", "adamw": "actorflow.adam", "adagrad": "actorflow.adagrad"}[name]
    settings = {f"optimizer.0.{key}": setting(planned.param_groups[0], key) for key in SCALARS[op]}
    with LocalCluster(plan, variables=values, timeout=200.0) as cluster:
        for batch, wanted in zip(rows(SIZES), expected, strict=True):
            (found,) = cluster.run(dict(zip(case.names, batch, strict=True)), settings)
            torch.testing.assert_close(found.item(), wanted, rtol=1e-9, atol=0)
        state = cluster.variable(f"optimizer.model.1.weight.{KEPT[name]}")
    torch.testing.assert_close(state, optimizer.state[model[1].weight][KEPT[name]], rtol=1e-9, atol=1e-12)
