"""A seed goes in; for each call of a job, the number that its random ops start from comes out, equal on every rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from actorflow_compiler.random_ops import mixed

__all__ = ["Seeds", "manual_seed", "seeds", "use"]


class Seeds:
    """Counts the calls since the seed was set."""

    def __init__(self) -> None:
        self.seed: int | None = None  # as the script set it
        self._calls = 0

    def set(self, seed: int) -> None:
        """Start anew."""
        self.seed, self._calls = seed, 0

    def next(self, default: int, device: int = 0) -> float:
        """The number of the next call: whole, below 2**53; ``default`` is the seed where the script has set none.

        Where devices draw numbers of their own, ``device`` is one's number; 0 draws what all draw together.
        """
        start = mixed(((default if self.seed is None else self.seed) + mixed(device) * (device > 0)) % 2**64) >> 11
        self._calls += 1
        return float((start + self._calls - 1) % 2**53)


seeds = Seeds()  # of this process, as torch's default generator is


class _Here(threading.local):
    generator: torch.Generator | None = None


_here = _Here()


@contextlib.contextmanager
def use(generator: torch.Generator) -> Iterator[None]:
    """Let this thread be another rank in the body, which draws its global tensors from a generator of its own."""
    before = _here.generator
    _here.generator = generator
    try:
        yield
    finally:
        _here.generator = before


def manual_seed(seed: int) -> torch.Generator:
    """Seed torch, as ``torch.manual_seed`` does, and the random ops of all jobs; returns torch's default generator.

    The random numbers of a job depend on the seed, on how many calls of jobs there were since it was
    set, and on the op; not on the number of devices, the layout or the micro-batches.  Call it on
    every rank with the same seed.  A script that does not gets the numbers of the seed that torch has
    on the master when the first job is called.

    >>> flow.manual_seed(0)
    >>> first = step(x)
    >>> flow.manual_seed(0)
    >>> again = step(x)  # drops the same elements
    """
    generator = torch.manual_seed(seed)
    seeds.set(generator.initial_seed())
    if _here.generator is not None:
        _here.generator.manual_seed(seed)
    return generator
