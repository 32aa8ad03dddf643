"""Cases of ``models`` on a real GPU, and their training there without a plan."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from actorflow.devices import Device, make_device
from models import Case, reference

STEPS = 3


def here(rank: int) -> Device:
    """The GPU, for every rank."""
    return make_device(torch.device("cuda"))


def on_gpu(case: Case) -> Case:
    """The case with its model on the GPU, as a script for one device has it."""
    return replace(case, make=lambda: case.make().cuda())


def eagerly(case: Case, pieces: int, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of eager PyTorch there."""
    model = case.model()
    batches = [tuple(t.cuda() for t in batch) for batch in case.batches([16] * steps)]
    scaler = case.scaler() if case.scaler else None
    losses, state = reference(
        model, case.optimizer(model), case.loss, batches, pieces if case.batch_norm else 1, case.clip, scaler
    )
    return losses, {name: value.cpu() for name, value in state.items()}
