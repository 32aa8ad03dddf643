"""The seeds of jobs' random ops: a number for each call from which its random numbers start, equal on every rank."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from actorflow_compiler.core.torch_internals import real_tensors
from actorflow_compiler.custom_ops.random import splitmix64

__all__ = ["SeedEffect", "CallSeeds", "manual_seed", "record_seed_effect", "call_seeds", "use_generator"]


class CallSeeds:
    """The seed of jobs' random ops, and the number of calls since it was set."""

    def __init__(self) -> None:
        self.seed: int | None = None  # the seed that the script set, or None
        self._calls = 0

    def set(self, seed: int) -> None:
        """Set the seed and start counting calls again."""
        self.seed, self._calls = seed, 0

    @property
    def state(self) -> tuple[int | None, int]:
        """The seed that the script set, or None, and the number of calls since."""
        return self.seed, self._calls

    def swap(self, state: tuple[int | None, int]) -> tuple[int | None, int]:
        """Set the state to one that this method returned before; returns the previous one."""
        before = self.seed, self._calls
        self.seed, self._calls = state
        return before

    def next(self, default: int, device: int = 0) -> float:
        """The number from which the next call's random numbers start: an integer below 2**53.

        ``default`` is the seed if the script has set none.  ``device`` is the number of a device that draws numbers of
        its own; 0 stands for numbers that all devices share.
        """
        start = (
            splitmix64(((default if self.seed is None else self.seed) + splitmix64(device) * (device > 0)) % 2**64)
            >> 11
        )
        self._calls += 1
        return float((start + self._calls - 1) % 2**53)


call_seeds = CallSeeds()  # of this process, like torch's default generator


@dataclass(frozen=True, slots=True)
class SeedEffect:
    """The state in which a step that seeds torch leaves its generators, so that later draws of the script agree.

    Random ops in the step itself move no generator, because calls draw from their own streams.
    """

    state: str  # state of torch's default generator, in base64
    jobs: int | None  # seed of the jobs' random ops, if flow.manual_seed has set it

    def carry_out(self) -> None:
        """Set the generators to this state after a call."""
        state = torch.frombuffer(bytearray(base64.b64decode(self.state)), dtype=torch.uint8)
        torch.default_generator.set_state(state)
        torch.manual_seed(torch.default_generator.initial_seed())  # also seeds the generators of GPUs
        torch.default_generator.set_state(state)
        if self.jobs is not None:
            call_seeds.set(self.jobs)


@contextlib.contextmanager
def record_seed_effect() -> Iterator[list[SeedEffect]]:
    """A context for capturing a step; yields a list that afterwards contains its ``SeedEffect``, if the step seeds.

    The seed of jobs is restored afterwards; the caller must restore torch's generators.
    """
    found: list[SeedEffect] = []
    torch_before, jobs_before = torch.default_generator.initial_seed(), call_seeds.swap((None, 0))
    try:
        yield found
    finally:
        jobs, _ = call_seeds.swap(jobs_before)
    if torch.default_generator.initial_seed() != torch_before:
        with real_tensors():
            state = torch.default_generator.get_state().numpy().tobytes()
        found.append(SeedEffect(base64.b64encode(state).decode(), jobs))


class _ThreadState(threading.local):
    generator: torch.Generator | None = None


_thread = _ThreadState()


@contextlib.contextmanager
def use_generator(generator: torch.Generator) -> Iterator[None]:
    """Let this thread, which is another rank, draw random global tensors from a generator of its own."""
    before = _thread.generator
    _thread.generator = generator
    try:
        yield
    finally:
        _thread.generator = before


def manual_seed(seed: int) -> torch.Generator:
    """Seed torch, like ``torch.manual_seed``, and the random ops of all jobs; returns torch's default generator.

    The random numbers of a job depend on the seed, on the number of calls of jobs since it was set, and on the op.
    They do not depend on the number of devices, the layout or the micro-batches.  Call it on every rank with the same
    seed.  A script that does not call it gets the numbers of torch's seed on the master at the first call of a job.

    >>> flow.manual_seed(0)
    >>> first = step(x)
    >>> flow.manual_seed(0)
    >>> again = step(x)  # drops the same elements
    """
    generator = torch.manual_seed(seed)
    call_seeds.set(generator.initial_seed())
    if _thread.generator is not None:
        _thread.generator.manual_seed(seed)
    return generator
