"""One rank of torch.distributed.pipelining, or of eager PyTorch: pipeline.py starts it with torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from setting import Part, Setting, cut, loss_of, ranks_of
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from turns import Steps, take_turns

# name → (stages on each rank, whether they go there and back)
SCHEDULES = {
    "GPipe": (1, False),
    "1F1B": (1, False),
    "LoopedBFS": (2, False),
    "Interleaved1F1B": (2, False),
    "InterleavedZeroBubble": (2, False),
    "ZBVZeroBubble": (2, True),
    "DualPipeV": (2, True),
}


def eager(setting: Setting) -> Steps:
    """The step on one process, over the same micro-batches."""
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, fused=setting.fused)
    batches = cycle(setting.batches())

    def steps(count: int) -> float:
        for _ in range(count):
            total = torch.zeros(())
            tokens, targets = next(batches)
            m = setting.micro_batches
            for x, y in zip(tokens.chunk(m), targets.chunk(m), strict=True):
                loss = loss_of(model(x), y) / m
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        return total.item()

    return steps


def pipelined(name: str, setting: Setting) -> Steps:
    """The step of this rank under a schedule of torch.distributed.pipelining."""
    name, setting = setting.of(name)
    rank = dist.get_rank()
    each, bent = SCHEDULES[name]
    ranks = ranks_of(setting.processes, each, bent)
    model = setting.model()
    cpu = torch.device("cpu")
    parts = {
        number: Part(model, layers) for number, layers in enumerate(cut(setting.layers, ranks)) if ranks[number] == rank
    }
    if setting.compiled:
        for part in parts.values():
            part.compile()
    stages = [PipelineStage(part, number, len(ranks), cpu) for number, part in parts.items()]
    kind = getattr(schedules, f"Schedule{name}")
    schedule = kind(stages[0] if each == 1 else stages, setting.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(
        [p for part in parts.values() for p in part.parameters()], lr=setting.lr, fused=setting.fused
    )
    first, last = 0 in parts, len(ranks) - 1 in parts
    batches: Iterator[tuple[Tensor, Tensor]] = cycle(setting.batches())

    def steps(count: int) -> float | None:
        losses: list[Tensor] = []
        for _ in range(count):
            tokens, targets = next(batches)
            given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
            schedule.step(*([tokens] if first else []), **given, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).mean().item() if last else None

    return steps


def main() -> None:
    """Serve the referee."""
    address, setting = sys.argv[1], Setting.from_json(sys.argv[2])
    torch.set_num_threads(1)
    if len(sys.argv) > 3:
        take_turns(address, 0, lambda _: (eager(setting), dict))
        return
    cores = sorted(os.sched_getaffinity(0))
    if setting.bind and setting.processes <= len(cores):
        rank, n = int(os.environ["LOCAL_RANK"]), len(cores)
        os.sched_setaffinity(0, cores[rank * n // setting.processes : (rank + 1) * n // setting.processes])
    dist.init_process_group("gloo")
    take_turns(address, int(os.environ["RANK"]), lambda name: (pipelined(name, setting), dict))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
