"""Carry out the collectives of one group of ranks through shared memory, on the compute thread, which never waits.

A collective begins when its actor fires and goes on whenever another rank announces a step.  Between these events the
thread does what else there is to do.  See ``transport/group_memory.py`` for the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.contributions import Contribution
from actorflow.transport.group_memory import GroupMemory, SharedCollective

__all__ = ["GroupProgress"]

FOREVER = 1 << 62  # steps


class GroupProgress:
    """The collectives of one group in one plan, as one rank takes part in them, one after the other.

    ``sides`` are its part in each, by actor, at least one.  For the compute thread, except the constructor and
    ``memory.make``.
    """

    def __init__(self, sides: Mapping[int, Contribution], rank: int) -> None:
        by_id = sorted(sides, key=lambda actor: sides[actor].comm.id)  # the same order on all ranks
        first = sides[by_id[0]].comm
        self.ranks = first.ranks
        self.id = first.id  # of the first collective, by which messages name the group
        self.memory = GroupMemory(self.ranks, rank, [sides[actor] for actor in by_id])
        self.others = tuple(r for r in self.ranks if r != rank)
        self._collectives = {actor: SharedCollective(self.memory, at) for at, actor in enumerate(by_id)}
        self.actors = tuple(self._collectives)
        self._heard = dict.fromkeys(self.others, 0)  # number of steps that each has announced
        self._steps = 0  # of the collectives that have ended
        self._slots = 0  # filled in them
        self._now: SharedCollective | None = None
        self._operands: list[Any] | None = None  # of a collective that has not begun, as memory of others is missing
        self._into: Mapping[int, Tensor] = {}
        self._done = self._read = 0  # steps of this collective whose parts are done, and that have been read
        self.firing: Any = None  # of the caller: what is under way

    def begin(self, actor: int, operands: list[Any], into: Mapping[int, Tensor]) -> None:
        """Start the collective of an actor; the one before has ended.  Inputs must not change until it ends.

        Outputs may be made in the tensors of ``into``, by their numbers.
        """
        assert self._now is None, f"actor {actor} fires while another collective of its group is under way"
        self._now = self._collectives[actor]
        self._operands, self._into = operands, into
        self._done = self._read = 0

    def hear(self, rank: int, step: int) -> None:
        """Note that another rank has announced a step.

        Raises MessageRefused if it is not the next one, or one that this rank has not made possible yet.
        """
        if self._heard.get(rank) != step:
            what = f"step {step} of the collectives over ranks {list(self.ranks)}"
            raise MessageRefused(RefusalReason.SEQUENCE, what, f"step {self._heard.get(rank)}", rank)
        if step > self._steps + self._done + 1:  # it reads what this rank puts in before it goes on, but for one step
            what = f"step {step} of the collectives over ranks {list(self.ranks)}"
            at = self._steps + self._done
            raise MessageRefused(RefusalReason.SLOT, what, f"none behind {at + 1}: this rank has done {at}", rank)
        self._heard[rank] = step + 1

    def advance(self, announce: Callable[[int], object]) -> Sequence[Tensor] | None:
        """Do what can be done now; returns the outputs when the collective has ended, else None.

        ``announce`` is called with the number of each step whose part is done.
        """
        now = self._now
        if now is None or not self.memory.complete:
            return None
        if self._operands is not None:
            now.begin(self._operands, self._slots, self._into)
            self._operands, self._into = None, {}
        ahead = int(self.memory.ahead)
        steps, heard = now.steps, min(self._heard.values(), default=FOREVER)
        while self._read < len(steps):
            at = self._done
            if at < len(steps) and at <= self._read + ahead and steps[at].after <= self._read:
                now.fill(at)
                self._done += 1
                announce(self._steps + at)
            elif self._read < self._done and self._steps + self._read < heard:
                now.read(self._read)
                self._read += 1
            else:
                return None
        self._steps += len(steps)
        self._slots += now.filling
        self._done = self._read = 0
        self._now = None
        return now.end()

    def spare(self) -> None:
        """Write no more into what ``begin`` was given for outputs: nobody wants them."""
        self._into = {}
        if self._now is not None:
            self._now.spare()

    @property
    def placing(self) -> bool:
        """Whether a collective is under way that may have made a part of its outputs; one of a single range has not."""
        return self._now is not None and self._operands is None and self._now.filling > 1

    def waits_for(self) -> tuple[int, ...]:
        """The ranks that have not announced the step that this rank would read; empty if no collective is under way."""
        if self._now is None:
            return ()
        return tuple(r for r in self.others if self._heard[r] <= self._steps + self._read)
