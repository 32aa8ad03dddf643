"""Detect whether a step draws from random generators of Python or NumPy, or seeds them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from actorflow.script_state.sources import generator_state
from actorflow_compiler.substitutes.random_streams import UNSEEDED

__all__ = ["GeneratorWatch"]


class GeneratorWatch:
    """Watches the global generators of ``random`` and ``numpy.random``, and other generators that a step can reach.

    A step may be captured several times, and must find the same states each time.
    """

    def __init__(self, others: Iterable[object]) -> None:
        """Save the states, and seed the global generators with a marker value, so that seeding in a step is noticed."""
        numpys: Any = np.random.mtrand._rand
        self._before = [(one, _saved(one)) for one in (random, numpys, *others)]
        random.seed(UNSEEDED)
        numpys.seed([UNSEEDED >> 32, UNSEEDED & 0xFFFFFFFF])
        self._unseeded = self._states()

    @property
    def moved(self) -> bool:
        """Whether the state of a generator has changed."""
        return self._states() != self._unseeded

    def put_back(self) -> None:
        """Restore the states from before the step."""
        for one, state in self._before:
            if isinstance(one, np.random.Generator):
                one.bit_generator.state = state
            elif isinstance(one, np.random.BitGenerator):
                one.state = state
            elif isinstance(one, np.random.RandomState):
                one.set_state(state)
            else:
                one.setstate(state)

    def _states(self) -> list[object]:
        return [random.getstate() if one is random else generator_state(one) for one, _ in self._before]


def _saved(one: Any) -> Any:
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    if isinstance(one, np.random.BitGenerator):
        return one.state
    return one.get_state(legacy=False) if isinstance(one, np.random.RandomState) else one.getstate()
