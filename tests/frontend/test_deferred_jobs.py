"""Jobs over models that were built without memory: equal to the same jobs over eager ones, on one rank and on two."""

from __future__ import annotations

import operator
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
import warm
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.sbp import Split
from cluster.runs import Run
from models import CASES
from trained import Layout, train_planned

HERE = Path(__file__).parent.parent


def trained(name: str, deferred: bool, prepare: Callable[[nn.Module], Any]) -> tuple[list[float], dict[str, Any]]:
    case = CASES[name]
    if deferred:
        with flow.deferred_init():
            model = case.model()
    else:
        model = case.model()
    prepare(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)

    @flow.global_function(type="train")
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(x, y).item() for x, y in case.batches([8, 8, 8])]
    return losses, {**model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


@pytest.mark.slow
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("how", ["as built", "loaded", "changed", "frozen"])
def test_a_job_over_a_deferred_model_is_the_job_over_the_eager_one(how: str) -> None:
    def prepare(model: nn.Module) -> None:
        if how == "loaded":
            random = torch.Generator().manual_seed(9)
            model.load_state_dict(
                {k: torch.rand(v.shape, generator=random).to(v.dtype) for k, v in model.state_dict().items()}
            )
        elif how == "changed":
            nn.init.orthogonal_(model.head.weight.data, generator=torch.Generator().manual_seed(2))
            model.conv_2.weight.data *= 0.5
            model.head.bias = nn.Parameter(torch.ones(10))
        elif how == "frozen":
            model.conv_1.requires_grad_(False)

    name = "lstm" if how == "as built" else "cnn"
    found, expected = (trained(name, deferred, prepare) for deferred in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_two_ranks_train_a_deferred_model_as_an_eager_one() -> None:
    eager = CASES["gpt"]

    def make() -> nn.Module:
        with flow.deferred_init():
            return eager.make()

    layout = Layout(2, hints={r".*(up|qkv)\.weight": Split(0), r".*down\.weight": Split(1)})
    results = [train_planned(case, layout, [8] * 2) for case in (eager, replace(eager, make=make))]
    (losses, state, _), (found_losses, found, _) = results
    assert found_losses == losses
    torch.testing.assert_close(found, state, rtol=0, atol=0)


def test_a_deferred_tensor_may_be_an_argument_or_be_read_by_a_job() -> None:
    torch.manual_seed(0)
    with flow.deferred_init():
        table, x = torch.randn(4, 4), torch.randn(2, 4)
    torch.manual_seed(0)
    expected = torch.randn(4, 4), torch.randn(2, 4)

    @flow.global_function(type="predict")
    def product(x: Tensor) -> Tensor:
        return x @ table

    torch.testing.assert_close(product(x).numpy(), (expected[1] @ expected[0]).numpy())
    table.mul_(2)
    torch.testing.assert_close(product(x).numpy(), (expected[1] @ expected[0] * 2).numpy())


def test_a_deferred_tensor_that_the_search_does_not_find_is_named() -> None:
    with flow.deferred_init():
        times = operator.methodcaller("mul", torch.randn(4))  # which does not show its tensor

    @flow.global_function(type="predict")
    def scaled(x: Tensor) -> Tensor:
        return times(x)

    with pytest.raises(StateError, match=r"deferred tensor float32\[4\] that the search .* did not find.*model="):
        scaled(torch.ones(4))


RANKS = """
import sys
import torch, torch.nn.functional as F
from torch import nn
import actorflow as flow

rank, WIDTH, LAYERS = flow.env.rank(), 4096, 6

def build(seed, width, layers=LAYERS):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])

def laid_out(model):
    flow.distribute(model, {r"[02468]\\.weight": flow.sbp.split(0), r"[1357]\\.weight": flow.sbp.split(1)})
    return model

def predict(model):
    @flow.global_function(type="predict")
    def job(x):
        return model(x)
    return job

def memory(what):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))

with flow.deferred_init():
    small = laid_out(build(0, 64))
x = torch.randn(4, 64)
torch.testing.assert_close(predict(small)(x).numpy(), build(0, 64)(x).detach().numpy())
print("equal values")

# the seeds of the ranks differ: all take the master's values
with flow.deferred_init():
    other = build(rank, 64)
torch.testing.assert_close(predict(other)(x).numpy(), build(0, 64)(x).detach().numpy())
print("the master's values")

# training, with the state of the optimizer
with flow.deferred_init():
    model = laid_out(build(1, 64, 3))
eager = build(1, 64, 3)
def trainer(m):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    def step(x):
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step
step, eager_step = flow.global_function(trainer(model)), trainer(eager)
for _ in range(3):
    torch.testing.assert_close(step(x).numpy(), eager_step(x).detach().numpy(), rtol=1e-5, atol=0)
if rank == 0:
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-7)
print("equal training")

# memory: of a model of which each rank holds one half
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
before = memory("VmRSS")
with flow.deferred_init():
    large = laid_out(build(2, WIDTH))
predict(large)(torch.randn(4, WIDTH)).numpy()
whole = LAYERS * WIDTH * WIDTH * 4
print("peak", (memory("VmHWM") - before) / whole, "of the model")
assert memory("VmHWM") - before < 0.75 * whole, (memory("VmHWM") - before) / whole
print("within memory")
"""


@pytest.mark.slow
def test_two_ranks_make_their_parts_alone_and_agree(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    run = Run(tmp_path, script, "--devices", "2", "--log-dir", str(tmp_path / "logs"))
    code = run.wait()
    text = run.output + "".join(p.read_text() for p in sorted((tmp_path / "logs").glob("*.log")))
    assert code == 0, text
    for said in ("equal values", "the master's values", "equal training", "within memory"):
        assert text.count(said) >= 2, text


def test_the_plan_of_a_model_far_beyond_memory_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch, actorflow as flow
        with flow.deferred_init():
            model = torch.nn.Sequential(*[torch.nn.Linear(60_000, 60_000) for _ in range(2)])  # 29 GB
        optimizer = torch.optim.AdamW(model.parameters())

        @flow.global_function
        def step(x):
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step(torch.randn(8, 60_000))
        """)
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))  # noqa: E731
    shown = subprocess.run(
        [warm.python(), "-m", "actorflow", "plan", str(script), "--devices", "2"],
        capture_output=True, text=True, timeout=250, preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "rank 1:" in shown.stdout
