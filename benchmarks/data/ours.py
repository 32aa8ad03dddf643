"""One rank of actorflow: data.py starts it with ``actorflow run``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from decoding import JpegFiles, Setting, SmallImages
from torch import Tensor, nn
from turns import Notes, Steps, take_turns

import actorflow as flow
from actorflow.session.process import current

Step = Callable[[Tensor, Tensor], Tensor]


def step_of(model: nn.Module, lr: float) -> Step:
    """The training step of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    @flow.global_function(type="train")
    def train_step(images: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def wait() -> None:
    """Wait for all that was called."""
    worker = current().worker
    assert worker is not None
    worker.wait_all()  # a loss is there before the optimizer is done


def jpeg(setting: Setting) -> Steps:
    """Whole epochs over the JPEG files."""
    dataset = JpegFiles(setting, "ours", int(os.environ["RANK"]))
    loader = flow.data.loader(dataset, setting.batch, shuffle=True, workers=setting.workers)
    train_step = step_of(setting.model(), setting.lr)

    def epochs(count: int) -> float:
        for _ in range(count):
            for images, targets in loader:
                loss = train_step(images, targets)
        wait()
        return float(loss)

    return epochs


def source(setting: Setting) -> Steps:
    """Steps with batches of a source."""
    loader = flow.data.loader(SmallImages(setting), setting.batch, workers=setting.workers)
    return stepping(setting, loader.repeat())


def memory(setting: Setting) -> Steps:
    """The same steps with the same batches, which are in memory."""
    images, targets = SmallImages(setting).whole()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from zip(images.split(setting.batch), targets.split(setting.batch), strict=True)

    return stepping(setting, batches())


def stepping(setting: Setting, batches: Iterator[tuple[Tensor, Tensor]]) -> Steps:
    """Steps of the larger model."""
    train_step = step_of(setting.large_model(), setting.lr)

    def steps(count: int) -> float:
        for _ in range(count):
            loss = train_step(*next(batches))
        wait()
        return float(loss)

    return steps


def contender(name: str, setting: Setting) -> tuple[Steps, Notes]:
    """What takes the turns of a contender."""
    return {"jpeg": jpeg, "source": source, "memory": memory}[name](setting), dict


if __name__ == "__main__":
    torch.set_num_threads(1)
    setting = Setting.from_json(sys.argv[2])
    take_turns(sys.argv[1], int(os.environ["RANK"]), lambda name: contender(name, setting))
