"""A few lines for the names of OneFlow's job functions, as programs use them."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

import actorflow as flow
import actorflow.typing as tp

BATCH, WORLD = 8, flow.env.get_world_size
LIMIT = 100.0  # seconds for what takes a moment
IMAGES = np.random.default_rng(0).random((BATCH, 1, 6, 6), dtype=np.float32)
LABELS = np.arange(BATCH, dtype=np.int32) % 4


def _config(view: Any = None) -> Any:
    found = flow.function_config()
    found.default_data_type(flow.float)
    found.default_logical_view(flow.scope.consistent_view() if view is None else view)
    return found


def train_job(folder: Path) -> None:
    """A training job goes down, and calls back."""
    said: SimpleQueue[float] = SimpleQueue()

    @flow.global_function(type="train", function_config=_config())
    def job(
        images: tp.Numpy.Placeholder((BATCH, 1, 6, 6), dtype=flow.float),
        labels: tp.Numpy.Placeholder((BATCH,), dtype=flow.int32),
    ) -> tp.Callback[tp.Numpy]:
        split = flow.distribute.split(axis=0)
        hidden = flow.layers.dense(
            flow.flatten(images, 1), 8, activation=flow.nn.relu, name="hidden", model_distribute=split,
            kernel_initializer=flow.truncated_normal(0.1),
        )  # fmt: skip
        logits = flow.layers.dense(hidden, 4, name="output", kernel_initializer=flow.truncated_normal(0.1))
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.1]), momentum=0).minimize(loss)
        return loss

    for _ in range(4):
        job(IMAGES, LABELS)(lambda loss: said.put(float(loss.mean())))
    losses = [said.get(timeout=LIMIT) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert flow.get_all_variables()["hidden-weight"].shape == (8, 36)


def views(folder: Path) -> None:
    """In the mirrored view each device has an item."""
    world = WORLD()

    @flow.global_function("predict", _config(flow.scope.mirrored_view()))
    def job(x: tp.ListNumpy.Placeholder((2, 3), dtype=flow.float)) -> tp.ListNumpy:
        return x * 2

    items = [np.full((2, 3), rank, np.float32) for rank in range(world)]
    assert [float(item.sum()) for item in job(items)] == [12.0 * rank for rank in range(world)]


def pipeline_job(folder: Path) -> None:
    """Two stages pass pieces of a batch on."""
    second = WORLD() - 1

    @flow.global_function(type="predict")
    def job(x: tp.Numpy.Placeholder((BATCH, 3))) -> tp.Numpy:
        with flow.scope.placement("cpu", "0:0"):
            hidden = flow.unpack(x, 2) * 2
        with flow.scope.placement("cpu", f"0:{second}"):
            return flow.pack(hidden + 1, 2)

    x = np.arange(BATCH * 3, dtype=np.float32).reshape(BATCH, 3)
    np.testing.assert_allclose(job(x), x * 2 + 1)


def variables(folder: Path) -> None:
    """Variables by name, with initializers, layouts and a regularizer."""
    makers = {
        "constant": flow.constant_initializer(3.0),
        "ones": flow.ones_initializer(),
        "zeros": flow.zeros_initializer(),
        "xavier": flow.xavier_uniform_initializer(),
        "normal": flow.random_normal_initializer(stddev=0.1),
        "uniform": flow.random_uniform_initializer(),
        "truncated": flow.truncated_normal(0.02),
        "scaled": flow.variance_scaling_initializer(),
        "kaiming": flow.kaiming_initializer((4, 4)),
        "glorot": flow.glorot_normal_initializer(),
    }
    layouts = [flow.distribute.split(axis=0), flow.distribute.broadcast(), flow.distribute.auto()]

    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((4, 4))) -> tp.Numpy:
        total = x
        for number, (name, maker) in enumerate(makers.items()):
            total = total + flow.get_variable(
                name, shape=(4, 4), dtype=flow.float, initializer=maker, distribute=layouts[number % 3],
                regularizer=flow.regularizers.l2(0.5) if name == "ones" else None,
            )  # fmt: skip
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.25]), momentum=0).minimize(total * 0)
        return total

    job(np.zeros((4, 4), np.float32))
    found = flow.get_all_variables()
    assert float(found["constant"].mean()) == 3.0
    assert float(found["ones"].mean()) == pytest.approx(0.875)  # of a rate of 0.25, half the variable
    assert (flow.regularizers.l1(0.1), flow.regularizers.l1_l2(0.1, 0.2).l2) == (flow.regularizers.l1_l2(0.1, 0), 0.2)


def layers(folder: Path) -> None:
    """Convolutions and normalizations."""

    @flow.global_function(type="predict")
    def job(images: tp.Numpy.Placeholder((BATCH, 1, 6, 6))) -> tp.Numpy:
        x = flow.layers.conv2d(images, filters=3, kernel_size=3, padding="SAME", name="conv")
        return flow.layers.layer_norm(flow.layers.batch_normalization(x, axis=1, name="bn"), name="ln")

    assert job(IMAGES).shape == (BATCH, 3, 6, 6)
    assert callable(flow.layers.conv1d)
    assert callable(flow.layers.conv3d)


def shapes(folder: Path) -> None:
    """Functions of shapes take OneFlow's spelling and torch's."""
    x = torch.arange(12.0)
    y = flow.reshape(x, [3, 4])
    assert torch.equal(flow.transpose(y, perm=[1, 0]), y.T)
    assert torch.equal(flow.concat([y, y], axis=0), torch.cat([y, y]))
    assert torch.equal(flow.matmul(y, y, transpose_b=True), y @ y.T)
    assert flow.flatten(y, 0).shape == (12,)
    assert flow.squeeze(y[None], 0).shape == (3, 4)
    assert flow.stack([y, y], axis=1).shape == (3, 2, 4)
    assert torch.equal(flow.argmax(y, axis=1), torch.full((3,), 3))
    assert torch.equal(flow.where(y > 5, y, -y)[0], -y[0])
    assert flow.gather(y, 1, torch.zeros(3, 1, dtype=torch.int64)).shape == (3, 1)
    assert flow.cast(y, flow.int32).dtype is flow.expand_dims(flow.identity(flow.cast(y, flow.int32)), 0).dtype
    assert float(flow.constant(2.0, dtype=flow.float, shape=(2,)).sum()) == 4.0


def elementary(folder: Path) -> None:
    """Functions of numbers are torch's by their older names."""
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    assert torch.equal(flow.math.reduce_sum(x, axis=1), x.sum(1))
    assert torch.equal(flow.math.reduce_mean(x), x.mean())
    torch.testing.assert_close(flow.math.reduce_std(x, axis=1), x.std(1, correction=0))
    assert torch.equal(flow.math.maximum(x, -x), x.abs())
    assert torch.equal(flow.math.clip_by_value(x, -1, 1), x.clamp(-1, 1))
    assert torch.equal(flow.nn.relu(x), x.relu())
    assert torch.equal(flow.nn.bias_add(x, torch.tensor([1.0, 2.0])), x + torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(flow.nn.softmax(x), x.softmax(-1))
    assert flow.nn.conv2d(torch.ones(1, 1, 4, 4), torch.ones(2, 1, 3, 3), 1, "VALID").shape == (1, 2, 2, 2)


def pools(folder: Path) -> None:
    """Pooling and dropout."""
    images = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert flow.nn.max_pool2d(images, 2, 2, "VALID").flatten().tolist() == [5.0, 7.0, 13.0, 15.0]
    assert flow.nn.avg_pool2d(images, 2, 2, "VALID").shape == (1, 1, 2, 2)
    assert flow.nn.dropout(images, rate=0.0).sum() == images.sum()


def losses(folder: Path) -> None:
    """One loss for each sample."""
    logits = torch.randn(3, 4)
    each = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="none")
    found = flow.nn.sparse_softmax_cross_entropy_with_logits(torch.tensor([0, 1, 2], dtype=torch.int32), logits)
    torch.testing.assert_close(found, each)
    hot = torch.nn.functional.one_hot(torch.tensor([0, 1, 2]), 4).float()
    torch.testing.assert_close(flow.nn.softmax_cross_entropy_with_logits(hot, logits), each)
    assert flow.nn.sigmoid_cross_entropy_with_logits(hot, logits).shape == (3, 4)


def optimizers(folder: Path) -> None:
    """Optimizers with rates that change, and gradients that are clipped."""
    rates = flow.optimizer.PiecewiseConstantScheduler([2], [0.05, 0.01], warmup=flow.optimizer.warmup.linear(2, 0.5))
    clip = flow.optimizer.grad_clipping.by_global_norm(1.0)

    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((4,))) -> tp.Numpy:
        w = flow.get_variable("rated", shape=(4,), dtype=flow.float, initializer=flow.ones_initializer())
        loss = flow.math.square(w - x)
        flow.optimizer.Adam(rates, grad_clipping=clip).minimize(loss)
        return loss

    x = np.zeros(4, np.float32)
    values = [float(job(x).mean()) for _ in range(3)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0
    assert values[2] < 0.9
    fixed = flow.optimizer.CosineScheduler(10, 0.1)
    assert [type(kind(fixed)) for kind in (flow.optimizer.AdamW, flow.optimizer.Adagrad)]
    assert flow.optimizer.RMSProp(flow.optimizer.PiecewiseConstantScheduler([], [0.1]))
    with pytest.raises(flow.StateError, match="whose rate changes with every call"):
        flow.optimizer.RMSProp(fixed)


def job_checkpoint(folder: Path) -> None:
    """Variables of jobs are saved, and come back."""

    @flow.global_function(type="predict")
    def job(x: tp.Numpy.Placeholder((3,))) -> tp.Numpy:
        return x * flow.get_variable("kept", shape=(3,), dtype=flow.float, initializer=flow.ones_initializer())

    x = np.ones(3, np.float32)
    job(x)
    flow.checkpoint.save(folder / "kept")
    flow.load_variables({"kept": np.full(3, 5, np.float32)})
    assert job(x).tolist() == [5.0, 5.0, 5.0]
    flow.checkpoint.load(folder / "kept")
    assert job(x).tolist() == [1.0, 1.0, 1.0]
    assert flow.checkpoint.get(folder / "kept")["kept"].shape == (3,)
    older = flow.train.CheckPoint()
    older.init()
    older.save(str(folder / "older"))


def devices(folder: Path) -> None:
    """What the script asked for before its run began is what it got, and counts no more."""
    assert WORLD() in (2, 4)
    assert flow.env.get_rank() < WORLD()
    with pytest.raises(flow.ClusterError, match="after"):
        flow.config.cpu_device_num(3)
    for setting in (flow.config.gpu_device_num, flow.config.ctrl_port, flow.env.ctrl_port, flow.env.machine):
        assert callable(setting)
    flow.env.init()
    flow.env.grpc_use_no_signal()
    flow.env.data_port(50052)
    flow.env.logtostderr()
    flow.env.logbuflevel(-1)
