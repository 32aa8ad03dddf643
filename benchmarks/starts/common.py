"""What both scripts of ``benchmarks/start.py`` share: the model, the rows, and how they say that the step has ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, draw_batch

WIDTH, HEADS, CONTEXT, BATCH = 256, 4, 64, 8
LAYERS = "START_LAYERS"  # the variable in which the layers are given
LINE = "the first step: "


def model_of_gpt() -> GPT:
    """A GPT of as many layers as the variable says."""
    return GPT(int(os.environ[LAYERS]), WIDTH, HEADS, CONTEXT)


def rows(batch: int, context: int) -> tuple[Tensor, Tensor]:
    """A batch of bytes, and of those that come next: two int64 tensors of shape (batch, context)."""
    text = torch.arange(100_000) % 251
    return draw_batch(text.to(torch.uint8), batch, context, torch.Generator().manual_seed(0))


def end_of_step(loss: float) -> None:
    """Say when the step has ended, and what its loss is."""
    print(LINE + json.dumps([time.time(), loss]), flush=True)
