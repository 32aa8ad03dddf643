"""Whole first-generation jobs that make variables and optimizers: on one device equal to PyTorch, on two to that."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actorflow as flow
import actorflow.typing as tp
import warm
from actorflow.classic.registry import REGISTRY
from actorflow_compiler.core.errors import ActorflowError
from classic.rehearsed import play, rehearse
from cluster.runs import Run

LIMIT = 250  # seconds
STEPS = 5


def images(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 12, 12, generator=random), torch.randint(0, 10, (8,), generator=random).int()


def lenet(data: Tensor) -> Tensor:
    initializer = flow.truncated_normal(0.1)
    conv = flow.layers.conv2d(
        data, 6, 5, padding="SAME", activation=flow.nn.relu, kernel_initializer=initializer, name="conv"
    )
    conv = flow.layers.batch_normalization(conv, axis=1, name="norm")
    pool = flow.nn.max_pool2d(conv, ksize=2, strides=2, padding="SAME", name="pool", data_format="NCHW")
    reshape = flow.reshape(pool, [pool.shape[0], -1])
    hidden = flow.layers.dense(reshape, 16, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="dense2")


def twin() -> nn.Sequential:
    """The network as torch's modules, with the same values."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.BatchNorm2d(6, eps=1e-3, momentum=0.01), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(216, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip
    names = {"0.": "conv-", "5.": "dense1-", "7.": "dense2-"}
    values = {short + key: flow.get_all_variables()[long + key] for short, long in names.items() for key in KEYS}
    model.load_state_dict(values, strict=False)
    return model


KEYS = ("weight", "bias")
SCHEDULE = flow.optimizer.CosineScheduler(0.05, 4, 0.1, warmup=flow.optimizer.warmup.linear(2, 0.5))
CLIP = flow.optimizer.grad_clipping.by_global_norm(1.0)
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "SGD": (
        lambda: flow.optimizer.SGD(SCHEDULE, grad_clipping=CLIP), lambda p: torch.optim.SGD(p, momentum=0.9),
    ),
    "AdamW": (
        lambda: flow.optimizer.AdamW(SCHEDULE, do_bias_correction=True, weight_decay=0.1, grad_clipping=CLIP),
        lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    ),
}  # fmt: skip


@pytest.mark.matrix(every=2)
@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_job_with_layers_and_minimize_equals_pytorch(kind: str, tmp_path: Path):
    ours, torchs = OPTIMIZERS[kind]

    @flow.global_function(type="train")
    def train_job(
        data: tp.Numpy.Placeholder((8, 1, 12, 12), dtype=flow.float),
        labels: tp.Numpy.Placeholder((8,), dtype=flow.int32),
    ) -> tp.Numpy:
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, lenet(data), name="softmax_loss")
        ours().minimize(loss)
        return loss

    @flow.global_function(type="predict")
    def predict(data: tp.Numpy.Placeholder((8, 1, 12, 12), dtype=flow.float)) -> tp.Numpy:
        return flow.nn.softmax(lenet(data))

    first = torch.from_numpy(predict(images(0)[0].numpy()))  # makes the variables
    model = twin()
    optimizer = torchs(model.parameters())
    torch.testing.assert_close(first, model.eval()(images(0)[0]).softmax(1))
    model.train()

    def eager(step: int) -> Tensor:
        data, labels = images(step)
        loss = F.cross_entropy(model(data), labels.long(), reduction="none")
        loss.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step in range(STEPS):
        found = torch.from_numpy(train_job(*(t.numpy() for t in images(step))))
        torch.testing.assert_close(found, eager(step), rtol=1e-4, atol=1e-5)
        if step == 1:
            flow.checkpoint.save(tmp_path)
    assert len(train_job.plans) == 1  # the rate is an input
    after = torch.from_numpy(predict(images(0)[0].numpy()))
    torch.testing.assert_close(after, model.eval()(images(0)[0]).softmax(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flow.get_all_variables()["norm-moving_mean"], model[2].running_mean)
    last = found
    flow.checkpoint.load(tmp_path)
    for step in range(2, STEPS):
        found = torch.from_numpy(train_job(*(t.numpy() for t in images(step))))
    torch.testing.assert_close(found, last, rtol=0, atol=0)
    assert REGISTRY.names()[:2] == ("conv-weight", "conv-bias")


VARYING = flow.optimizer.PolynomialScheduler(0.1, 4, 0.01)
OTHERS: dict[str, tuple[Any, int]] = {  # → how many plans its rates need
    "Adam without bias correction": (lambda: flow.optimizer.Adam(VARYING), 1),
    "AdamW without bias correction": (
        lambda: flow.optimizer.AdamW(VARYING, weight_decay=0.1, weight_decay_excludes="bias"), 1,
    ),
    "Adagrad": (lambda: flow.optimizer.Adagrad(VARYING, initial_accumulator_value=0.1), 1),
    "RMSProp": (lambda: flow.optimizer.RMSProp(flow.optimizer.PiecewiseConstantScheduler([1], [0.1, 0.05])), 2),
}  # fmt: skip


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_plan_steps_as_the_optimizer_does_by_itself(kind: str, forget: Callable[[], None]):
    make, plans = OTHERS[kind]
    x = torch.randn(12, 4)

    def body(x: Tensor) -> Tensor:
        normal = flow.random_normal_initializer()
        regularizer = flow.regularizers.l1_l2(0.01, 0.02)
        hidden = flow.layers.dense(x, 6, torch.tanh, kernel_initializer=normal, kernel_regularizer=regularizer)
        loss = flow.math.square(flow.layers.dense(hidden, 2, kernel_initializer=normal) - 1)
        make().minimize(loss)
        return loss

    flow.manual_seed(1)
    job = flow.global_function(type="train")(body)
    found = [job(x).clone() for _ in range(4)]
    forget()
    flow.manual_seed(1)
    recording = rehearse(body, x)
    for loss in found:
        torch.testing.assert_close(loss, play(recording, body, x).detach(), rtol=1e-4, atol=1e-5)
    assert len(job.plans) == plans


def test_jobs_share_variables_and_go_on_with_shorter_batches(forget: Callable[[], None], tmp_path: Path):
    x = torch.randn(12, 4)

    def loss_of(x: Tensor) -> Tensor:
        return flow.math.square(flow.layers.dense(x, 2, kernel_initializer=flow.random_normal_initializer()) - 1)

    def one(x: Tensor) -> Tensor:
        loss = loss_of(x)
        flow.optimizer.SGD(VARYING).minimize(loss)
        return loss

    def two(x: Tensor) -> Tensor:
        loss = loss_of(x)
        flow.optimizer.Adagrad(VARYING, initial_accumulator_value=0.1).minimize(loss, ["Dense-bias"])
        return loss

    calls = [("one", x), ("one", x[:6]), ("two", x), ("one", x), ("two", x), ("one", x[:6])]
    flow.manual_seed(1)
    jobs = {f.__name__: flow.global_function(type="train")(f) for f in (one, two)}
    found = [jobs[name](batch).clone() for name, batch in calls]
    flow.checkpoint.save(tmp_path)
    assert len(jobs["one"].plans) == 2
    forget()
    flow.manual_seed(1)
    bodies = {"one": one, "two": two}
    recordings = {name: rehearse(body, x, job=name) for name, body in bodies.items()}
    for (name, batch), loss in zip(calls, found, strict=True):
        expected = play(recordings[name], bodies[name], batch).detach()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    of_file, here = flow.checkpoint.get(tmp_path), flow.get_all_variables()
    torch.testing.assert_close(of_file, here, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("forget")
def test_a_second_minimize_in_a_job_names_both_lines():
    @flow.global_function(type="train")
    def train_job(x: Tensor) -> Tensor:
        loss = flow.layers.dense(x, 1)
        flow.optimizer.SGD(SCHEDULE).minimize(loss)
        flow.optimizer.Adam(SCHEDULE).minimize(loss)
        return loss

    with pytest.raises(ActorflowError) as error:
        train_job(torch.ones(4, 2))
    assert "flow.optimizer.SGD(SCHEDULE).minimize(loss)" in str(error.value)
    assert "flow.optimizer.Adam(SCHEDULE).minimize(loss)" in str(error.value)


SCRIPT = """
import sys
import numpy as np, torch, torch.nn.functional as F
from torch import nn
import actorflow as flow
import actorflow.typing as tp

N = 12

def mlp(data):
    initializer = flow.random_normal_initializer(stddev=0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(reshape, 16, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    return flow.layers.dense(
        hidden, 10, kernel_initializer=initializer, model_distribute=flow.distribute.split(axis=0), name="dense2"
    )

SCHEDULE = flow.optimizer.ExponentialScheduler(0.1, 2, 0.5)

@flow.global_function(type="train")
def train_job(
    images: tp.Numpy.Placeholder((N, 1, 4, 4), dtype=flow.float),
    labels: tp.Numpy.Placeholder((N,), dtype=flow.int32),
) -> tp.Numpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    clip = flow.optimizer.grad_clipping.by_global_norm(0.5)
    flow.optimizer.SGD(SCHEDULE, momentum=0.5, grad_clipping=clip).minimize(loss)
    return loss

@flow.global_function(type="predict")
def predict(images: tp.Numpy.Placeholder((N, 1, 4, 4), dtype=flow.float)) -> tp.Numpy:
    return mlp(images)

def batch(i):
    g = np.random.default_rng(i)
    return g.normal(size=(N, 1, 4, 4)).astype(np.float32), g.integers(0, 10, N).astype(np.int32)

folder, rank = sys.argv[1], flow.env.rank()
flow.manual_seed(3)
predict(batch(0)[0])
start = flow.get_all_variables()
flow.checkpoint.save(folder + "/start")
model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
names = {"1.": "dense1-", "3.": "dense2-"}
model.load_state_dict({a + key: start[b + key] for a, b in names.items() for key in ("weight", "bias")})
optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)

def eager(i):
    x, y = batch(i)
    loss = F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y).long(), reduction="none")
    loss.mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.param_groups[0]["lr"] = SCHEDULE.rate(i)
    optimizer.step(); optimizer.zero_grad()
    return loss.detach().numpy()

for i in range(6):
    np.testing.assert_allclose(train_job(*batch(i)), eager(i), rtol=1e-4, atol=1e-6)
    if i == 2:
        flow.checkpoint.save(folder)
        assert set(flow.checkpoint.get(folder)) == {"dense1-weight", "dense1-bias", "dense2-weight", "dense2-bias"}
        three = flow.get_all_variables()
last = train_job(*batch(6))
if rank == 1:  # one rank alone
    assert not torch.equal(flow.get_all_variables()["dense2-weight"], three["dense2-weight"])
flow.checkpoint.load(folder)
torch.testing.assert_close(flow.get_all_variables(), three, rtol=0, atol=0)
for i in range(3, 7):
    again = train_job(*batch(i))
np.testing.assert_array_equal(again, last)
layouts = {v.name.rpartition(".")[2]: str(v.sbp[0]) for v in train_job.plan.variables}
if rank == 0:
    assert layouts["dense2-weight"] == layouts["dense2-bias"] == "S(0)", layouts
    assert layouts["dense1-weight"] == "B", layouts
print("equal on", rank)
"""


@pytest.mark.usefixtures("forget")
def test_a_hybrid_mlp_on_two_devices_equals_pytorch_and_goes_on_from_its_checkpoint(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    logs = tmp_path / "logs"
    arguments = ("--devices", "2", "--log-dir", str(logs), "--", str(tmp_path / "checkpoint"))
    made = Run(tmp_path, path, *arguments, python=warm.python())
    try:
        code = made.process.wait(LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.process.pid, signal.SIGKILL)
    text = made.output + "".join(p.read_text() for p in sorted(logs.glob("*.log")))
    assert code == 0, text
    assert [rank for rank in (0, 1) if f"equal on {rank}" not in text] == []
    flow.manual_seed(3)
    normal = flow.random_normal_initializer(stddev=0.1)
    rehearse(lambda: flow.get_variable("dense2-weight", (10, 16), initializer=normal))
    start = flow.checkpoint.get(tmp_path / "checkpoint" / "start")
    assert start["dense2-weight"].equal(flow.get_all_variables()["dense2-weight"])  # on any number of devices
