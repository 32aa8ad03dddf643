"""Measure whether batches in the host's memory slow a step down."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]

import actorflow as flow
from gpus.setting import seconds, settle
from gpus.tell import tell

ROUNDS, STEPS = 7, 8


def main(kind: str) -> None:
    """A step with large batches, fed from the host and from the device, in turns; then seen by the profiler."""
    cuda = kind == "cuda"
    batch, width, layers = (4096, 4096, 12) if cuda else (64, 64, 3)  # 64 MiB a batch; about 5 ms of computing in bf16
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    @flow.global_function(type="train", compile="cudagraphs")  # kernels that are launched one by one have gaps
    def train_step(x: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    host = [torch.randn(batch, width) for _ in range(2)]
    host = [t.pin_memory() for t in host] if cuda else host
    fed = {"host": host, "device": [t.to(kind) for t in host]}

    def run(where: str) -> None:
        for i in range(STEPS):
            train_step(fed[where][i % 2])

    for where in fed:
        run(where)
    taken: dict[str, list[float]] = {where: [] for where in fed}
    for turn in range(ROUNDS if cuda else 2):
        for where in list(fed) if turn % 2 else list(fed)[::-1]:
            taken[where].append(seconds(lambda w=where: run(w), lambda: settle(kind)) / STEPS)
    ratio = statistics.median(a / b for a, b in zip(taken["host"], taken["device"], strict=True))
    times = {where: f"{statistics.median(found) * 1e3:.2f} ms" for where, found in taken.items()}
    mib = batch * width * 4 / 2**20
    tell(
        f"a step fed {mib:.0f} MiB from the host, against the same on the device",
        f"{ratio:.3f} ({times['host']}, {times['device']})", "≤ 1.05" if cuda else "", ratio <= 1.05 if cuda else None,
    )  # fmt: skip
    if not cuda:
        tell("copies that other work hides", "not measured: there are none on a CPU")
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run("host")
        run("host")
        settle(kind)
    copies, work = [], []
    for event in profile.events():
        at: Any = event.time_range
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue  # calls of the host, and ranges
        if "HtoD" in event.name and at.end - at.start > 50:  # µs: of batches, not of scalars
            copies.append((at.start, at.end))
        elif "Memcpy" not in event.name and "Memset" not in event.name:
            work.append((at.start, at.end))
    begun = min(start for start, _ in work)
    copies = [copy for copy in copies if copy[0] > begun]  # there is nothing to hide those of the first calls behind
    hidden = sum(_common(copy, work) for copy in copies)
    total = sum(end - start for start, end in copies)
    share = hidden / total if total else 0.0
    found = f"{share:.0%} of {total / 1e3:.1f} ms, {len(copies)} copies"
    tell("the share of copying in which kernels run", found, "≥ 90%", share >= 0.9)


def _common(one: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of an interval lies in the union of others."""
    found, at = 0.0, one[0]
    for start, end in sorted(others):
        start, end = max(start, at), min(end, one[1])
        if end > start:
            found, at = found + end - start, end
    return found


if __name__ == "__main__":
    main(sys.argv[1])
