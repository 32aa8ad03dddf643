"""Global tensors on GPUs move over NCCL, also where ranks share a GPU that NCCL takes to be on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorflow.transport.nccl import nccl_version
from cluster.runs import Run

pytestmark = pytest.mark.cuda

SCRIPT = """
import os
import torch

if torch.cuda.device_count() < 2:
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]

import actorflow as flow
from actorflow.eager.current import current

where = {"placement": flow.placement.all("cuda")}
x = flow.randn(64, 96, sbp=flow.sbp.split(0), **where).requires_grad_()
w = flow.randn(96, 32, sbp=flow.sbp.split(0), **where)
made = x @ w
made.square().sum().backward()
whole, weight = (torch.from_numpy(t.numpy(force=True)).requires_grad_() for t in (x, w))
wanted = whole @ weight.detach()
wanted.square().sum().backward()
torch.testing.assert_close(torch.from_numpy(made.numpy(force=True)), wanted.detach(), rtol=1e-3, atol=1e-3)
torch.testing.assert_close(torch.from_numpy(x.grad.numpy()), whole.grad, rtol=1e-3, atol=1e-3)
assert current()._pairs._communicators._made, "nothing went over NCCL"
print("as on one device", flush=True)
"""


@pytest.mark.skipif(not nccl_version(), reason="this torch has no NCCL")
def test_global_tensors_move_between_gpus_over_nccl(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = Run(tmp_path, script, "--log-dir", str(tmp_path / "logs"), "--devices", "2", "--oversubscribe")
    assert run.wait() == 0, run.output
    assert "as on one device" in run.output
