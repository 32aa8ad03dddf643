"""A step is captured as if each of its ops were interpreted, though those like an earlier one are not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actorflow.script_state.search import find_state
from actorflow_compiler.capture import repeated_ops
from actorflow_compiler.capture.capture import StepToTrace, TensorArgument, capture
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.repeated_ops import RepeatedOps
from actorflow_compiler.compile import capture_step
from architectures import ARCHITECTURES, NOISY
from fewer import fewer
from models import CASES
from trained import Layout, request_of

MODELS = {**CASES, **ARCHITECTURES, **NOISY}
LIKE_OTHERS = ("gpt", "transformer", "recurrent with attention", "residual net", "variational autoencoder")
WIDTH, ROWS = 6, 4


@contextmanager
def interpreting_all() -> Iterator[None]:
    """Interpret each op of a step."""
    with mock.patch.object(repeated_ops, "_name_of", return_value=""):
        yield


@contextmanager
def counting() -> Iterator[list[int]]:
    """The number of ops that each trace has not interpreted."""
    modes: list[RepeatedOps] = []
    counts: list[int] = []
    make = RepeatedOps.__init__

    def made(self: RepeatedOps) -> None:
        make(self)
        modes.append(self)

    with mock.patch.object(RepeatedOps, "__init__", made):
        yield counts
    counts += [mode.repeated for mode in modes]


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in MODELS]
)
def test_models_are_captured_as_if_each_op_were_interpreted(name: str) -> None:
    found = capture_step(request_of(MODELS[name], Layout(1), 8)[0])
    with interpreting_all():
        expected = capture_step(request_of(MODELS[name], Layout(1), 8)[0])
    assert str(found.graph) == str(expected.graph)
    assert found == expected


# steps of one model and one argument that repeat what they do


class Blocks(nn.Module):
    """Linear layers, of which ``change`` makes something; and a buffer."""

    steps: Tensor

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.register_buffer("steps", torch.zeros(WIDTH))
        self.seen = 0


Step = Callable[[Blocks, Tensor], Tensor]


def captured(step: Step, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Capture:
    torch.manual_seed(0)
    model = Blocks()
    stepping = optimizer(model)

    def run(given: list[Tensor]) -> list[Tensor]:
        loss = step(model, given[0])
        loss.backward()  # type: ignore[no-untyped-call]
        stepping.step()
        stepping.zero_grad()
        return [loss]

    state = find_state(run, model=model, optimizer=stepping)
    argument = TensorArgument("x", (ROWS, WIDTH), torch.float32, True)
    return capture(StepToTrace(run, [argument], state, True, fresh=True))


def check(step: Step, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: sgd(m)) -> Capture:
    """Capture a step both ways; some op of it must not have been interpreted."""
    with counting() as repeated:
        found = captured(step, optimizer)
    assert sum(repeated) or step is pushed_forward  # which gives tangents to zeros
    with interpreting_all():
        expected = captured(step, optimizer)
    assert str(found.graph) == str(expected.graph)
    assert found == expected
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def changes_in_place(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        y = layer(x)
        y.add_(x).mul_(2)
        y[1:].mul_(3)
        y.t()[0].add_(y.t()[0])
        x = y
    return x.sum()


def views(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        a, b = layer(x).chunk(2, 1)
        x = torch.cat([b.clone(), a], 1).view(-1).view(ROWS, WIDTH).t().contiguous().t()
        x = x.unflatten(1, (2, 3)).movedim(1, 2).reshape(ROWS, WIDTH)
    return x.square().mean()


def one_tensor_twice(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        y = layer(x)
        x = y * y + y * x + x * x + torch.where(y > x, y, y)
    return x.sum()


def numbers_of_several_kinds(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        count = (layer(x) > 0).long()
        x = layer(x) * 1 + x * 1.0 + count * True + count * 1 + (count * 1.0) + count.sum(0) / 2 + x**2 + x**2.0
    return x.mean()


def default_dtypes(model: Blocks, x: Tensor) -> Tensor:
    made = []
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        made.append(torch.ones(WIDTH) + torch.full((WIDTH,), 2.0))
        torch.set_default_dtype(torch.float32)
    return sum((layer(x * m).sum() for m, layer in zip(made, [*model.layers] * 2, strict=False)), torch.zeros(()))


def several_results(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        values, places = layer(x).max(1)
        top, at = layer(x).topk(2, 1)
        x = F.layer_norm(x, (WIDTH,)) + values[:, None] + top.sum() + F.layer_norm(x, (WIDTH,)).gather(1, at).sum()
        assert not places.requires_grad
    return x.mean()


def written_results(model: Blocks, x: Tensor) -> Tensor:
    with torch.no_grad():
        for layer in model.layers:
            target, other = torch.empty_like(x), torch.zeros_like(x)
            torch.add(x, x, out=target)
            torch.add(x, target, out=other)
            torch.add(other, target, out=other)
            model.steps.add_(other.sum(0)).copy_(target[0])
            model.steps += layer.weight[0]
    return sum((layer(x).sum() for layer in model.layers), torch.zeros(()))


def results_over_operands(model: Blocks, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for i, layer in enumerate(model.layers):
        with torch.no_grad():
            factor = layer(x)
            target = factor if i == 0 else torch.zeros_like(x)
            torch.mul(factor, 2.0, out=target)
        total = total + (layer(x) * target * factor).sum()
    return total


def results_that_grow(model: Blocks, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for layer in model.layers:
        with torch.no_grad():
            double, top, at = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.long)
            torch.add(x, x, out=double)
            torch.max(x, 1, out=(top, at))
        total = total + (layer(double).gather(1, at[:, None]) * top[:, None]).sum()
    return total


def sparse_matrices(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = torch.sparse.mm(layer(x).to_sparse(), layer.weight)
    return x.sum()


def no_gradients(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        with torch.no_grad():
            scale = layer(x).abs().amax()
        x = layer(x) / scale.detach() + layer(x.detach())
    return x.sum()


def gradients_inside(model: Blocks, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for layer in model.layers:
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(layer(point).tanh().sum(), point, create_graph=True)
        total = total + slope.square().sum()
    return total


def recomputed(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = checkpoint(lambda y, layer=layer: layer(y).relu().tanh(), x, use_reentrant=False)
    return x.sum()


def mapped(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = torch.vmap(lambda row, layer=layer: layer(row) * row)(x) + layer(x)
    return x.sum()


def pushed_forward(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x, tangent = torch.func.jvp(lambda y, layer=layer: layer(y).tanh(), (x,), (x * 2,))
        x = x + tangent
    return x.sum()


def random(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = F.dropout(layer(x), 0.5) + torch.randn_like(x) + torch.rand(ROWS, 1) + F.dropout(x, 0.25)
    return x.sum()


def constants(model: Blocks, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        shift = torch.tensor([1.0, 2, 3, 4, 5, i])
        x = layer(x) * torch.tensor(2.0) + shift + torch.arange(WIDTH) * (torch.tensor(2) + torch.tensor(3)).item()
    return x.sum()


def complex_numbers(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        spectrum = torch.fft.rfft(layer(x))
        x = torch.fft.irfft(spectrum.conj() * spectrum + spectrum.imag, WIDTH) + torch.real(spectrum.conj()).sum()
    return x.sum()


def hooked(model: Blocks, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x)
        x.register_hook(lambda g, i=i: g * (i + 1) if i != 1 else None)
    return x.sum()


def counted(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        model.seen += 1
        x = layer(x) * model.seen
    return x.sum()


def mixed(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        with torch.autocast("cpu", torch.bfloat16):
            x = layer(x).softmax(-1) + layer(x)
        x = x.float() * 2
    return x.sum()


def indexed(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)[torch.tensor([0, 1, 1, 3])] + x[:, [5, 4, 3, 2, 1, 0]]
        x = x.index_add(0, torch.tensor([0, 2]), x[1:3]) + torch.where(x > 0, x, 0.0)
    return x.sum()


def strided(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        x = torch.as_strided(x.contiguous(), (ROWS, WIDTH - 1), (WIDTH, 1), 1).sum() + x + x.view(-1)[3:].sum()
    return x.sum()


def chains(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x.detach().requires_grad_()
        layer(x).sum().backward(retain_graph=True)
        x = x + (x.grad if x.grad is not None else 0)
    return sum((layer(x).sum() for layer in model.layers), torch.zeros(()))


STEPS = [
    changes_in_place, views, one_tensor_twice, numbers_of_several_kinds, default_dtypes, several_results,
    written_results, results_over_operands, results_that_grow, sparse_matrices, no_gradients, gradients_inside,
    recomputed, mapped, pushed_forward, random, constants, complex_numbers, hooked, counted, mixed, indexed, strided,
    chains,
]  # fmt: skip


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("step", STEPS, ids=operator.attrgetter("__name__"))
def test_steps_are_captured_as_if_each_op_were_interpreted(step: Step) -> None:
    check(step)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "tensor by tensor": lambda m: torch.optim.AdamW(m.parameters(), foreach=False),
    "without fused op": lambda m: torch.optim.Adadelta(m.parameters(), foreach=False),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), foreach=False),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), foreach=False),
}


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_are_captured_as_if_each_op_were_interpreted(kind: str) -> None:
    check(one_tensor_twice, OPTIMIZERS[kind])


class Block(nn.Module):
    """A residual block that draws random numbers, counts its calls, and reads a global."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.p, self.calls = 0.1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + F.dropout(self.norm(self.inner(x)), self.p, self.training) * self.calls * ROWS


DIFFERENCES: dict[str, Callable[[list[Block]], object]] = {
    "none": lambda blocks: None,
    "eps": lambda blocks: setattr(blocks[2].norm, "eps", 1e-3),
    "dropout": lambda blocks: setattr(blocks[1], "p", 0.5),
    "evaluated": lambda blocks: blocks[2].eval(),
    "shared": lambda blocks: setattr(blocks[2].inner, "weight", blocks[0].inner.weight),
    "frozen": lambda blocks: blocks[1].inner.weight.requires_grad_(False),
    "hook": lambda blocks: blocks[1].register_forward_hook(lambda module, given, out: out * 2),
    "hook of a gradient": lambda blocks: blocks[1].inner.weight.register_hook(lambda grad: grad * 2),
    "calls": lambda blocks: setattr(blocks[1], "calls", 3),
}


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_blocks_that_only_look_alike_are_captured_as_they_are(difference: str) -> None:
    def captured_blocks() -> Capture:
        torch.manual_seed(0)
        blocks = [Block() for _ in range(3)]
        DIFFERENCES[difference](blocks)
        model = nn.Sequential(*blocks)
        stepping = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

        def run(given: list[Tensor]) -> list[Tensor]:
            loss = model(given[0]).sum()
            loss.backward()
            stepping.step()
            return [loss]

        state = find_state(run, model=model, optimizer=stepping)
        argument = TensorArgument("x", (ROWS, WIDTH), torch.float32, True)
        return capture(StepToTrace(run, [argument], state, True, fresh=True))

    with counting() as repeated:
        found = captured_blocks()
    assert sum(repeated)
    with interpreting_all():
        expected = captured_blocks()
    assert str(found.graph) == str(expected.graph)
    assert found == expected


def test_most_ops_of_layers_alike_are_not_interpreted() -> None:
    with counting() as repeated:
        nodes = len(captured(one_tensor_twice, sgd).graph.nodes)
    assert sum(repeated) > nodes / 3


MOVES: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "layer": lambda x, layer: layer(x),
    "in place": lambda x, layer: (x * 1).add_(x).relu_(),
    "view": lambda x, layer: x.t().reshape(WIDTH, ROWS).t(),
    "rows": lambda x, layer: torch.cat([x[1:], x[:1]]),
    "norm": lambda x, layer: F.layer_norm(x, (WIDTH,)),
    "dropout": lambda x, layer: F.dropout(x, 0.5),
    "double": lambda x, layer: x.double().float(),
    "changed view": lambda x, layer: (y := x.clone(), y[0].mul_(3), y[:, 1:3].zero_())[0],
    "attention": lambda x, layer: F.scaled_dot_product_attention(*(x[None, None],) * 3)[0, 0],
    "whole": lambda x, layer: x * 2 + x.sum() * 2,
    "fraction": lambda x, layer: x * 2.0 + x.mean(1, keepdim=True),
}


@pytest.mark.slow
@given(moves=st.lists(st.sampled_from([*MOVES]), min_size=1, max_size=4), twice=st.integers(2, 3), cut=st.booleans())
@settings(deadline=None, max_examples=fewer(12))
def test_stacks_of_blocks_are_captured_as_if_each_op_were_interpreted(moves: list[str], twice: int, cut: bool) -> None:
    def step(model: Blocks, x: Tensor) -> Tensor:
        for layer in [*model.layers][:twice]:
            x = layer(x.detach() if cut else x)
            for move in moves:
                x = MOVES[move](x, layer)
        return x.sum()

    check(step)
