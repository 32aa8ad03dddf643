"""Count how often the host waits for the device in steady steps, by torch's profiler."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

import actorflow as flow
from actorflow.session.process import current
from gpus.setting import setting, settle
from gpus.tell import tell

STEPS = 3  # fewer than calls that may be under way: the host is never ahead by too much
STEADY = "steady steps"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def main(kind: str) -> None:
    """Profile steps that are issued and not read."""
    sizes = setting(kind)
    layers = 4 if kind == "cuda" else None
    job = flow.global_function(type="train")(sizes.step(sizes.model(layers)))
    batches = sizes.batches(STEPS)
    for _ in range(2):
        for batch in batches:
            job(*batch)
        settle(kind)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if kind == "cuda" else [])
    # inside a range of its own: the profiler itself waits for the device when it ends
    with profile(activities=activities) as seen, record_function(STEADY):
        handles = [job(*batch) for batch in batches]
        launched_all()
    settle(kind)
    losses = [float(loss.detach()) for loss in handles]
    tell("losses of the steps", f"{losses[0]:.3f} … {losses[-1]:.3f}", "finite", all(map(math.isfinite, losses)))
    if kind != "cuda":
        tell("waits for the device in a steady step", "not measured: there are none on a CPU")
        return
    events = [e for e in seen.events() if e.device_type == DeviceType.CPU]  # what the host does, on any thread
    steady = next(e.time_range for e in events if e.name == STEADY)
    names = [e.name for e in events if steady.start <= e.time_range.start <= steady.end]
    counts = Counter(name for name in names if name in WAITS)
    launches = sum("LaunchKernel" in name for name in names)
    found = ", ".join(f"{name} {counts[name]}" for name in WAITS)
    tell(f"waits in {STEPS} steady steps, {launches} launches", found, "none", launches > 0 and not counts)


def launched_all() -> None:
    """Return when the worker has launched everything that it was given; waits for no device."""
    worker = current().worker
    assert worker is not None
    end = time.monotonic() + 30
    while f"rank {worker.rank}: 0 unfinished calls" not in worker.explain():
        if time.monotonic() > end:
            raise TimeoutError(f"the steps were not launched in 30 s\n{worker.explain()}")
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1])
