"""NCCL's plane on one GPU, whose communicators have one member: what it does there, and what memory it holds."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from actorflow.devices import Cuda
from actorflow.transport import nccl
from actorflow.transport.communicators import Scope, over_nccl
from actorflow.transport.nccl import NcclPlane, nccl_version
from actorflow_compiler.plan.plan import Collective, CollectiveKind, TensorSpec

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not nccl_version(), reason="this torch has no NCCL")]
LARGE = 16 << 20  # elements of float32
CALLS = 24


def test_calls_are_in_the_current_stream_and_leave_nothing_to_wait_for() -> None:
    device = Cuda()
    made = over_nccl(HashStore(), 0, 1)
    queue = device.queue("nccl")
    with queue.context():
        tensor = torch.arange(8, device=device.where)
        other = torch.empty_like(tensor)
        assert made.broadcast([tensor], nccl._MOVED) is None
        assert made.allreduce([tensor], nccl._SUMMED) is None
        assert made.alltoall_base(other, tensor, [8], [8], nccl._EXCHANGED) is None
        mark = queue.mark()
    mark.wait_on_host()
    assert other.tolist() == list(range(8))
    made.shutdown()


def test_memory_does_not_grow_with_calls_that_wait_for_the_device() -> None:
    device = Cuda()
    plane = NcclPlane(0, HashStore(), device)
    plane.open([], [(0,)])
    tensor = torch.ones(LARGE, device=device.where)
    device.synchronize()
    queue = device.queue("nccl")
    with queue.context():
        busy = torch.zeros(8192, 8192, device=device.where)
        for _ in range(100):
            busy = busy @ busy
        begun, base = queue.mark(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(CALLS):
            (found,) = plane.collective(
                Collective(CollectiveKind.ALL_REDUCE, 0, (0,)), [tensor], [TensorSpec((LARGE,), "float32", "B")]
            )
            wire = torch.empty(LARGE, device=device.where)
            plane._communicators[Scope.GROUP, (0,)].broadcast([wire], nccl._MOVED)
            del wire
    early, peak = not begun.passed(), torch.cuda.max_memory_allocated() - base
    device.synchronize()
    if not early:
        pytest.skip("this GPU was through before all calls were issued")
    assert peak <= 4 * tensor.nbytes
    assert torch.equal(found, tensor)
    plane.close()
