"""Number the random draws of a trace: each gets a stream, by the state of torch's generator.

Equal states are equal streams.  So whatever saves and restores a generator's state (a checkpoint
that computes again, ``fork_rng``, ``manual_seed``) draws the same numbers again, as in eager PyTorch.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import real_tensors
from actorflow_compiler.custom_ops.random import splitmix64
from actorflow_compiler.values.reads import place_of

__all__ = ["UNSEEDED", "RandomStreams"]

UNSEEDED = 0x6163746F72666C6F  # the seed of generators while a step runs: a number that no script uses


class RandomStreams:
    """Numbers the draws of one trace.

    A draw advances its generator by one real number, so that its state tells where in the sequence
    of draws it is.  Use within ``numbering``.
    """

    def __init__(self) -> None:
        self._seen: dict[int, dict[bytes, int]] = {}  # seed → state → number of the stream

    def next(self, generator: torch.Generator | None) -> tuple[int, int | None]:
        """The stream of a draw, and its seed if the step itself has seeded the default generator.

        Without a seed the stream is drawn anew in every call.  Raises CaptureError for another generator: it would
        neither draw its own numbers in a plan nor go on from where the script has left it.
        """
        if generator is not None and not _is_default(generator):
            raise CaptureError(
                f"{place_of(traceback.extract_stack())}\n  the step draws from a generator of its own, and a plan "
                f"draws neither its numbers nor from where it is; expected: generator= left out, for numbers that "
                f"depend on flow.manual_seed and the call alone, or numbers that are drawn outside and passed as an "
                f"argument"
            )
        generator = torch.default_generator
        with real_tensors():
            seed, state = generator.initial_seed(), generator.get_state().numpy().tobytes()
            torch.rand((), generator=generator, device=generator.device)
        seen = self._seen.setdefault(seed, {})
        stream = seen.setdefault(state, len(seen))
        return stream, None if seed == UNSEEDED else splitmix64(seed) >> 1

    @contextlib.contextmanager
    def numbering(self) -> Iterator[None]:
        """Number the draws in the body; the generator is restored afterwards."""
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(UNSEEDED)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def _is_default(generator: torch.Generator) -> bool:
    """Whether it is torch's default generator.  Ops get another object for it, which shares its state."""
    with real_tensors():
        default, before, state = torch.default_generator, torch.default_generator.get_state(), generator.get_state()
        torch.rand((), generator=generator, device=generator.device)
        moved = not torch.equal(default.get_state(), before)
        generator.set_state(state)
    return moved
