"""The state of torch's generators while a step is traced goes in; the stream of each draw comes out.

Equal states are equal streams.  So whatever saves and restores a generator's state (a checkpoint
that computes again, ``fork_rng``, ``manual_seed``) draws the same numbers again, as in eager PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from actorflow_compiler.random_ops import mixed
from actorflow_compiler.torch_internals import real_tensors

_AS_CALLED = 0x6163746F72666C6F  # the default generator's seed in a trace: a number that no script seeds with


class Streams:
    """Numbers the draws of one trace.

    A draw advances its generator by one real number, so that its state tells where in the sequence
    of draws it is.  Use within ``following``.
    """

    def __init__(self) -> None:
        self._before: dict[torch.Generator, torch.Tensor] = {}  # generator → state to go back to
        self._seen: dict[tuple[bool, int], dict[bytes, int]] = {}  # (default?, seed) → state → number of the stream

    def next(self, generator: torch.Generator | None) -> tuple[int, int | None]:
        """The stream of a draw, and its seed if the step itself has seeded the default generator.

        Without a seed the stream is drawn anew in every call.  A generator that the step was given
        has streams of its own, which depend on what it was seeded with.
        """
        default = generator is None or generator is torch.default_generator
        generator = torch.default_generator if generator is None else generator
        with real_tensors():
            if generator not in self._before:
                self._before[generator] = generator.get_state()
            seed, state = generator.initial_seed(), generator.get_state().numpy().tobytes()
            torch.rand((), generator=generator, device=generator.device)
        seen = self._seen.setdefault((default, seed), {})
        stream = seen.setdefault(state, len(seen))
        if default:
            return stream, None if seed == _AS_CALLED else mixed(seed) >> 1
        return (mixed(seed) >> 2) + stream, None

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Number draws in the body; leaves every generator as it was."""
        self._before[torch.default_generator] = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_AS_CALLED)
        try:
            yield
        finally:
            for generator, state in self._before.items():
                generator.set_state(state)
