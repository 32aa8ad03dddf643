"""What ``compile=`` of a job does: the same losses, other actors, and a clear word where it can do nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actorflow as flow
from actorflow.jobs.job import Job
from actorflow_compiler.core.errors import CallError


class Blocks(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return x


def trained(compile: bool | str | None, checkpoints: bool = False, job: bool = True) -> tuple[list[float], Job | None]:
    """The losses of five steps with a learning rate that changes, and the job."""
    torch.manual_seed(0)
    model = Blocks(checkpoints).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = flow.global_function(type="train", compile=compile)(step) if job else step
    losses = []
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        x, y = (torch.randn(4, 8, dtype=torch.float64, generator=random) for _ in range(2))
        losses.append(run(x, y).detach())
        rates.step()
    return [float(loss) for loss in losses], run if isinstance(run, Job) else None


def kinds(job: Job | None) -> list[str]:
    assert job is not None
    assert job.plan is not None
    return [actor.kind for actor in job.plan.actors if actor.kind in ("forward", "backward")]


@pytest.mark.parametrize("mode", [True, pytest.param("reduce-overhead", marks=pytest.mark.slow), "cudagraphs"])
@pytest.mark.filterwarnings("error:torch's inductor cannot compile:UserWarning")
def test_a_compiled_job_has_the_losses_of_the_step_on_one_device(mode: bool | str) -> None:
    losses, job = trained(mode)
    assert losses == pytest.approx(trained(None, job=False)[0], rel=1e-9)
    assert job is not None
    assert job.plan is not None
    assert job.plan.mode == ("inductor" if mode is True else mode)


def test_forward_and_backward_are_one_actor_where_they_are_joined() -> None:
    assert kinds(trained(True)[1]) == ["backward"]
    assert kinds(trained(None)[1]) == kinds(trained("cudagraphs")[1]) == ["forward", "backward"]


@pytest.mark.slow
def test_what_a_checkpoint_computes_again_is_not_joined_with_what_was_computed_before() -> None:
    losses, job = trained(True, checkpoints=True)
    assert kinds(job) == ["forward", "backward"]
    assert losses == pytest.approx(trained(None, job=False)[0], rel=1e-9)


def test_a_mode_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(CallError, match=r"compile='fast' was found; .* was expected"):
        flow.global_function(type="train", compile="fast")(lambda x: x)


def test_a_plan_says_how_its_bodies_run() -> None:
    from actorflow_compiler.plan.text import from_json, to_json, to_text

    _, job = trained("max-autotune-no-cudagraphs")
    assert job is not None
    assert job.plan is not None
    assert "max-autotune-no-cudagraphs: joined by torch's inductor (autotuned)" in to_text(job.plan)
    assert from_json(to_json(job.plan)).mode == "max-autotune-no-cudagraphs"
