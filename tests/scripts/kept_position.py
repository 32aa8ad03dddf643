"""Train from a data source with a Keeper that keeps its position, and print the loss and the position of each step.

    actorflow run tests/scripts/kept_position.py --devices 2 -- FOLDER LAST WORKERS KIND

The process of each rank ends abruptly behind step LAST (-1: it does not).  KIND is own, or existing: a ``DataLoader``
is taken over.  Samples draw random numbers, and so does the model.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import actorflow as flow

STEPS, EVERY, ROWS, BATCH = 16, 5, 29, 8


class Noisy(Dataset[Any]):
    """Rows with noise that is drawn anew each time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, 3, (ROWS,), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.3 * torch.randn(6, dtype=torch.float64), self.y[index]


def main(folder: str, last: int, workers: int, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    @flow.global_function
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data = Noisy()
    if kind == "existing":
        loader = flow.data.loader(DataLoader(data, BATCH, shuffle=True, num_workers=workers))
    else:
        loader = flow.data.loader(data, BATCH, shuffle=True, seed=5, workers=workers)
    keeper = flow.checkpoint.Keeper(folder, every=EVERY, model=model, optimizer=optimizer, loader=loader)
    batches = loader.repeat()
    for number in keeper.steps(STEPS):
        loss = float(step(*next(batches)))
        print(number, loss, loader.position, flush=True)
        if number == last:
            os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
