"""The trainings of the suite, the same on every side, and what a rank notes of its memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # these are imported on both sides before memory is looked at, whoever needs them
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.functional as F
import torch.nn.parallel
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "pipelines"))

import setting as pipelines
from resident import memory, start_peak_anew
from turns import Notes, Steps


@dataclass(frozen=True, slots=True)
class Task(pipelines.Setting):  # type: ignore[misc]  # found by sys.path
    """A pipeline's setting, or with ``classes`` that of a classifier of ``width`` numbers."""

    classes: int = 0
    threads: int = 1  # of each process

    def model(self) -> Any:
        """The whole model with the weights that every side starts from."""
        if not self.classes:
            return pipelines.Setting.model(self)
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, self.classes))

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of whole batches."""
        if not self.classes:
            return pipelines.Setting.batches(self)
        generator = torch.Generator().manual_seed(0)
        return [
            (
                torch.randn(self.batch, self.width, generator=generator),
                torch.randint(self.classes, (self.batch,), generator=generator),
            )
            for _ in range(pipelines.BATCHES)
        ]

    def bind_to_cores(self, rank: int) -> None:
        """Compute with as many threads as asked for, and where ranks have cores of their own only on this rank's."""
        torch.set_num_threads(self.threads)
        cores = sorted(os.sched_getaffinity(0))
        n = len(cores)
        if 1 < self.processes <= n:
            os.sched_setaffinity(0, cores[rank * n // self.processes : (rank + 1) * n // self.processes])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy: float32[..., classes], int64[...] → float32[]."""
    return pipelines.loss_of(logits, targets) if logits.dim() > 2 else F.cross_entropy(logits, targets)


def noting_memory(rank: int, make: Callable[[], Steps]) -> tuple[Steps, Notes]:
    """Prepare a contender, and note the memory that its rank needs for it.

    In bytes: what was resident "before" its model was made, the most in its "first" turn with all that went before, and
    the most in later "turns".
    """
    start_peak_anew()
    found = {"rank": rank, "before": memory("VmRSS")}
    steps = make()

    def notes() -> dict[str, int]:
        if "first" in found:
            found["turns"] = memory("VmHWM")
        else:
            found["first"] = memory("VmHWM")
            start_peak_anew()
        return dict(found)

    return steps, notes


__all__ = ["Task", "loss_of", "noting_memory"]
