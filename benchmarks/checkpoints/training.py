"""The training of all sides of checkpoint.py, and how a rank steps, saves and loads when the referee says so."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pipelines"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from resident import memory, start_peak_anew

from gpt import GPT, draw_batch, stdlib_bytes

__all__ = ["GPT", "Loaded", "Setting", "Stepped", "Trainer", "loss_of", "serve", "start_peak_anew"]

HEAD = 64  # the width of an attention head


@dataclass(frozen=True, slots=True)
class Setting:
    """What every side of one run has in common."""

    parameters: int  # about so many
    ranks: int = 4
    batch: int = 4  # over all ranks
    context: int = 32
    lr: float = 1e-4

    @property
    def width(self) -> int:
        """Of the model: of so many parameters, if it is about 43 times as wide as it has layers, as GPT-2 medium is."""
        return max(HEAD, round((43 * self.parameters / 12) ** (1 / 3) / HEAD) * HEAD)

    @property
    def layers(self) -> int:
        """Of the model."""
        return max(1, round(self.parameters / (12 * self.width**2)))

    def to_json(self) -> str:
        """For the command line of a side's processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """What ``to_json`` wrote."""
        return cls(**json.loads(text))

    def model(self) -> GPT:
        """A new model."""
        torch.manual_seed(0)
        return GPT(self.layers, self.width, self.width // HEAD, self.context)

    def parameters_of_model(self) -> int:
        """How many it really has."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())

    def batch_of(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step, int64[batch, context] each, for all ranks together."""
        return draw_batch(stdlib_bytes(), self.batch, self.context, torch.Generator().manual_seed(step))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy: float32[..., vocabulary], int64[...] → float32[]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer(Protocol):
    """One rank of a side."""

    def step(self, number: int) -> float:
        """Take a training step, and wait for its end; the loss."""

    def save(self, how: str, path: str) -> None:
        """Begin to save, in one of the side's ways; later steps do not change what is saved."""

    def saved(self) -> bool:
        """Whether this rank knows no more work of the save."""

    def finish(self) -> None:
        """Return when the checkpoint is complete, on any rank; raises if it could not be written."""

    def load(self, how: str, path: str) -> None:
        """In a process that has taken no step: load what was saved so; with an empty path, begin with new values."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a rank says of a step, and of the save that was called before it or is under way."""

    loss: float
    cpu: float  # seconds of this process
    peak: int  # bytes of resident memory, since the peak was last started anew
    blocked: float  # seconds until the call of save returned
    saved: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank says of loading, and of the first step after it."""

    loss: float
    load: float  # seconds until the call of load returned
    before: int  # bytes of resident memory before it
    peak: int  # … and at most, until the end of the step


def serve(address: str, rank: int, trainer: Trainer) -> None:
    """Do what the referee at ``address`` says, until it says goodbye."""
    with Client(address) as referee:
        referee.send(rank)
        while True:
            what, *arguments = referee.recv()
            if what == "end":
                return
            if what == "pid":
                referee.send(os.getpid())
            elif what == "step":
                referee.send(_step(trainer, *arguments))
            elif what == "finish":
                trainer.finish()
                referee.send(memory("VmHWM"))
            else:
                referee.send(_load(trainer, *arguments))


def _step(trainer: Trainer, number: int, how: str, path: str, anew: bool) -> Stepped:
    """Take a step, and with ``how`` begin to save before it; ``anew``: the peak of memory starts here."""
    if anew:
        start_peak_anew()
    used, start = time.process_time(), time.perf_counter()
    if how:
        trainer.save(how, path)
    blocked = time.perf_counter() - start
    loss = trainer.step(number)
    return Stepped(loss, time.process_time() - used, memory("VmHWM"), blocked, trainer.saved())


def _load(trainer: Trainer, number: int, how: str, path: str) -> Loaded:
    """Load, and take the step of this number."""
    start_peak_anew()
    before, start = memory("VmRSS"), time.perf_counter()
    trainer.load(how, path)
    load = time.perf_counter() - start
    return Loaded(trainer.step(number), load, before, memory("VmHWM"))
