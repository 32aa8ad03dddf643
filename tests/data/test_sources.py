"""Batches of data sources are those of torch's loaders under every plan, and each rank reads the rows that it needs."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

import warm
from scripts.sourced import CASES, EPOCHS

SCRIPT = Path(__file__).parent.parent / "scripts" / "sourced.py"


def parts(layout: str, devices: int, rank: int, size: int) -> list[int]:
    """The rows of a batch that a rank needs, in the plans of the script."""
    rows = np.arange(size)
    if layout == "tensor":
        return rows.tolist()
    if layout == "data":
        return np.array_split(rows, devices)[rank].tolist()
    pieces = next(count for count in (4, 3, 2, 1) if size % count == 0)
    shares = [np.array_split(piece, devices // 2)[rank % (devices // 2)] for piece in np.array_split(rows, pieces)]
    return np.concatenate(shares).tolist()


@pytest.mark.parametrize(
    ("layout", "devices"),
    [("data", 2), *(pytest.param(*how, marks=pytest.mark.slow) for how in (("pipeline", 4), ("tensor", 2)))],
)
def test_losses_are_those_of_one_device_and_no_row_is_read_that_is_not_needed(
    layout: str, devices: int, tmp_path: Path
) -> None:
    run = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", str(SCRIPT), "--devices", str(devices), "--", layout, str(tmp_path)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "all equal\n"
    for case in CASES:
        if case.resumes or case.existing:  # rows that were read ahead before the break, and an order of torch's own
            continue
        data = torch.empty(case.rows)
        order: list[list[int]] = []
        for epoch in range(EPOCHS):
            sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, shuffle=case.shuffle, seed=7)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            indices = [*sampler]
            order += [indices[i : i + case.batch] for i in range(0, case.rows, case.batch)]
        for rank in range(devices):
            lines = [line.split() for line in (tmp_path / f"{case.name}.{rank}").read_text().splitlines()]
            needed = Counter(batch[row] for batch in order for row in parts(layout, devices, rank, len(batch)))
            assert Counter(int(index) for index, _ in lines) == needed, (case, rank)
            processes = {pid for _, pid in lines}
            # the last batch of the first epoch has a size of its own: what is needed of it was not known ahead
            assert len(processes) >= max(1, case.workers), (case, processes)
