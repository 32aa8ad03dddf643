"""Functions in OneFlow's first spelling are torch's: the same values under other names and arguments."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import actorflow as flow
from actorflow_compiler.core.errors import ActorflowError


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


x, y = randn(4, 6), randn(6, 4)
image, kernel = randn(2, 3, 9, 8), randn(5, 3, 3, 2)
positive = x.abs() + 0.1
EQUAL: dict[str, tuple[Any, Any]] = {
    "reshape to a list": (lambda: flow.reshape(x, [3, -1]), lambda: x.reshape(3, 8)),
    "torch's reshape": (lambda: flow.reshape(input=x, shape=(-1,)), lambda: x.reshape(-1)),
    "reshape to a number": (lambda: flow.reshape(x, -1), lambda: x.reshape(-1)),
    "matmul with transposes": (
        lambda: flow.matmul(y, x, transpose_a=True, transpose_b=True, alpha=2.0, name="m"),
        lambda: 2 * (y.T @ x.T),
    ),
    "torch's matmul": (lambda: flow.matmul(input=x, other=y), lambda: x @ y),
    "flatten": (lambda: flow.flatten(image, 1, 2), lambda: image.flatten(1, 2)),
    "transpose by perm": (lambda: flow.transpose(image, perm=[0, 2, 3, 1]), lambda: image.permute(0, 2, 3, 1)),
    "transpose without perm": (lambda: flow.transpose(image), lambda: image.permute(3, 2, 1, 0)),
    "torch's transpose": (lambda: flow.transpose(image, 1, -1), lambda: image.transpose(1, -1)),
    "torch's transpose by name": (lambda: flow.transpose(input=x, dim0=0, dim1=1), lambda: x.T),
    "concat": (lambda: flow.concat([x, x], axis=1), lambda: torch.cat([x, x], 1)),
    "torch's concat": (lambda: flow.concat(tensors=(x, x), dim=-1), lambda: torch.cat([x, x], -1)),
    "cast": (lambda: flow.cast(x, dtype=flow.int32), lambda: x.int()),
    "identity": (lambda: flow.identity(x, name="i"), lambda: x),
    "expand_dims": (lambda: flow.expand_dims(x, axis=1), lambda: x.unsqueeze(1)),
    "constant": (lambda: flow.constant(2, dtype=flow.float64, shape=(2, 3)), lambda: torch.full((2, 3), 2.0).double()),
    "reduce_sum of all": (lambda: flow.math.reduce_sum(x), lambda: x.sum()),
    "reduce_mean": (lambda: flow.math.reduce_mean(x, axis=[1], keepdims=True), lambda: x.mean(1, keepdim=True)),
    "reduce_max": (lambda: flow.math.reduce_max(image, axis=(0, 2)), lambda: image.amax((0, 2))),
    "reduce_min": (lambda: flow.math.reduce_min(x, -1), lambda: x.amin(-1)),
    "reduce_prod": (lambda: flow.math.reduce_prod(x, axis=[0, 1]), lambda: x.prod()),
    "reduce_std": (lambda: flow.math.reduce_std(x, 1), lambda: x.std(1, correction=0)),
    "reduce_variance": (lambda: flow.math.reduce_variance(x, 1), lambda: x.var(1, correction=0)),
    "reduce_euclidean_norm": (lambda: flow.math.reduce_euclidean_norm(x, 0), lambda: x.square().sum(0).sqrt()),
    "reduce_logsumexp": (lambda: flow.math.reduce_logsumexp(x, 0), lambda: x.exp().sum(0).log()),
    "reduce_any": (lambda: flow.math.reduce_any(x > 1, [0]), lambda: (x > 1).any(0)),
    "reduce_all": (lambda: flow.math.reduce_all(x > -9), lambda: torch.tensor(True)),
    "argmax": (lambda: flow.math.argmax(x, axis=0), lambda: x.argmax(0)),
    "top_k": (lambda: flow.math.top_k(x, k=2), lambda: x.topk(2).indices),
    "clip_by_value": (lambda: flow.math.clip_by_value(x, -0.5, 0.5), lambda: x.clamp(-0.5, 0.5)),
    "l2_normalize": (lambda: flow.math.l2_normalize(x, axis=1), lambda: F.normalize(x, dim=1)),
    "add_n": (lambda: flow.math.add_n([x, x, x]), lambda: x + x + x),
    "a number and a tensor": (lambda: flow.math.subtract(1, x), lambda: 1 - x),
    "a tensor and a number": (lambda: flow.math.maximum(x, 0.25), lambda: x.clamp(min=0.25)),
    "divide whole numbers": (lambda: flow.math.divide(torch.tensor([1, 2]), 2), lambda: torch.tensor([0.5, 1.0])),
    "mod has the dividend's sign": (lambda: flow.math.mod(torch.tensor([-5, 5]), 3), lambda: torch.tensor([-2, 2])),
    "softmax of the last dim": (lambda: flow.nn.softmax(image), lambda: image.softmax(-1)),
    "logsoftmax": (lambda: flow.nn.logsoftmax(x, axis=0), lambda: x.log_softmax(0)),
    "leaky_relu": (lambda: flow.nn.leaky_relu(x, name="l"), lambda: F.leaky_relu(x, 0.2)),
    "swish": (lambda: flow.nn.swish(x, beta=2.0), lambda: x * torch.sigmoid(2 * x)),
    "bias_add": (lambda: flow.nn.bias_add(image, randn(3)), lambda: image + randn(3)[:, None, None]),
    "bias_add to the last dim": (lambda: flow.nn.bias_add(image, randn(8), "NHWC"), lambda: image + randn(8)),
    "batch_normalization": (
        lambda: flow.nn.batch_normalization(x, *flow.nn.moments(x, [0]), randn(6), positive[0], 1e-3, axis=1),
        lambda: F.batch_norm(x, None, None, positive[0], randn(6), True, 0.1, 1e-3),
    ),
    "moments": (lambda: flow.nn.moments(x, [1])[1], lambda: x.var(1, correction=0)),
    "layer_norm": (
        lambda: flow.nn.layer_norm(image, randn(8), positive.flatten()[:8], 2),
        lambda: F.layer_norm(image, [9, 8]) * randn(8) + positive.flatten()[:8],
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_a_function_of_the_first_generation_is_torchs(case: str):
    ours, torchs = (make() for make in EQUAL[case])
    assert ours.dtype == torchs.dtype
    torch.testing.assert_close(ours, torchs)


UNARY = "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor log log1p reciprocal round rsqrt sign sin sinh sqrt"


@pytest.mark.parametrize("name", [*UNARY.split(), "square", "tan", "tanh", "sigmoid"])
def test_a_function_of_elements_is_torchs_of_the_same_name(name: str):
    given = torch.linspace(0.05, 0.95, 7)
    torch.testing.assert_close(getattr(flow.math, name)(given, name="op"), getattr(torch, name)(given))


def test_losses_are_one_for_each_sample():
    logits, labels = randn(5, 4), torch.tensor([0, 3, 1, 2, 2])
    expected = F.cross_entropy(logits, labels, reduction="none")
    sparse = flow.nn.sparse_softmax_cross_entropy_with_logits
    torch.testing.assert_close(sparse(labels.int(), logits, name="loss"), expected)
    torch.testing.assert_close(sparse(labels[:, None].to(torch.int8), logits), expected)
    deep = randn(2, 3, 4)
    torch.testing.assert_close(
        sparse(torch.ones(2, 3, dtype=torch.int32), deep), -deep.log_softmax(-1)[:, :, 1], rtol=1e-5, atol=1e-6
    )
    soft = flow.nn.softmax_cross_entropy_with_logits(F.one_hot(labels, 4), logits)
    torch.testing.assert_close(soft, expected)
    sigmoid = flow.nn.sigmoid_cross_entropy_with_logits(labels=torch.ones(5, 4, dtype=torch.int32), logits=logits)
    torch.testing.assert_close(sigmoid, -F.logsigmoid(logits))


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("padding", "around"),  # left, right, top, bottom
    [
        ("VALID", (0, 0, 0, 0)),
        ("SAME", (1, 0, 1, 1)),  # as SAME_LOWER: the odd one before
        ("same_lower", (1, 0, 1, 1)),
        ("SAME_UPPER", (0, 1, 1, 1)),
        ((0, 0, 1, 2), (2, 2, 1, 1)),
        ((0, 0, (2, 1), (0, 3)), (0, 3, 2, 1)),
    ],
)
def test_a_convolution_pads_as_oneflow_does(padding: Any, around: tuple[int, ...], data_format: str):
    last = data_format == "NHWC"
    given, filters = (t.movedim(1, -1) if last else t for t in (image, kernel))
    if last and not isinstance(padding, str):
        padding = (padding[0], *padding[2:], padding[1])
    out = flow.nn.conv2d(given, filters, 1, padding, data_format)
    expected = F.conv2d(F.pad(image, around), kernel)
    torch.testing.assert_close(out.movedim(-1, 1) if last else out, expected, rtol=1e-4, atol=1e-5)


def test_strides_dilation_and_groups_are_torchs():
    grouped = randn(6, 1, 3, 3)
    out = flow.nn.conv2d(image, grouped, strides=[2, 1], padding="SAME_UPPER", dilations=2, groups=3)
    assert out.shape == (2, 6, 5, 8)  # ⌈9 / 2⌉, 8
    expected = F.conv2d(F.pad(image, (2, 2, 2, 2)), grouped, stride=(2, 1), dilation=2, groups=3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        flow.nn.conv1d(randn(2, 3, 9), randn(4, 3, 3), 2, "VALID"), F.conv1d(randn(2, 3, 9), randn(4, 3, 3), stride=2)
    )
    volume, filters = randn(1, 2, 4, 4, 4), randn(3, 2, 3, 3, 3)
    torch.testing.assert_close(flow.nn.conv3d(volume, filters, 1, "SAME"), F.conv3d(volume, filters, padding=1))


@pytest.mark.parametrize(
    ("padding", "ksize", "strides"),
    [
        *itertools.product(["VALID", "SAME", "SAME_UPPER", (0, 0, 1, (1, 0))], [2, (3, 2)], [None, 2]),
        ("SAME", 3, (2, 1)),
        ((0, 0, 2, 2), 3, 1),  # more than half of the window
    ],
)
def test_what_is_added_around_a_pool_does_not_count(padding: Any, ksize: Any, strides: Any):
    smaller = image - 5  # zeros would be the largest
    largest = flow.nn.max_pool2d(smaller, ksize=ksize, strides=strides, padding=padding, name="pool")
    average = flow.nn.avg_pool2d(smaller, ksize, strides, padding)
    assert largest.shape == average.shape
    kernel = (ksize, ksize) if isinstance(ksize, int) else ksize
    step = kernel if strides is None else (strides, strides) if isinstance(strides, int) else strides
    if isinstance(padding, str) and padding != "VALID":
        assert largest.shape[2:] == tuple(-(-size // s) for size, s in zip((9, 8), step, strict=True))
    before, _ = _before(padding, kernel, step)
    for i, j in np.ndindex(*largest.shape[2:]):
        top, left = i * step[0] - before[0], j * step[1] - before[1]
        window = smaller[:, :, max(top, 0) : top + kernel[0], max(left, 0) : left + kernel[1]]
        torch.testing.assert_close(largest[:, :, i, j], window.amax((2, 3)))
        torch.testing.assert_close(average[:, :, i, j], window.mean((2, 3)))


def _before(padding: Any, kernel: tuple[int, int], step: tuple[int, int]) -> tuple[list[int], list[int]]:
    pairs = []
    for i, size in enumerate((9, 8)):
        total = max(0, (-(-size // step[i]) - 1) * step[i] + kernel[i] - size)
        if padding == "VALID":
            pairs.append((0, 0))
        elif isinstance(padding, str):
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if padding == "SAME_UPPER" else (more, less))
        else:
            item = padding[2 + i]
            pairs.append((item, item) if isinstance(item, int) else item)
    return [a for a, _ in pairs], [b for _, b in pairs]


def test_channels_last_pools_are_the_same():
    out = flow.nn.max_pool2d(image.movedim(1, -1), 2, 2, "SAME", "NHWC")
    torch.testing.assert_close(out.movedim(-1, 1), flow.nn.max_pool2d(image, 2, 2, "SAME"))
    line, volume = randn(1, 2, 7), randn(1, 2, 4, 4, 4)
    torch.testing.assert_close(flow.nn.max_pool1d(line, 3, 2, "VALID"), F.max_pool1d(line, 3, 2))
    torch.testing.assert_close(flow.nn.avg_pool3d(volume, 2, 2, "VALID"), F.avg_pool3d(volume, 2))


def test_dropout_drops_in_training_only():
    ones = torch.ones(1000)
    dropped = flow.nn.dropout(ones, rate=0.25)
    assert set(dropped.tolist()) == {0.0, (ones[0] / 0.75).item()}
    assert 0.6 < dropped.count_nonzero().item() / 1000 < 0.9
    with torch.no_grad():
        assert flow.nn.dropout(ones, rate=0.25).equal(ones)


WRONG: dict[str, tuple[Any, str]] = {
    "padding of a wrong name": (lambda: flow.nn.conv2d(image, kernel, 1, "HALF"), "padding='HALF'"),
    "padding of too few dims": (lambda: flow.nn.max_pool2d(image, 2, 2, (1, 1)), "each of the 4 dims"),
    "padding of the batch": (lambda: flow.nn.conv2d(image, kernel, 1, (1, 0, 0, 0)), "0 for batch and channels"),
    "a data format of another dimension": (lambda: flow.nn.conv2d(image, kernel, 1, "SAME", "NCW"), "'NCHW' or 'NHWC'"),
    "a tensor of too few dims": (lambda: flow.nn.max_pool2d(x, 2, 2, "VALID"), "4 dims (NCHW)"),
    "a window in the padding": (lambda: flow.nn.max_pool2d(image, 2, 2, (0, 0, 2, 0)), "less padding than the window"),
    "three strides": (lambda: flow.nn.conv2d(image, kernel, (1, 1, 1), "VALID"), "strides=[1, 1, 1]"),
    "a bias of another size": (lambda: flow.nn.bias_add(image, randn(4)), "of the size of dim 1"),
    "labels that are no classes": (
        lambda: flow.nn.sparse_softmax_cross_entropy_with_logits(x[:, 0], x), "whole numbers of shape [4]",
    ),
    "labels of another shape": (lambda: flow.nn.softmax_cross_entropy_with_logits(y, x), "equal shapes"),
    "a rate of 1": (lambda: flow.nn.dropout(x, rate=1.0), "below 1"),
    "transpose by one dim": (lambda: flow.transpose(x, 1), "transpose(x, perm=[…])"),
    "matmul of one tensor": (lambda: flow.matmul(x), "matmul"),
    "a tensor twice": (lambda: flow.reshape(x, (24,), input=x), "reshape: twice the same"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_mean_nothing_are_told(case: str):
    call, said = WRONG[case]
    with pytest.raises(ActorflowError) as error:
        call()
    assert said in str(error.value)
