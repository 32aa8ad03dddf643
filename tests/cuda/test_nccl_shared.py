"""Ranks that share a GPU exchange tensors over NCCL where it is told that they are on different hosts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from actorflow.transport.nccl import nccl_version
from cluster.runs import Run
from gpu_cases import ENDLESS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not nccl_version(), reason="this torch has no NCCL")]
RANKED = Path(__file__).parents[2] / "benchmarks" / "gpus" / "ranked.py"
HOSTS = """
import os

os.environ["NCCL_HOSTID"] = os.environ["RANK"]
"""

GROUPS = (
    HOSTS
    + """
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
x = torch.full((1000,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 1000
half = dist.new_group([0, 1])
dist.broadcast(x.mul_(rank + 1), 1, group=half)
assert x.tolist() == [6.0] * 1000
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
model(torch.full((4, 8), float(rank), device=device)).sum().backward()
found = [torch.empty_like(model.module.weight.grad) for _ in range(2)]
dist.all_gather(found, model.module.weight.grad)
assert torch.equal(*found) and found[0].unique().tolist() == [2.0]
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} is done", flush=True)
"""
)

DEFAULT = (
    HOSTS
    + """
import torch
import torch.distributed as dist
from actorflow.distributed import default_group

default_group()
rank = dist.get_rank()
x = torch.full((1000,), float(rank + 1), device="cuda")
dist.all_reduce(x)
assert x.tolist() == [3.0] * 1000
print(f"rank {rank} is done", flush=True)  # and leaves the group to the end of the process
"""
)


def begun(folder: Path, text: str, ranks: int = 2, *arguments: str) -> Run:
    """A run of a script whose ranks share the GPU."""
    script = folder / "script.py"
    script.write_text(text)
    options = ["--devices", str(ranks), "--device-type", "cuda", "--oversubscribe", "--log-dir", str(folder / "logs")]
    return Run(folder, script, *options, "--lost-after", "6", "--", *arguments)


@pytest.fixture(scope="module")
def eagerly(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the training without a plan."""
    run = Run(tmp_path_factory.mktemp("eager"), RANKED, "--devices", "1", "--", "eager", "cuda")
    assert run.wait() == 0, run.output
    return losses_of(run)


def losses_of(run: Run) -> list[float]:
    """The list that a run has printed."""
    (line,) = (line for line in run.output.splitlines() if line.startswith("["))
    found: list[float] = json.loads(line)
    return found


@pytest.mark.parametrize(("ranks", "plan"), [(2, "data"), (2, "tensor"), (2, "zero"), (4, "data × pipeline")])
def test_a_training_over_nccl_gives_the_losses_of_one_device(
    tmp_path: Path, eagerly: list[float], ranks: int, plan: str
) -> None:
    options = ["--devices", str(ranks), "--device-type", "cuda", "--oversubscribe", "--log-dir", str(tmp_path / "logs")]
    run = Run(tmp_path, RANKED, *options, "--", plan, "cuda", "nccl")
    assert run.wait() == 0, run.output
    torch.testing.assert_close(torch.tensor(losses_of(run)), torch.tensor(eagerly), rtol=1e-5, atol=0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_in_the_middle_of_transfers_over_nccl_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    run = begun(tmp_path, HOSTS + ENDLESS, 2, str(tmp_path), "nccl")
    try:
        pids = [int(text) for text in run.wait_for([tmp_path / "0", tmp_path / "1"])]
        os.kill(pids[1], number)
        assert run.wait(90) != 0
        assert "rank 1" in run.output
        assert not run.ranks_left()
    finally:
        run.process.kill()


@pytest.mark.parametrize("script", [GROUPS, DEFAULT], ids=["groups of the script", "the default group"])
def test_torchs_own_groups_meet_over_nccl_in_the_store_of_the_run(tmp_path: Path, script: str) -> None:
    run = begun(tmp_path, script)
    assert run.wait() == 0, run.output
    logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert all(f"rank {rank} is done" in run.output + logs for rank in range(2)), run.output
