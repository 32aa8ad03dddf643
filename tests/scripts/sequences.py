"""Train on samples of variable length and on packed documents, as a job and eagerly, and print what differs.

    actorflow run tests/scripts/sequences.py --devices 2 -- LAYOUT FOLDER

LAYOUT is data, or pipeline (two stages, each on half of the devices), with fewer cases.  Each rank writes which samples
it has read in a case to FOLDER/CASE.RANK.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import actorflow as flow

WORDS = 30
BUCKETS = (6, 12)
BATCH = 4
EPOCHS = 2
ROWS = 30  # the last batch has two rows: parts of three, flattened with their words, would be cut inside a row
LEFT = 3  # batches of the second epoch behind which it is left, saved and taken up again


@dataclass(frozen=True)
class Bucketed:
    name: str
    workers: int = 0
    lengths: bool = True  # they are given; else samples are read to find them
    collate: bool = False
    resumes: bool = False


CASES = (Bucketed("read", lengths=False), Bucketed("workers", workers=2, collate=True, resumes=True))


class Texts(Dataset[Any]):
    """Samples of variable length; each reading is written to a file."""

    def __init__(self, count: int, path: Path | None) -> None:
        random = np.random.default_rng(count)
        self.sizes = random.integers(1, BUCKETS[-1] + 1, count).tolist()
        self.texts = [random.integers(1, WORDS, size) for size in self.sizes]
        self.path = path

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{index}\n")
        text = self.texts[index]
        labels = [*text[1:].tolist(), -100]  # a list, as tokenizers give them
        return {"input": torch.from_numpy(text), "labels": labels, "weight": torch.tensor([1.0, 2.0, 0.5, 1.5])}


def epoch_of_buckets(
    sizes: Sequence[int], order: Sequence[int], buckets: Sequence[int], batch: int, drop_last: bool = False
) -> Iterator[tuple[int, list[int]]]:
    """The batches of an epoch, in the plainest words: the bucket of each, and its samples."""
    waiting: dict[int, list[int]] = {bucket: [] for bucket in buckets}
    for index in order:
        bucket = min(b for b in buckets if b >= sizes[index])
        waiting[bucket].append(index)
        if len(waiting[bucket]) == batch:
            yield bucket, waiting[bucket]
            waiting[bucket] = []
    for bucket, rest in waiting.items():
        if rest and not drop_last:
            yield bucket, rest


def shuffled(rows: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()  # type: ignore[no-any-return]


def plain_batches(data: Texts) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of all epochs, on one device."""
    for epoch in range(EPOCHS):
        for bucket, rows in epoch_of_buckets(data.sizes, shuffled(len(data), 5, epoch), BUCKETS, BATCH):
            inputs = torch.zeros(len(rows), bucket, dtype=torch.int64)
            labels = torch.full((len(rows), bucket), -100)
            for at, index in enumerate(rows):
                sample = data[index]
                inputs[at, : data.sizes[index]] = sample["input"]
                labels[at, : data.sizes[index]] = torch.tensor(sample["labels"])
            yield inputs, labels


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "input": torch.stack([sample["input"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def source(case: Bucketed, path: Path) -> Any:
    data = Texts(ROWS, path)
    return flow.data.loader(
        data, BATCH, shuffle=True, seed=5, workers=case.workers, buckets=BUCKETS, padding={"labels": -100},
        lengths=data.sizes if case.lengths else None, collate=collate if case.collate else None,
    )  # fmt: skip


def sourced_batches(case: Bucketed, path: Path) -> Iterator[dict[str, Tensor]]:
    """The batches of all epochs, of a source, or of two where the second resumes."""
    loader = source(case, path)
    for _ in range(EPOCHS - case.resumes):
        yield from loader
    if case.resumes:
        for number, batch in enumerate(loader):
            yield batch
            if number + 1 == LEFT:
                break
        again = source(case, path)
        again.load_state_dict(loader.state_dict())
        assert again.position == ROWS + LEFT * BATCH
        yield from again
        assert again.epoch == EPOCHS


class Words(nn.Module):
    """Predicts the next word; with segments, by attention within them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.mixing = nn.Linear(8, 24)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS))
        generator = torch.Generator().manual_seed(1)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.3)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        if positions is not None:
            x = x + self.places(positions)
        if mask is not None:
            q, k, v = (part.unsqueeze(1) for part in self.mixing(x).chunk(3, dim=-1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)
        found: Tensor = self.head(x)
        return found


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def placed(model: nn.Module, layout: str) -> int:
    """Place the stages; the number of pieces of a batch."""
    if layout != "pipeline":
        return 1
    devices = int(os.environ["WORLD_SIZE"])
    first, second = (flow.placement("cpu", [*part]) for part in np.array_split(range(devices), 2))
    flow.place(model, {"words|places|mixing": first, "head": second})
    return 2


def difference(found: list[float], wanted: list[float]) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} batches; {len(wanted)} were expected"
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    return f"losses differ by {worst}" if worst > 1e-9 else ""


def train_bucketed(case: Bucketed, layout: str, path: Path) -> str:
    """What differs between a job on batches of buckets and eager steps on the same."""
    kept, mine = Words(), Words()
    eager, optimizer = (torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (kept, mine))
    wanted = []
    for inputs, labels in plain_batches(Texts(ROWS, None)):
        loss = loss_of(kept(inputs), labels)
        loss.backward()
        eager.step()
        eager.zero_grad()
        wanted.append(loss.item())

    @flow.global_function(micro_batches=placed(mine, layout))
    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(mine(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = [step(batch["input"], batch["labels"]) for batch in sourced_batches(case, path)]
    return difference([float(loss) for loss in found], wanted)


def documents() -> list[Tensor]:
    random = np.random.default_rng(2)
    return [torch.from_numpy(random.integers(1, WORDS, size)) for size in random.integers(0, 15, 40)]


def train_packed(split: bool, layout: str) -> str:
    """What differs between a job on packed rows and eager steps on the documents of a batch, one by one."""
    kept, mine = Words(), Words()
    eager, optimizer = (torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (kept, mine))
    rows = flow.data.packed(documents(), 16, eos=0, split=split)
    order = shuffled(len(rows), 3, 0)
    wanted = []
    for first in range(0, len(rows), BATCH):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in (rows[index] for index in order[first : first + BATCH]):
            for segment in range(int(row["segments"].max()) + 1):
                text = row["tokens"][row["segments"] == segment]
                size = len(text)
                causal = torch.ones(size, size, dtype=torch.bool).tril()
                logits = kept(text[None], torch.arange(size)[None], causal[None, None])[0]
                total = total + F.cross_entropy(logits[:-1], text[1:], reduction="sum")
                count += size - 1
        (total / count).backward()
        eager.step()
        eager.zero_grad()
        wanted.append(total.item() / count)

    @flow.global_function(micro_batches=placed(mine, layout))
    def step(tokens: Tensor, segments: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(mine(tokens, positions, flow.data.segment_mask(segments)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loader = flow.data.loader(rows, BATCH, shuffle=True, seed=3)
    found = [step(b["tokens"], b["segments"], b["positions"], b["targets"]) for b in loader]
    return difference([float(loss) for loss in found], wanted)


if __name__ == "__main__":
    layout, folder = sys.argv[1], Path(sys.argv[2])
    rank = os.environ.get("RANK", "0")
    few = layout == "pipeline"
    cases, splits = (CASES[:1], (False,)) if few else (CASES, (True, False))
    wrong = {case.name: train_bucketed(case, layout, folder / f"{case.name}.{rank}") for case in cases}
    wrong |= {f"packed, split={split}": train_packed(split, layout) for split in splits}
    print("\n".join(f"{name}: {said}" for name, said in wrong.items() if said) or "all equal", flush=True)
    sys.exit(any(wrong.values()))
