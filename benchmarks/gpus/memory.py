"""Compare the device memory that training takes with what its plan predicts."""

from __future__ import annotations

import subprocess
import sys

import torch

import actorflow as flow
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.units import bytes_text
from actorflow_scheduler.forecast import forecast
from gpus.setting import setting, settle
from gpus.tell import tell

STEPS = 4


def main(kind: str, micro_batches: str = "") -> None:
    """Train a GPT with one micro-batch, and with four: each in a process of its own, or the one that is named here."""
    if micro_batches:
        measure(kind, int(micro_batches))
        return
    for count in (1, 4):
        subprocess.run([sys.executable, "-m", "gpus.memory", kind, str(count)], check=True)


def measure(kind: str, micro_batches: int) -> None:
    """Train, and tell the peak after the first step beside the forecast."""
    sizes = setting(kind)
    job = flow.global_function(type="train", micro_batches=micro_batches)(sizes.step(sizes.model()))
    batches = sizes.batches(STEPS)
    job(*batches[0])
    settle(kind)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        job(*batch)
    settle(kind)
    assert job.last is not None
    (rank,) = forecast(job.last.plan, CPU_CORE).ranks  # bytes do not depend on the hardware
    parts = (
        f"variables {bytes_text(rank.variables)}, registers {bytes_text(rank.registers)}, "
        f"at work {bytes_text(rank.workspace)}"
    )
    what = f"peak of training, {micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    if kind != "cuda":
        tell(what, f"not measured on a CPU; forecast {bytes_text(rank.total)}: {parts}")
        return
    peak = torch.cuda.max_memory_allocated()
    off = peak / rank.total - 1
    found = f"{bytes_text(peak)}, forecast {bytes_text(rank.total)} ({parts}): {off:+.1%}"
    tell(what, found, "within 10%", abs(off) <= 0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
