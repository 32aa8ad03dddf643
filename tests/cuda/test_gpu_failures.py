"""What goes wrong on a real GPU: ranks that are killed, calls that take too long, communicators that are given up."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from actorflow.devices import Cuda
from actorflow.testing.local_cluster import LocalCluster
from actorflow.transport.nccl import NcclPlane, nccl_version
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import Collective, CollectiveKind, OfInput, Plan, TensorSpec
from cluster.runs import Run
from gpu_cases import ENDLESS
from runtime.programs import V0, Program, body, on, spec, step

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_on_a_gpu_that_ends_or_stops_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    options = ["--devices", "2", "--device-type", "cuda", "--oversubscribe", "--lost-after", "6"]
    options += ["--log-dir", str(tmp_path / "logs")]
    run = Run(tmp_path, script, *options, "--", str(tmp_path))
    try:
        pids = [int(text) for text in run.wait_for([tmp_path / "0", tmp_path / "1"])]
        os.kill(pids[1], number)
        assert run.wait(60) != 0
        assert "rank 1" in run.output
        assert not run.ranks_left()
    finally:
        run.process.kill()


def busy(products: int) -> Plan:
    """A plan whose one actor multiplies large matrices many times."""
    p = Program(name="busy")
    (x,) = p.actor("x", OfInput("x"), out=[spec(8192, 8192)], kind="source", queue="source")
    steps = [step("aten.mm.default", V0, Ref(k), outs=[k + 1]) for k in range(products)]
    (y,) = p.actor("A", x, body=body(1, *steps, outputs=[products]), out=[spec(8192, 8192)])
    p.result(y, on(0), (B,), (8192, 8192))
    return p.plan()


def test_a_time_limit_counts_until_the_device_is_done() -> None:
    plan = busy(100)  # two seconds or more in float32
    with LocalCluster(plan, device=lambda rank: Cuda()) as cluster:
        (call,) = cluster.issue({"x": torch.zeros(8192, 8192)})
        with pytest.raises(TimeoutError):
            call.wait(0.2)
        call.wait(60.0)  # it was no failure: the call goes on
        assert call.result(0, 60.0).sum().item() == 0.0


@pytest.mark.skipif(not nccl_version(), reason="this torch has no NCCL")
def test_communicators_that_are_given_up_leave_the_device_usable() -> None:
    device = Cuda()
    plane = NcclPlane(0, HashStore(), device, patience=timedelta(minutes=1).total_seconds())
    plane.open([], [(0,)])
    tensor = torch.ones(1 << 20, device=device.where)
    device.synchronize()
    queue = device.queue("nccl")
    with queue.context():
        work = torch.zeros(8192, 8192, device=device.where)
        for _ in range(50):
            work = work @ work
        plane.collective(
            Collective(CollectiveKind.ALL_REDUCE, 0, (0,)), [tensor], [TensorSpec((1 << 20,), "float32", "B")]
        )
    plane.close()  # while the call waits for the device
    device.synchronize()
    assert (tensor + 1).sum().item() == 2.0 * (1 << 20)
