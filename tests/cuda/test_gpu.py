"""What needs a GPU: kernels, autocast, loss scaling, memory and the ranks that share one; skipped without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import ActorError
from gpu_cases import STEPS, eagerly, here, on_gpu
from models import CASES, Case
from trained import LAYOUTS, differences, in_float64, plan_of, train

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]


def planned(case: Case, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    plan, values, optimizer = plan_of(case, replace(LAYOUTS[layout], kind="cuda"), 16)
    return train(case, plan, values, optimizer, [16] * STEPS, here)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "clipped gpt"])
def test_a_plan_of_ranks_that_share_a_gpu_trains_as_one_device_does(name: str, layout: str):
    case = on_gpu(in_float64(CASES[name]))
    expected, parameters = eagerly(case, LAYOUTS[layout].micro_batches)
    losses, found = planned(case, layout)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-7, atol=0)
    assert max(differences(found, parameters).values()) <= 1e-6


def half(dtype: torch.dtype) -> Callable[..., Tensor]:
    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())

    return loss


@pytest.mark.parametrize("layout", ["one device", "data 2", "data 2, pipeline 2"])
def test_autocast_and_loss_scaling_follow_eager_pytorch(layout: str):
    case = on_gpu(replace(CASES["clipped gpt"], loss=half(torch.bfloat16)))
    torch.testing.assert_close(planned(case, layout)[0], eagerly(case, 1)[0], rtol=2e-2, atol=0)
    scaled = replace(case, loss=half(torch.float16), scaler=lambda: torch.amp.GradScaler("cuda", 2.0**24, 2.0, 2.0**-4))
    torch.testing.assert_close(planned(scaled, layout)[0], eagerly(scaled, 1)[0], rtol=2e-2, atol=0)


def test_attention_is_the_kernel_that_torch_picks_on_this_gpu():
    case = on_gpu(replace(CASES["gpt"], loss=half(torch.bfloat16)))
    plan, *_ = plan_of(case, replace(LAYOUTS["data 2"], kind="cuda"), 16)
    ops = {step.op for body in plan.bodies for step in body.steps if "attention" in step.op}
    assert ops, "attention was taken apart into plain ops"
    assert not any("for_cpu" in op for op in ops)


def test_a_job_without_memory_tells_what_its_plan_reckons_with():
    weight = nn.Parameter(torch.ones(1, device="cuda"))

    @flow.global_function(type="predict")
    def huge(x: Tensor) -> Tensor:
        return (x * weight).expand(1 << 40).clone().sum()  # 4 TiB

    with pytest.raises(ActorError, match=r"out of memory for .*\n.*reckons with"):
        float(huge(torch.ones(1)))


@pytest.mark.parametrize(("ranks", "plan"), [(2, "zero"), (4, "data × pipeline")])
def test_processes_share_a_gpu_where_they_are_told_to(ranks: int, plan: str):
    paths = [ROOT, *(ROOT / name for name in ("compiler", "scheduler", "protos", "tests", "examples", "benchmarks"))]
    script = ROOT / "benchmarks" / "gpus" / "ranked.py"
    command = [sys.executable, "-m", "actorflow", "run", str(script), "--devices", str(ranks), "--device-type", "cuda"]
    done = subprocess.run(
        [*command, "--oversubscribe", "--", plan, "cuda"], capture_output=True, text=True, timeout=180, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()[-1].split(",")) == 4
