"""Written-out ops compute what torch's own do, and what is left is made of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from actorflow_compiler.capture.from_fx import PlaceholderNames, to_graph
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.sbp import B, P, Split
from actorflow_compiler.graph.graph import call_of, verify
from actorflow_compiler.signatures import signatures
from actorflow_compiler.substitutes.decompositions import BATCH_NORM, TABLE, join_norms
from signature_checks import Collector, run
from signature_samples import calls, f, n

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:reduction. .mean.", "ignore:.*degrees of freedom")  # on purpose


def traced(function: Callable[..., Any], *tensors: Tensor, table: Any = TABLE) -> torch.fx.GraphModule:
    """What a captured step looks like after decomposition."""
    raw = make_fx(function)(*tensors)
    return make_fx(functionalize(raw, remove="mutations"), decomposition_table=table)(*tensors)


def names(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def with_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[..., list[Tensor]]:
    def run(*given: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
        out = function(*leaves)
        wanted = [x for x in leaves if x.requires_grad]
        weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), wanted)]

    return run


def assert_same(function: Callable[..., Any], *tensors: Tensor, tolerance: float = 1e-10) -> list[str]:
    """Trace with decompositions, compare with eager; returns the names of the ops."""
    module = traced(function, *tensors)
    for ours, theirs in zip(module(*tensors), function(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    return names(module)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda x, y, r: F.mse_loss(x, y, reduction=r),
    "huber": lambda x, y, r: F.huber_loss(x, y, reduction=r, delta=0.3),
    "smooth_l1": lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r, beta=0.3),
    "l1": lambda x, y, r: F.l1_loss(x, y, reduction=r),
    "bce": lambda x, y, r: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r),
    "bce_weighted": lambda x, y, r: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), y.detach().abs(), reduction=r),
    "bce_logits": lambda x, y, r: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=y.detach()[0].abs(), reduction=r
    ),
    "soft_cross_entropy": lambda x, y, r: F.cross_entropy(x, y.softmax(-1), reduction=r),
    "kl": lambda x, y, r: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=r),
}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_a_sum_over_a_constant(loss: str, reduction: str) -> None:
    x, y = f(5, 7), f(5, 7)
    ops = assert_same(with_gradients(lambda a, b: LOSSES[loss](a, b, reduction)), x, y)
    assert not [op for op in ops if "loss" in op or "mean" in op or "binary" in op]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3, 2)])
def test_cross_entropy_divides_by_a_weight_made_of_the_targets_alone(
    shape: tuple[int, ...], weighted: bool, reduction: str
) -> None:
    target = n(*shape[:1], *shape[2:], below=7)
    target.view(-1)[1] = -100
    weight = f(7, low=0.2) if weighted else None

    def run(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, weight, ignore_index=-100, reduction=reduction)

    x = f(*shape)
    assert_same(with_gradients(run), x, target)
    module = traced(with_gradients(run), x, target)
    logits = module.graph.find_nodes(op="placeholder")[0]
    tainted = {logits}
    for node in module.graph.nodes:
        if node.op == "call_function" and tainted & set(node.all_input_nodes):
            tainted.add(node)
        assert "nll_loss" not in str(node.target)
        if str(node.target) == "aten.div.Tensor" and reduction == "mean":
            assert node.args[1] not in tainted


@pytest.mark.parametrize("ignored", [-100, 4, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_sample_without_a_batch_has_a_loss(reduction: str, ignored: int) -> None:
    weight = f(7, low=0.5)

    def run(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, weight, ignore_index=ignored, reduction=reduction)

    assert not [op for op in assert_same(with_gradients(run), f(7), torch.tensor(4)) if "nll" in op]


@pytest.mark.parametrize("ignored", [-100, 0])
def test_smoothed_labels_are_those_of_torch(ignored: int) -> None:
    target, weight = n(5, 3, below=7), f(7, low=0.2)
    target[1, 1] = ignored

    def run(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, weight, ignore_index=ignored, label_smoothing=0.3)

    assert_same(with_gradients(run), f(5, 7, 3), target)


def test_the_backward_pass_of_a_loss_makes_one_tensor_of_the_size_of_the_logits() -> None:
    module = traced(with_gradients(lambda x, t: F.nll_loss(x, t)), f(5, 7), n(5, below=7))
    made = [str(k.target) for k in module.graph.nodes if k.op == "call_function" and k.meta["val"].shape == (5, 7)]
    assert [op for op in made if "detach" not in op] == ["actorflow.pick_backward.default"]


def test_a_mean_over_targets_that_are_all_ignored_is_not_a_number() -> None:
    x, target = f(5, 7), torch.full((5,), -100)
    assert_same(with_gradients(lambda x, t: F.cross_entropy(x, t)), x, target)
    assert traced(lambda x, t: F.cross_entropy(x, t), x, target)(x, target).isnan()


def test_the_total_weight_of_half_precision_losses_does_not_saturate() -> None:
    x, target = f(5000, 2).bfloat16(), torch.zeros(5000, dtype=torch.int64)
    exact = float(F.cross_entropy(x.double(), target))
    assert float(traced(lambda x, t: F.cross_entropy(x, t), x, target)(x, target)) == pytest.approx(exact, rel=1e-2)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of a dim": lambda x: x.mean(-1),
    "mean of dims": lambda x: x.mean((0, 2), keepdim=True),
    "mean of half": lambda x: x.half().mean(1),
    "mean as": lambda x: x.mean(1, dtype=torch.float32),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm of a dim": lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "one norm": lambda x: torch.linalg.vector_norm(x, 1),
    "largest norm": lambda x: torch.linalg.vector_norm(x, torch.inf, dim=(0, 2)),
    "var": lambda x: x.var(),
    "var of dims": lambda x: x.var((0, -1), keepdim=True),
    "biased var": lambda x: x.var(1, correction=0),
    "var of one": lambda x: x[:1, :1, 0].var(),
    "std": lambda x: x.std(1),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, 1)),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, (0, 1), correction=2)),
    "scalar": lambda x: x[0, 0, 0].mean() + torch.linalg.vector_norm(x[0, 0, 0]),
}


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_statistic_is_made_of_sums(statistic: str) -> None:
    ops = assert_same(lambda x: [STATISTICS[statistic](x)], f(5, 7, 3))
    assert not [op for op in ops if any(word in op for word in ("mean", "norm", "var", "std"))]


def test_the_bias_gradient_of_a_convolution_is_a_sum_of_its_own() -> None:
    for args, _ in calls("aten.convolution.default"):
        x, w, bias, *rest = args
        if bias is not None:
            ops = assert_same(
                with_gradients(lambda x, w, b, rest=rest: aten.convolution(x, w, b, *rest)), x, w, bias, tolerance=1e-8
            )
            assert "aten.sum.dim_IntList" in ops


def test_clipping_gradients_needs_only_sums_of_squares() -> None:
    def step(x: Tensor) -> list[Tensor]:
        p = [(x * 1.0).detach(), (x[0] * 2.0).detach()]
        for q in p:
            q.grad = q * 3.0
        total = torch.nn.utils.clip_grad_norm_(p, 0.5, foreach=False)
        return [total, *(q.grad for q in p if q.grad is not None)]

    assert not [op for op in assert_same(step, f(5, 7)) if "norm" in op]


def batch_norm_step(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, upstream: Tensor, training: bool
) -> list[Tensor]:
    out, m, inv, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, 0.1, 1e-5
    )
    grads = aten.native_batch_norm_backward(upstream, x, weight, mean, var, m, inv, training, 1e-5, [True, True, True])
    return [out, new_mean, new_var, *grads]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 7), (4, 3, 2, 5)])
def test_batch_norm_in_sums_is_batch_norm(shape: tuple[int, ...], training: bool) -> None:
    tensors = [f(*shape), f(3), f(3), f(3), f(3, low=0.5), f(*shape)]

    def run(*given: Tensor) -> list[Tensor]:
        return batch_norm_step(*given, training)  # type: ignore[call-arg]

    module = traced(run, *tensors, table=BATCH_NORM)
    assert not [op for op in names(module) if "batch_norm" in op]
    for ours, theirs in zip(module(*tensors), run(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_variance_of_batch_norm_in_sums_survives_a_large_mean() -> None:
    x = (f(64, 2, 8, 8) * 0.01 + 100.0).float()
    ones, zeros = torch.ones(2), torch.zeros(2)
    module = traced(
        lambda x: [aten._native_batch_norm_legit_functional(x, ones, zeros, zeros, zeros, True, 1.0, 1e-5)[4]],
        x,
        table=BATCH_NORM,
    )
    torch.testing.assert_close(module(x)[0].double(), x.double().var((0, 2, 3)), rtol=1e-4, atol=0.0)


def test_every_op_of_batch_norm_in_sums_can_have_its_batch_split() -> None:
    tensors = [f(5, 3, 4, 4), f(3), f(3), f(3), f(3, low=0.5), f(5, 3, 4, 4)]

    def run(*given: Tensor) -> list[Tensor]:
        return batch_norm_step(*given, True)  # type: ignore[call-arg]

    collected = Collector(traced(run, *tensors, table=BATCH_NORM))
    collected.run(*tensors)
    for call in collected.found:
        batched = [i for i, m in enumerate(call.ins) if m.shape == (5, 3, 4, 4)]
        if batched:
            found = [s for s in signatures(call, 2) if all(s.ins[i] == Split(0) for i in batched)]
            assert found, call
            assert all(o in (P, B, Split(0), None) for s in found for o in s.outs)
    assert any("sum" in call.op for call in collected.found)
    assert any(isinstance(a, Ref) for call in collected.found for a in call.args)


def test_the_norm_of_many_norms_takes_no_roots_in_between() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in (x, y)]))]

    x, y = f(5, 7), f(3)
    module = traced(step, x, y)
    names = PlaceholderNames((), (("x", "batch"), ("y", "batch")))
    graph = to_graph(module, names, {}, False).graph
    joined = join_norms(graph)
    assert [n.op for n in graph.nodes].count("aten.sqrt.default") == 3
    assert [n.op for n in joined.nodes].count("aten.sqrt.default") == 1
    values = {i.value: t for i, t in zip(joined.inputs, (x, y), strict=True)}
    for node in verify(joined).nodes:
        call, operands = call_of(node, joined.metas)
        out = run(call.op, call.args, call.kwargs, [values[v] for v in operands])
        values.update(zip(node.outs, out, strict=True))
    torch.testing.assert_close(values[joined.results[0]], step(x, y)[0])
