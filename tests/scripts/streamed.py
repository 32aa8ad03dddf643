"""Train with batches of streams or of shards, as a job and eagerly, and print a line for each case that differs.

    actorflow run tests/scripts/streamed.py --devices 4 -- GROUP LAYOUT FOLDER [FROM]

GROUP is streams, shards or shares; LAYOUT is data, micro (data parallel in micro-batches), tensor or pipeline (two
stages, each on half of the devices).  In the middle of the second epoch the training is saved to FOLDER/LAYOUT.CASE;
with FROM, the name of a layout, it begins with what was saved there.  Each rank writes which batches of which shard it
has read to FOLDER/LAYOUT.CASE.RANK.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import actorflow as flow

EPOCHS = 3
LEFT = 2  # batches of the second epoch behind which the training is saved
ROWS = 8  # of a batch
SHARDS = 4

Log = Callable[[str], object]


def rows(epoch: int, part: int = 0, parts: int = 1, count: int = 44) -> Iterator[tuple[Tensor, int]]:
    """Every ``parts``-th row of an epoch, from row ``part`` on."""
    generator = torch.Generator().manual_seed(epoch)
    x = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    for row in range(part, count, parts):
        yield x[row], int(x[row].sum() > 0) + row % 3


class RowStream(IterableDataset[Any]):
    """Rows in the order of an epoch, which it is told; workers take turns."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        return rows(self.epoch, *(worker.id, worker.num_workers) if worker else (0, 1))


class RankedStream(RowStream):
    """Rows of which each rank gets a share, as libraries do by themselves when they are iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return rows(self.epoch, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class StatefulBatches:
    """Batches of rows, with a state: that of the loader, or (Grain) of its iterator."""

    def __init__(self, of_iterator: bool = False, part: int = 0, parts: int = 1, size: int = ROWS) -> None:
        self.part, self.parts, self.size = part, parts, size
        self.state = {"epoch": -1, "batch": 0}
        self.loaded: dict[str, int] | None = None
        self.read: list[int] = []
        if not of_iterator:
            self.state_dict = lambda: dict(self.state)
            self.load_state_dict = self.load

    def load(self, state: dict[str, int]) -> None:
        self.loaded = dict(state)

    def __iter__(self) -> Iterator[Any]:
        self.state = self.loaded or {"epoch": self.state["epoch"] + 1, "batch": 0}
        self.loaded = None
        return StatefulIteration(self)


class StatefulIteration(Iterator[Any]):
    def __init__(self, of: StatefulBatches) -> None:
        self.of = of
        if not hasattr(of, "state_dict"):
            self.get_state = lambda: dict(self.of.state)
            self.set_state = self.of.state.update

    def __next__(self) -> Any:
        of, state = self.of, self.of.state
        taken = [*rows(state["epoch"], of.part, of.parts)][state["batch"] * of.size :][: of.size]
        if not taken:
            raise StopIteration
        of.read.append(state["batch"])
        state["batch"] += 1
        x, y = zip(*taken, strict=True)
        return {"x": torch.stack(x).numpy(), "y": np.array(y)}


def batches_of_rows(epoch: int) -> Iterator[dict[str, Tensor]]:
    for x, y in DataLoader([*rows(epoch)], ROWS):  # type: ignore[arg-type]
        yield {"x": x, "y": y}


def in_dictionaries(samples: list[Any]) -> dict[str, Tensor]:
    x, y = torch.utils.data.default_collate(samples)
    return {"x": x, "y": y}


def batches_of_workers(epoch: int) -> Iterator[dict[str, Tensor]]:
    stream = RowStream()
    stream.set_epoch(epoch)
    return iter(DataLoader(stream, ROWS, num_workers=2, collate_fn=in_dictionaries))


def shuffled() -> DataLoader[Any]:
    """A loader without batch_size that shuffles by its own generator."""
    data = [*batches_of_rows(0)]
    return DataLoader(data, None, shuffle=True, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]


def shuffles() -> Callable[[int], Iterator[dict[str, Tensor]]]:
    loader = shuffled()
    return lambda epoch: iter(loader)


# -- shards ----------------------------------------------------------------------------------------------


def of_shard(shard: int, epoch: int, parts: int = SHARDS) -> list[dict[str, Tensor]]:
    """The batches of two rows of a shard, of which a last short one is left out."""
    loader = DataLoader([*rows(epoch, shard, parts)], ROWS // parts, drop_last=True)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return [{"x": x, "y": y} for x, y in loader]


def joined(epoch: int, parts: int = SHARDS) -> Iterator[dict[str, Tensor]]:
    for some in zip(*(of_shard(shard, epoch, parts) for shard in range(parts)), strict=True):
        yield {key: torch.cat([batch[key] for batch in some]) for key in ("x", "y")}


class Shard:
    """The batches of a shard, each told when it is read."""

    def __init__(self, shard: int, epoch: int, start: int, log: Log) -> None:
        self.shard, self.epoch, self.start, self.log = shard, epoch, start, log

    def __iter__(self) -> Iterator[Any]:
        for number, batch in [*enumerate(of_shard(self.shard, self.epoch))][self.start :]:
            self.log(f"{self.epoch} {self.shard} {number}")
            yield batch


def cases(group: str, log: Log) -> dict[str, tuple[Any, Callable[[int], Iterator[dict[str, Tensor]]]]]:
    """By name, the source and what it should give in an epoch."""
    if group == "streams":
        return {
            "samples": (flow.data.loader(RowStream(), ROWS, collate=in_dictionaries), batches_of_rows),
            "ranked": (flow.data.loader(RankedStream(), ROWS, collate=in_dictionaries), batches_of_rows),
            "workers": (flow.data.loader(RowStream(), ROWS, workers=2, collate=in_dictionaries), batches_of_workers),
            "loader": (
                flow.data.loader(DataLoader(RowStream(), ROWS, collate_fn=in_dictionaries)), batches_of_rows,
            ),
            "shuffled": (flow.data.loader(shuffled()), shuffles()),
            "stateful": (flow.data.loader(StatefulBatches()), batches_of_rows),
            "iterator": (flow.data.loader(StatefulBatches(of_iterator=True)), batches_of_rows),
        }  # fmt: skip
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if group == "shares":
        share = StatefulBatches(part=rank, parts=world, size=ROWS // world)
        batches = 44 // ROWS  # a last short one is left out
        return {"share": (flow.data.sharded(share, batches=batches), lambda epoch: joined(epoch, world))}

    class Stated(StatefulBatches):
        def set_epoch(self, epoch: int) -> None:
            self.state["epoch"] = epoch - 1

        def __len__(self) -> int:
            return 5

    return {
        "passed": (
            flow.data.sharded(lambda shard, shards, epoch: Shard(shard, epoch, 0, log), shards=SHARDS), joined,
        ),
        "started": (
            flow.data.sharded(
                lambda shard, shards, epoch, start: Shard(shard, epoch, start, log), shards=SHARDS, batches=5
            ),
            joined,
        ),
        "stated": (
            flow.data.sharded(lambda shard, shards: Stated(part=shard, parts=shards, size=2), SHARDS, batches=5), joined
        ),
    }  # fmt: skip


# -- training --------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.3)
    return made


def eagerly(given: Callable[[int], Iterator[dict[str, Tensor]]]) -> list[float]:
    kept = model()
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for epoch in range(EPOCHS):
        for batch in given(epoch):
            loss = F.cross_entropy(kept(torch.as_tensor(batch["x"])), torch.as_tensor(batch["y"]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def train(name: str, source: Any, wanted: list[float], layout: str, folder: Path, begin: str) -> str:
    """What differs between the job and the eager steps, in words."""
    mine = model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5, momentum=0.9)
    if layout == "pipeline":
        devices = int(os.environ["WORLD_SIZE"])
        half = devices // 2
        places = flow.placement("cpu", [*range(half)]), flow.placement("cpu", [*range(half, devices)])
        flow.place(mine, {"[01]": places[0], "2": places[1]})

    @flow.global_function(
        micro_batches=2 if layout in ("pipeline", "micro") else 1, parallel="tensor" if layout == "tensor" else None
    )
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(mine(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    objects: dict[str, Any] = {"model": mine, "optimizer": optimizer, "source": source}
    if begin:
        flow.checkpoint.load(folder / f"{begin}.{name}", **objects)
        wanted = wanted[source.position :]
    found = []
    for epoch in source.epochs(EPOCHS):
        for number, batch in enumerate(source):
            found.append(step(batch["x"], batch["y"]))
            if not begin and epoch == 1 and number + 1 == LEFT:
                flow.checkpoint.save(folder / f"{layout}.{name}", **objects)
    mean = [float(loss) for loss in found]
    if len(mean) != len(wanted):
        return f"{len(mean)} batches; {len(wanted)} were expected"
    worst = max(abs(a - b) for a, b in zip(mean, wanted, strict=True))
    return f"losses differ by {worst}: {mean} {wanted}" if worst > 1e-9 else ""


def main(group: str, layout: str, folder: Path, begin: str = "") -> int:
    wrong, rank = [], os.environ.get("RANK", "0")
    told: list[str] = []
    for name, (source, given) in cases(group, told.append).items():
        wanted = eagerly(given)
        told.clear()
        if said := train(name, source, wanted, layout, folder, begin):
            wrong.append(f"{name}: {said}")
        (folder / f"{layout}.{name}.{rank}").write_text("\n".join(told))
    print("\n".join(wrong) or "all equal", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
