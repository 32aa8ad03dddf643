"""Train with batches of data sources, as a job and eagerly, and print a line for each case that differs.

    actorflow run tests/scripts/sourced.py --devices 4 -- LAYOUT FOLDER

LAYOUT is data, tensor or pipeline (two stages, each on half of the devices).  Each rank writes which rows of the
dataset it has read in a case, and in which process, to FOLDER/CASE.RANK.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import actorflow as flow

EPOCHS = 2
LEFT = 3  # batches of the second epoch behind which it is left, saved and taken up again


@dataclass(frozen=True)
class Case:
    rows: int
    batch: int
    shuffle: bool
    workers: int = 0
    drop_last: bool = False
    existing: bool = False  # a DataLoader is taken over
    resumes: bool = False  # the second epoch is left in the middle, and taken up by another source

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


CASES = (
    Case(48, 8, shuffle=False),
    Case(45, 8, shuffle=True),
    Case(45, 8, shuffle=True, workers=2),
    Case(45, 8, shuffle=True, drop_last=True, workers=1, resumes=True),
    Case(45, 8, shuffle=True, existing=True),
    Case(45, 8, shuffle=True, existing=True, workers=2, resumes=True),
)


class Rows(Dataset[Any]):
    """Rows that are a function of their number; each reading is written to a file."""

    def __init__(self, count: int, path: Path | None) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 6, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, 4, (count,), generator=generator)
        self.path = path

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{index} {os.getpid()}\n")
        return {"x": self.x[index], "y": self.y[index]}


def plain(case: Case) -> Iterator[Iterator[dict[str, Tensor]]]:
    """The batches of each epoch, as torch gives them on one device."""
    data = Rows(case.rows, None)
    if case.existing:
        torch.manual_seed(3)
        loader: Any = DataLoader(data, case.batch, shuffle=case.shuffle, num_workers=case.workers)
        for _ in range(EPOCHS):
            yield iter(loader)
        return
    sampler: Any = DistributedSampler(data, 1, 0, shuffle=case.shuffle, seed=7)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield iter(DataLoader(data, case.batch, sampler=sampler, drop_last=case.drop_last))


def source(case: Case, path: Path) -> Any:
    """The source of a case."""
    data = Rows(case.rows, path)
    if case.existing:
        return flow.data.loader(DataLoader(data, case.batch, shuffle=case.shuffle, num_workers=case.workers))
    return flow.data.loader(
        data, case.batch, shuffle=case.shuffle, seed=7, workers=case.workers, drop_last=case.drop_last
    )


def sourced(case: Case, path: Path) -> Iterator[dict[str, Tensor]]:
    """The batches of all epochs, of a source, or of two where the second resumes."""
    if case.existing:
        torch.manual_seed(3)
    loader = source(case, path)
    yield from loader
    if not case.resumes:
        yield from loader
        return
    for number, batch in enumerate(loader):
        yield batch
        if number + 1 == LEFT:
            break
    state = loader.state_dict()
    torch.manual_seed(99)  # of another process
    again = source(case, path)
    again.load_state_dict(state)
    assert again.epoch == 1
    assert again.position == case.rows + LEFT * case.batch
    yield from again
    assert again.epoch == EPOCHS


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.3)
    return made


def train(case: Case, layout: str, folder: Path) -> str:
    """What differs between the job and the eager step, in words."""
    kept, mine = model(), model()
    eager, optimizer = (torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (kept, mine))
    losses = []
    for epoch in plain(case):
        for batch in epoch:
            loss = F.cross_entropy(kept(batch["x"]), batch["y"])
            loss.backward()
            eager.step()
            eager.zero_grad()
            losses.append(loss.item())

    devices = int(os.environ.get("WORLD_SIZE", "1"))
    pieces = 4 if layout == "pipeline" else 1
    if layout == "pipeline":
        half = devices // 2
        places = flow.placement("cpu", [*range(half)]), flow.placement("cpu", [*range(half, devices)])
        flow.place(mine, {"[01]": places[0], "2": places[1]})

    @flow.global_function(micro_batches=pieces, parallel="tensor" if layout == "tensor" else None)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(mine(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    rank = int(os.environ.get("RANK", "0"))
    found = [step(batch["x"], batch["y"]) for batch in sourced(case, folder / f"{case.name}.{rank}")]
    mean = [float(loss) for loss in found]
    if len(mean) != len(losses):
        return f"{len(mean)} batches; {len(losses)} were expected"
    worst = max(abs(a - b) for a, b in zip(mean, losses, strict=True))
    return f"losses differ by {worst}" if worst > 1e-9 else ""


if __name__ == "__main__":
    layout, folder = sys.argv[1], Path(sys.argv[2])
    wrong = [f"{case.name}: {said}" for case in CASES if (said := train(case, layout, folder))]
    print("\n".join(wrong) or "all equal", flush=True)
    sys.exit(len(wrong) > 0)
