"""The seeds of jobs' random ops: for each call the number that they start from, equal on every rank."""

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
    """The seed of jobs' random ops, and how many calls there were since it was set."""

    def __init__(self) -> None:
        self.seed: int | None = None  # as the script set it
        self._calls = 0

    def set(self, seed: int) -> None:
        """Start anew."""
        self.seed, self._calls = seed, 0

    def swap(self, state: tuple[int | None, int]) -> tuple[int | None, int]:
        """Set the state to one that this method returned before; returns the previous one."""
        before = self.seed, self._calls
        self.seed, self._calls = state
        return before

    def next(self, default: int, device: int = 0) -> float:
        """The number of the next call: whole, below 2**53; ``default`` is the seed where the script has set none.

        Where devices draw numbers of their own, ``device`` is one's number; 0 draws what all draw together.
        """
        start = (
            splitmix64(((default if self.seed is None else self.seed) + splitmix64(device) * (device > 0)) % 2**64)
            >> 11
        )
        self._calls += 1
        return float((start + self._calls - 1) % 2**53)


call_seeds = CallSeeds()  # of this process, as torch's default generator is


@dataclass(frozen=True, slots=True)
class SeedEffect:
    """How a step that seeds torch leaves its generators: what the script draws afterwards depends on it.

    What the step itself draws moves no generator, as calls draw from streams of their own.
    """

    state: str  # of torch's default generator, in base64
    jobs: int | None  # the seed of the random ops of jobs, where flow.manual_seed has set it

    def carry_out(self) -> None:
        """Set the generators to this state after a call."""
        state = torch.frombuffer(bytearray(base64.b64decode(self.state)), dtype=torch.uint8)
        torch.default_generator.set_state(state)
        torch.manual_seed(torch.default_generator.initial_seed())  # which seeds the generators of GPUs, too
        torch.default_generator.set_state(state)
        if self.jobs is not None:
            call_seeds.set(self.jobs)


@contextlib.contextmanager
def record_seed_effect() -> Iterator[list[SeedEffect]]:
    """Capture a step in this context: yields a list that afterwards has its ``SeedEffect``, if it seeds.

    The random numbers of jobs are then as they were; torch's are the caller's to put back.
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
    """Let this thread, as another rank, draw its global tensors from a generator of its own."""
    before = _thread.generator
    _thread.generator = generator
    try:
        yield
    finally:
        _thread.generator = before


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
    call_seeds.set(generator.initial_seed())
    if _thread.generator is not None:
        _thread.generator.manual_seed(seed)
    return generator
