"""Bodies on a real GPU that inductor has joined, and that are replayed as CUDA graphs; skipped without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow.devices import Cuda
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.variant import Variant
from gpu_cases import eagerly, here, on_gpu
from models import CASES
from trained import LAYOUTS, Layout, differences, in_float64, plan_of, train

pytestmark = pytest.mark.cuda
TURNS = 4  # calls


MIXED = {**LAYOUTS, "forward and backward in one": Layout(1, variant=Variant(joined=True))}


@pytest.mark.filterwarnings("error:torch's inductor cannot compile:UserWarning")
@pytest.mark.filterwarnings("error:no CUDA graph can be made of:UserWarning")
@pytest.mark.parametrize(
    ("name", "layout", "mode"),
    [
        *(("mlp", layout, Mode.CUDAGRAPHS) for layout in MIXED),
        ("cnn", "data 2, pipeline 2", Mode.CUDAGRAPHS), ("clipped gpt", "pipeline 2", Mode.CUDAGRAPHS),
        ("cnn", "forward and backward in one", Mode.INDUCTOR),
        ("clipped gpt", "forward and backward in one", Mode.REDUCE_OVERHEAD),
        ("clipped gpt", "data 2, pipeline 2", Mode.REDUCE_OVERHEAD),
    ],
)  # fmt: skip
def test_bodies_that_are_replayed_train_as_one_device_does(name: str, layout: str, mode: Mode) -> None:
    case, how = on_gpu(in_float64(CASES[name])), replace(MIXED[layout], kind="cuda")
    wanted, parameters = eagerly(case, how.micro_batches, TURNS)
    plan, values, optimizer = plan_of(case, how, 16)
    losses, found = train(case, replace(plan, mode=mode), values, optimizer, [16] * TURNS, here)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-7, atol=0)
    assert max(differences(found, parameters).values()) <= 1e-6


def test_a_captured_kernel_reads_what_lies_in_its_memory_when_it_is_replayed() -> None:
    device = Cuda()
    x = torch.ones(4, device=device.where)
    device.synchronize()
    replay, y = device.capture(lambda: (x * 2).sum(), 2)
    queue = device.queue("compute")
    with queue.context():
        replay()
        first = y.clone()
        x.fill_(3)
        replay()
        queue.mark().wait_on_host()
    assert (first.item(), y.item()) == (8.0, 24.0)


def test_after_a_capture_that_fails_the_device_goes_on() -> None:
    device = Cuda()
    x = torch.ones(4, device=device.where)
    device.synchronize()
    here = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        device.capture(lambda: x.sum().item())  # waits for the device
    assert torch.cuda.current_stream() == here
    torch.cuda.empty_cache()
    replay, y = device.capture(lambda: (x * 2).sum())
    replay()
    device.synchronize()
    assert y.item() == 8.0


def test_results_of_replayed_steps_may_be_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
    twin = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
    twin.load_state_dict(model.state_dict())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss, out

    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))

    @flow.global_function(type="train", compile="reduce-overhead")
    def job(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return step(model, ours, x, y)

    random = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 16, generator=random), torch.randint(4, (8,), generator=random)) for _ in range(8)]
    kept = [job(*batch) for batch in batches]  # read when all are issued: each must have memory of its own
    for (loss, out), batch in zip(kept, batches, strict=True):
        wanted, shown = step(twin, theirs, *(t.cuda() for t in batch))
        torch.testing.assert_close(loss.detach().cpu(), wanted.detach().cpu(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.detach().cpu(), shown.detach().cpu(), rtol=1e-4, atol=1e-4)
