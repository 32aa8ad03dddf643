"""Loaders whose workers read for several iterations: each says whether what it gave is what torch's loader gives."""

from __future__ import annotations

import copy
import gc
import os
import signal
import warnings
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import actorflow as flow


class Numbers(Dataset[Any]):
    """Sample i is i and what a worker has added; the script's own process is to read none."""

    def __init__(self, deadly: int = -1) -> None:
        self.added: int | None = None
        self.script = os.getpid()
        self.deadly = deadly

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        assert os.getpid() != self.script, "read in the script's process"
        assert get_worker_info().dataset is self
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(float(index)), torch.tensor(self.added or 0)


def opens(_: int) -> None:
    """As a script opens the files of its dataset."""
    info = get_worker_info()
    assert isinstance(info.dataset, Numbers)
    info.dataset.added = info.num_workers


def fails(_: int) -> None:
    """As a script that looks for a file that is not there."""
    raise OSError("no such archive")


def made(**options: Any) -> Any:
    return flow.data.loader(Numbers(), batch_size=8, shuffle=True, seed=3, workers=2, **options)


def order(epoch: int) -> list[Any]:
    found = torch.randperm(22, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
    return [found[:8], found[8:16], found[16:]]


def rows(batches: Any) -> list[Any]:
    return [numbers.tolist() for numbers, _ in batches]


def main() -> None:
    """Print a line for each that holds."""
    warnings.simplefilter("error")

    loader = made()
    first, second = [], []
    for one, other in zip(loader, loader, strict=True):
        first += rows([one])
        second += rows([other])
    assert (first, second) == (order(0), order(1)), (first, second)
    print("two iterations at a time")

    kept = list(loader)
    begun = rows(kept[:1])
    assert rows(loader) == order(3)
    assert begun + rows(kept[1:]) == order(2)
    print("batches of an epoch that has ended")

    nested = iter(loader)
    assert rows([next(nested)]) == order(4)[:1]
    assert rows(loader) == order(5)
    assert rows(nested) == order(4)[1:]
    print("a loop in a loop")

    assert rows(copy.deepcopy(loader)) == order(6)
    assert rows(loader) == order(6)
    print("a copy")

    existing = DataLoader(Numbers(), 8, num_workers=2, worker_init_fn=opens)
    assert [added.tolist() for _, added in flow.data.loader(existing)] == [[2] * 8, [2] * 8, [2] * 6]
    print("a dataset that workers have prepared")

    before = {*psutil.Process().children()}
    loader = made()
    left = rows([next(iter(loader))])  # in the middle of an epoch
    workers = {*psutil.Process().children()} - before
    assert (len(workers), left) == (2, order(0)[:1]), workers
    del loader
    gc.collect()
    alive = psutil.wait_procs(workers, timeout=100)[1]
    assert not alive, alive
    print("workers of a loader that is gone")

    for deadly in (9, 11, 17, 19):
        said = ""
        try:
            rows(flow.data.loader(Numbers(deadly), batch_size=4, workers=3))
        except flow.DataError as error:
            said = str(error)
        assert "ended by SIGKILL" in said, said
        assert f"while it read sample {deadly} (row {deadly} of epoch 0)" in said, said
    print("workers that end")

    existing = DataLoader(Numbers(), 8, num_workers=2, worker_init_fn=fails)
    try:
        rows(flow.data.loader(existing))
    except flow.DataError as error:
        print(error)


if __name__ == "__main__":
    main()
