"""Number the random draws of a trace: the state of torch's generator decides the stream of each draw.

Equal states give equal streams.  So code that saves and restores a generator's state (recomputation in
a checkpoint, ``fork_rng``, ``manual_seed``) draws the same numbers again, as in eager PyTorch.
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

    A draw advances its generator by one real number, so that its state identifies the position
    in the sequence of draws.  Use within ``numbering``.
    """

    def __init__(self) -> None:
        self._seen: dict[int, dict[bytes, int]] = {}  # seed → state → number of the stream

    def next(self, generator: torch.Generator | None) -> tuple[int, int | None]:
        """The stream of a draw, and its seed if the step itself has seeded the default generator.

        Without a seed, the stream gives new numbers in every call.  Raises CaptureError for another generator: a plan
        could neither draw that generator's numbers nor continue from its state.
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
        """Number the draws in the body; restores the generator afterwards."""
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
