"""The GPT that the parts train on a device, with its batches and its step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT
from gpus.tell import tell

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes."""

    kind: str
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int

    def model(self, layers: int | None = None) -> nn.Module:
        """A new model on the device; the same each time."""
        torch.manual_seed(0)
        return GPT(layers or self.layers, self.width, self.heads, self.context, self.vocabulary).to(self.kind)

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Random tokens and targets, in the memory of the host."""
        random = torch.Generator().manual_seed(1)
        shape = (self.batch, self.context)
        return [
            tuple(torch.randint(self.vocabulary, shape, generator=random) for _ in range(2))  # type: ignore[misc]
            for _ in range(count)
        ]

    def step(self, model: nn.Module, mode: str = "", fused: bool | None = None) -> Step:
        """A training step in bfloat16, as a script for one device has it; with a ``mode``, under ``torch.compile``."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(self.kind, torch.bfloat16):
                return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

        run = torch.compile(loss_of, mode=mode) if mode else loss_of

        def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = run(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train_step


def setting(kind: str) -> Setting:
    """Half of GPT-2 medium's layers on a GPU, about 200M parameters, as long as others compile; a toy on the CPU."""
    if kind == "cuda":
        return Setting("cuda", 12, 1024, 16, 1024, 8, 50304)
    return Setting("cpu", 2, 64, 4, 64, 4, 256)


def synchronize(kind: str) -> None:
    """Wait until the device has done all that it was given."""
    if kind == "cuda":
        torch.cuda.synchronize()


def settle(kind: str) -> None:
    """Wait until every call of every job is done, and the device with it."""
    from actorflow.session.process import current

    worker = current().worker
    assert worker is not None
    worker.wait_all()
    synchronize(kind)


def seconds(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """How long it takes until ``wait`` returns."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


__all__ = ["Setting", "Step", "seconds", "setting", "settle", "synchronize", "tell"]
