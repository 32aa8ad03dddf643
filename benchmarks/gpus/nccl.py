"""Check that the NCCL data plane moves tensors correctly between ranks.

Where there is one GPU, ranks share it: told that they are on different hosts, NCCL lets them, and goes by sockets.
"""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from actorflow.devices import Device, make_device
from actorflow.transport.communicators import over_gloo, over_nccl
from actorflow.transport.nccl import NcclPlane, nccl_version
from actorflow_compiler.plan.plan import Collective, CollectiveKind, Plane, TensorSpec
from gpus.ranks import RUNS, compare, eagerly
from gpus.tell import tell

SIZES = (1, 1000, 1 << 20)
CALLS, AHEAD = 32, 64 << 20  # calls, bytes of each


def alone(kind: str) -> None:
    """A group of one rank: communicators are made, calls are issued, streams are ordered, all is closed."""
    device = make_device(torch.device(kind))
    plane = NcclPlane(0, HashStore(), device, make=over_nccl if kind == "cuda" else over_gloo)
    plane.open([], [(0,)])
    right = True
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for size in SIZES:
            tensor = torch.arange(size, device=device.where).to(dtype)
            spec = TensorSpec((size,), str(dtype).removeprefix("torch."), "B")
            device.queue("nccl").wait(device.here().mark())
            with device.queue("nccl").context():
                (found,) = plane.collective(
                    Collective(CollectiveKind.ALL_REDUCE, 0, (0,), plane=Plane.NCCL), [tensor], [spec]
                )
            device.synchronize()
            right = right and torch.equal(found, tensor)
    name = f"NCCL {nccl_version()}" if kind == "cuda" else "Gloo in its place"
    tell(f"all-reduce of one rank over {name}", "the same numbers" if right else "other numbers", "the same", right)
    if kind == "cuda":
        ahead(plane, device)
    plane.close()


def ahead(plane: NcclPlane, device: Device) -> None:
    """Issue calls behind work that lasts: their memory must not grow with how far the host is ahead."""
    tensor = torch.ones(AHEAD // 4, device=device.where)
    spec = TensorSpec(tuple(tensor.shape), "float32", "B")
    device.synchronize()
    queue = device.queue("nccl")
    with queue.context():
        busy = torch.zeros(8192, 8192, device=device.where)
        for _ in range(100):  # a second or more
            busy = busy @ busy
        begun = queue.mark()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(CALLS):
            plane.collective(Collective(CollectiveKind.ALL_REDUCE, 0, (0,), plane=Plane.NCCL), [tensor], [spec])
    held = (torch.cuda.max_memory_allocated() - base) / AHEAD
    early = begun is not None and not begun.passed()
    found = f"{held:.1f} times one of them" if early else "not measured: they had begun"
    device.synchronize()
    what = f"memory of {CALLS} all-reduces of {AHEAD >> 20} MiB that have not begun"
    tell(what, found, "≤ 4", held <= 4 if early else None)


def main(kind: str) -> None:
    """One rank, then several."""
    alone(kind)
    if kind != "cuda":
        tell("trainings over NCCL", "not run: NCCL wants a GPU")
        return
    count, wanted = torch.cuda.device_count(), eagerly(kind)
    for ranks, plan in RUNS:
        where = f"{count} GPUs" if count >= ranks else f"{ranks} processes that share {count} GPU{'s' * (count != 1)}"
        compare(f"{plan}, {where}, over NCCL", kind, ranks, plan, wanted, "nccl")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr[-2000:]}")
