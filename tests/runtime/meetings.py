"""Carry out collectives in shared memory among ranks in one process, whose messages arrive in a drawn order."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from actorflow.runtime.group_progress import GroupProgress
from actorflow.transport.contributions import contribution
from actorflow_compiler.plan.plan import Collective, TensorSpec

Part = tuple[Collective, list[Tensor], list[TensorSpec]]  # one rank's, its tensors, and the specs of its outputs


class Meeting:
    """The group of some ranks, each with its parts in the same collectives, which it does one after the other.

    ``order`` draws what happens next: a rank begins its next collective, or hears of one step of another.  ``into`` has
    the tensors that a rank gives for the outputs of each of its collectives.
    """

    def __init__(
        self,
        parts: Mapping[int, Sequence[Part]],
        order: random.Random,
        into: Mapping[int, Sequence[Mapping[int, Tensor]]] | None = None,
    ) -> None:
        self.order = order
        self._into = into or {rank: [{}] * len(of) for rank, of in parts.items()}
        self.parts = parts
        self._begun = dict.fromkeys(parts, 0)
        self.outputs: dict[int, list[list[Tensor]]] = {rank: [] for rank in parts}
        self.progress = {
            rank: GroupProgress({at: contribution(comm, rank, specs) for at, (comm, _, specs) in enumerate(of)}, rank)
            for rank, of in parts.items()
        }
        self.mail: dict[tuple[int, int], deque[int]] = {(a, b): deque() for a in parts for b in parts if a != b}
        self.handed = [
            (rank, to, descriptor)
            for rank, progress in self.progress.items()
            for to, descriptor in progress.memory.make()
        ]
        order.shuffle(self.handed)

    def run(self, stopped: int | None = None) -> dict[int, list[list[Tensor]]]:
        """All outputs by rank, once nothing more can happen; rank ``stopped`` does nothing."""
        begun = self._begun
        while True:
            ready = [r for r in self.parts if r != stopped and begun[r] == len(self.outputs[r]) < len(self.parts[r])]
            heard = [pair for pair, steps in self.mail.items() if steps and pair[1] != stopped]
            if not (ready or heard or self.handed):
                return self.outputs
            drawn = self.order.choice([*ready, *heard, *(["memory"] if self.handed else [])])
            if drawn == "memory":
                source, rank, descriptor = self.handed.pop()
                self.progress[rank].memory.take(source, descriptor, self.progress[source].memory.nbytes)
                os.close(descriptor)
            elif isinstance(drawn, int):
                rank = drawn
                at = begun[rank]
                self.progress[rank].begin(at, list(self.parts[rank][at][1]), self._into[rank][at])
                begun[rank] += 1
            else:
                assert isinstance(drawn, tuple)
                source, rank = drawn
                self.progress[rank].hear(source, self.mail[drawn].popleft())
            if rank != stopped:
                self._advance(rank)

    def _advance(self, rank: int) -> None:
        outputs = self.progress[rank].advance(
            lambda step: [self.mail[rank, r].append(step) for r in self._others(rank)]
        )
        if outputs is not None:
            self.outputs[rank].append(list(outputs))

    def _others(self, rank: int) -> list[int]:
        return [r for r in self.parts if r != rank]
