"""The number of steps that a graph has trained, which its state dict has under OneFlow's name for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.errors import CallError

__all__ = ["TRAIN_STEP", "TrainSteps"]

TRAIN_STEP = "System-Train-TrainStep"


class TrainSteps:
    """Counts the calls of a graph with an optimizer; with gradient accumulation a call is one step."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> Tensor:
        """The count, int64[1]."""
        return torch.tensor([self.count])

    def load_state_dict(self, state: Any) -> None:
        """Go on from a count.  Raises CallError for something else than one whole number, 0 or more."""
        found = state.tolist() if isinstance(state, Tensor) and not state.is_floating_point() else state
        one = found[0] if isinstance(found, list) and len(found) == 1 else found
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise CallError(
                f"{TRAIN_STEP} is {state!r} in a state; the number of steps was expected: torch.tensor([3])"
            )
        self.count = one
