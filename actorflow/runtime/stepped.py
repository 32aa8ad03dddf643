"""An optimizer whose state plans own goes in; whether it holds what they left there, before each call, comes out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from actorflow.owned import Owned

__all__ = ["Left", "Stepped"]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A tensor of the state of an optimizer that plans step, for as long as the parameter is there."""

    parameter: weakref.ref[Tensor]
    key: str
    owned: Owned


class Left:
    """What was in an optimizer's state when it was last looked through."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._state: Any = optimizer.state
        self._of_each = [*self._state.values()]
        self._values = [*self._all()]

    def is_there(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all is identical, which is soon found."""
        state: Any = optimizer.state
        return (
            state is self._state
            and len(state) == len(self._of_each)
            and all(map(is_, state.values(), self._of_each))
            and sum(map(len, self._of_each)) == len(self._values)
            and all(map(is_, self._all(), self._values))
        )

    def _all(self) -> Iterator[Any]:
        return chain.from_iterable([values.values() for values in self._of_each])
