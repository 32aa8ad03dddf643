"""Compare the device memory that training takes with what its plan predicts."""

from __future__ import annotations

import sys

import torch

import actorflow as flow
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.units import bytes_text
from actorflow_scheduler.forecast import forecast
from gpus.setting import setting, settle
from gpus.tell import tell

STEPS = 4


def main(kind: str) -> None:
    """Train a GPT with one micro-batch, and with four."""
    sizes = setting(kind)
    for micro_batches in (1, 4):
        if kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() if kind == "cuda" else 0  # of the training before
        step = sizes.step(sizes.model())
        job = flow.global_function(type="train", micro_batches=micro_batches)(step)
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
            continue
        peak = torch.cuda.max_memory_allocated() - base
        off = peak / rank.total - 1
        found = f"{bytes_text(peak)}, forecast {bytes_text(rank.total)} ({parts}): {off:+.1%}"
        tell(what, found, "within 10%", abs(off) <= 0.1)
        del step, job


if __name__ == "__main__":
    main(sys.argv[1])
