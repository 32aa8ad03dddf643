"""Random ops on global tensors: the same numbers under every layout, each rank drawing only its own part.

Every op takes one number from torch's default generator, or the one that it is given.  The number of an element
depends on that and on its index in the whole tensor: see ``actorflow_compiler.custom_ops.random``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.communicator import CollectiveLabel, EagerCommunicator
from actorflow.eager.global_tensor import GlobalTensor, spec_of, wrap
from actorflow.eager.layout import NOWHERE, Layout, everywhere
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.sbp import B, P, Split
from actorflow_compiler.custom_ops.random import uniform
from actorflow_compiler.plan.region import coordinates, region
from actorflow_compiler.substitutes.random_table import Rule, rule_of, written_out

__all__ = ["LocalNumbers", "check_alike", "draws", "keeps_terms", "numbers_of", "run", "without_terms"]

_AGREE = CollectiveLabel.of("comparison of random number generators")


class LocalNumbers:
    """Draws this rank's part of numbers for the elements of a tensor of one shape, in one layout without terms."""

    def __init__(self, comm: EagerCommunicator, layout: Layout, generator: torch.Generator | None = None) -> None:
        self.comm, self.layout = comm, layout
        self._seed = _next(comm, generator)
        self._stream = 0

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, /) -> Tensor:
        """This rank's part of a tensor of ``shape``."""
        return self.part(tuple(shape), self.layout, dtype)

    def part(self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> Tensor:
        """This rank's part of a tensor in a layout."""
        stream, rank = self._stream, self.comm.rank
        self._stream += 1
        device = self.comm.device(layout.placement)
        if rank not in layout.placement:
            return torch.empty(NOWHERE, dtype=dtype, device=device)
        runs = region(shape, layout.sbp, layout.placement, layout.placement.index(rank))
        has = tuple(tuple((lo, hi - lo) for lo, hi in ranges) or ((0, 0),) for ranges in runs)
        return uniform(shape, has, stream, self._seed, None, None, dtype, device)


class _GlobalNumbers(LocalNumbers):
    """Draws numbers as a global tensor; a tensor of another shape than the layout's is whole on every rank."""

    def __init__(
        self, comm: EagerCommunicator, layout: Layout, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> None:
        super().__init__(comm, layout, generator)
        self._shape = shape

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, /) -> Tensor:
        """A tensor of ``shape``."""
        whole = tuple(shape)
        layout = self.layout if whole == self._shape else everywhere(self.layout.placement)
        local = self.part(whole, layout, dtype)
        return wrap(local, spec_of(self.comm, layout, whole, None, dtype, self.comm.device(layout.placement)))


@functools.cache
def draws(op: Any) -> bool:
    """Whether an op draws random numbers by a rule."""
    return torch.Tag.nondeterministic_seeded in op.tags and rule_of(op) is not None


def run(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a random op on global tensors; returns NotImplemented for an op without a rule.

    Besides drawing numbers, a rule uses ordinary ops, which take global tensors.
    """
    rule: Rule | None = rule_of(op)
    if rule is None:
        return NotImplemented
    given = (*args, *kwargs.values())
    first = next(t for t in given if isinstance(t, GlobalTensor))
    comm, source = first._spec.comm, first._spec.layout
    layout = without_terms(source)

    def draw(by_name: Mapping[str, Any]) -> _GlobalNumbers:
        return _GlobalNumbers(comm, layout, first._spec.shape, by_name.get("generator"))

    return written_out(draw, op, rule, args, kwargs)


def without_terms(layout: Layout) -> Layout:
    """The layout with B for P."""
    return Layout(layout.placement, tuple(s if isinstance(s, Split) else B for s in layout.sbp))


def keeps_terms(layout: Layout, rank: int) -> bool:
    """Whether this device is the one that holds the whole value of a partial sum, while the others hold zeros."""
    at = coordinates(layout.placement, layout.placement.index(rank))
    return not any(entry == P and c for entry, c in zip(layout.sbp, at, strict=True))


def numbers_of(comm: EagerCommunicator, given: torch.Generator | None) -> torch.Generator:
    """The generator that a random op of global tensors draws from: the one it is given, else the default one."""
    return comm.generator or torch.default_generator if given is None else given


def check_alike(comm: EagerCommunicator, number: int) -> None:
    """Compare what the ranks have drawn, at growing intervals; ``number`` is below 2**64.

    Raises CallError if the ranks' generators turn out to be in different states.
    """
    comm.drawn += 1
    if comm.world > 1 and (comm.checks or comm.drawn & (comm.drawn - 1) == 0):
        found = [int.from_bytes(b, "little") for b in comm.gather(_AGREE, comm.all_ranks, number.to_bytes(8, "little"))]
        if len(set(found)) > 1:
            other = next(r for r in comm.all_ranks if found[r] != found[0])
            raise CallError(
                f"the random number generators of rank 0 and rank {other} are in different states, so they would make "
                f"different values of one global tensor; call flow.manual_seed with the same seed on every rank, and "
                f"let what only some ranks draw use a torch.Generator of its own"
            )


def _next(comm: EagerCommunicator, given: torch.Generator | None) -> float:
    """The seed number of the next random op, drawn from its generator, so that it is equal on all ranks.

    So saving and restoring a generator's state (checkpoints, ``fork_rng``, ``torch.manual_seed``) works as for plain
    tensors.  Raises CallError if the ranks' generators turn out to be in different states.
    """
    generator = numbers_of(comm, given)
    number = comm.last_drawn = int(torch.randint(2**53, (), generator=generator, device=generator.device))
    check_alike(comm, number)
    return float(number)
