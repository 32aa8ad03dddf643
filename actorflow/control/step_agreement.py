"""Agree between ranks that all do the same common steps: each tells rank 0 of its own, and rank 0 all how far all are.

It runs on the gRPC thread.  A rank tells of its steps in batches, some times a second, or at once where another rank
waits for them.  Rank 0 compares batches as they come (``Ledger``), and says how many steps all ranks have done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from actorflow.control import proto as proto
from actorflow.control.drops import NO_DROPS, DropSet, DropTally, ReleasedHere
from actorflow.control.ledger import Ledger, StepDifference, differs
from actorflow.control.message_rules import COUNT, one_of_a_range, refuse
from actorflow.control.step_log import DIGEST, CommonStep, Described, StepBatch, StepLog
from actorflow.support.refusals import RefusalReason
from actorflow_protos import runtime_pb2 as pb

__all__ = ["StepAgreement", "StepListener", "spacing"]

SPACING, FOR_EACH = 0.05, 0.001  # seconds, and for each rank, from one time that a rank tells of its steps to the next


def spacing(world: int) -> float:
    """Seconds between two times that a rank tells of its steps, so that rank 0 hears no more of more ranks."""
    return max(SPACING, FOR_EACH * world)


class StepListener(Protocol):
    """Who is told what becomes of common steps."""

    def steps_agreed(self, call: int, dropped: DropSet) -> None:
        """All ranks have made this call and those before it, and have released the same plans and variables."""

    def steps_over(self) -> None:
        """On rank 0: the scripts of all ranks have come to their ends."""

    def steps_differ(self, rank: int, text: str) -> None:
        """On rank 0: a rank has done something else than another one; the text shows both."""


class StepAgreement:
    """One rank's part in the agreement, and on rank 0 that of all."""

    def __init__(
        self, rank: int, world: int, loop: asyncio.AbstractEventLoop, send: Callable[[int, pb.Item], None],
        send_all: Callable[[pb.Item], None], listener: StepListener,
    ) -> None:  # fmt: skip
        """``send`` and ``send_all`` take what goes to one rank, and from rank 0 to all."""
        self.rank, self.world, self._loop = rank, world, loop
        self.log = StepLog()  # of this rank
        self._send, self._send_all, self._listener = send, send_all, listener
        self._telling = False  # rank 0 will be told of new steps soon
        self._tells: asyncio.TimerHandle | None = None
        self._hurry = 0  # steps that some rank waits for, so that rank 0 is told of them at once
        self._released = ReleasedHere()  # on another rank: all that rank 0 can say to be dropped
        self._ledger = Ledger(world)  # this and what follows are rank 0's
        self._alike = 0  # steps that all ranks have been told to be alike
        self._settles: asyncio.TimerHandle | None = None
        self._wanted: set[int] = set()  # steps of which some rank wants to know when all have done them
        self._hurried: dict[int, int] = {}  # rank → steps of which it was asked to tell at once
        self._difference: StepDifference | None = None
        self._described: dict[int, Described] = {}  # by rank: what the two have done that differ
        self._dropped = DropTally(world)

    # -- every rank ------------------------------------------------------------------------------

    def announce(self, step: CommonStep, dropped: DropSet) -> int:
        """Add a step of this rank, of which rank 0 is told in a while; returns its history.  On any thread."""
        history = self.log.add(step, dropped)
        if not self._telling:
            self._telling = True
            with suppress(RuntimeError):  # the loop is closed: the run is over
                self._loop.call_soon_threadsafe(self._tell_soon)
        return history

    def issue(self, step: CommonStep) -> None:
        """Add a step of this rank, and tell rank 0 at once."""
        self.log.add(step)
        self.tell()

    def tell(self) -> None:
        """Tell rank 0 of this rank's new steps."""
        if self._tells is not None:
            self._tells.cancel()
            self._tells = None
        self._telling = False  # before the steps are taken, so that one which is added meanwhile is told of
        batch = self.log.take()
        if batch is None:
            return
        for _, dropped in batch.dropped:
            self._released.tell(dropped, self.log.told)
        if self.rank == 0:
            self._add(0, batch)
        else:
            self._send(0, proto.steps_to(batch))

    def _tell_soon(self) -> None:
        if self.log.told < self._hurry:
            self.tell()
        elif self._tells is None:
            self._tells = self._loop.call_later(spacing(self.world), self.tell)

    def hurry_up(self, steps: int) -> None:
        """Rank 0 asks this rank to tell of so many steps as soon as it has done them."""
        one_of_a_range("a wait for steps", steps, 1, COUNT)
        self._hurry = max(self._hurry, steps)
        self.tell()

    def are_alike(self, steps: int, dropped: DropSet) -> None:
        """Rank 0 says how many steps all ranks have done, and what all have released."""
        one_of_a_range("the word of alike steps", steps, self.log.forgotten + 1, self.log.told + 1)
        self._released.agree(dropped, steps)
        call = self.log.forget(steps)
        if call >= 0:
            self._listener.steps_agreed(call, dropped)

    def describe(self, step: int) -> None:
        """Rank 0 asks what this rank has done as a step, since another rank has done something else."""
        one_of_a_range("a question about step", step, self.log.forgotten, self.log.told)
        found = self.log.describe(step)
        if found is not None:
            self._send(0, proto.told_to(found))

    def forget(self, dropped: DropSet, steps: int) -> None:
        """Forget drops on which all ranks have agreed by other means, in this rank's first ``steps`` steps."""
        if self.rank == 0:
            self._dropped.forget(dropped)
        else:
            self._released.forget(dropped, steps)

    # -- rank 0 ----------------------------------------------------------------------------------

    @property
    def differ(self) -> bool:
        """Whether two ranks have been found to differ, so that the run is about to end."""
        return self._difference is not None

    def told(self, rank: int) -> int:
        """How many steps a rank has told of."""
        return self._ledger.told(rank)

    def hear(self, rank: int, batch: StepBatch) -> None:
        """Another rank tells of its steps."""
        done = self._ledger.told(rank) + len(batch.digests) // DIGEST
        if self._difference is None and batch.wanted > done:
            refuse(RefusalReason.SEQUENCE, f"a wish to know of {batch.wanted} steps", f"at most {done}: its own")
        self._add(rank, batch)

    def hear_described(self, rank: int, step: Described) -> None:
        """A rank answers what it has done as the step in which it differs."""
        found = self._difference
        if found is None or rank not in (found.first, found.second) or rank in self._described:
            refuse(RefusalReason.SEQUENCE, "an answer about a step", "none: it was not asked")
        self._is_described(rank, step)

    def missing(self, rank: int) -> str:
        """What a rank has not done and another one has, as text; empty where it has done all."""
        found = self._ledger.missing(rank)
        if found is None:
            return ""
        step, other = found
        own = self.log.describe(step)
        if own is None:
            return f"rank {other} has gone further in its script"
        return f"rank 0 {own.text.partition(' [')[0]}, which it has not"  # without what guards it

    def _add(self, rank: int, batch: StepBatch) -> None:
        if self._difference is not None:
            return
        self._difference = self._ledger.add(rank, batch.digests, batch.ended)
        if self._difference is not None:
            for one in (self._difference.first, self._difference.second):
                if one:
                    self._send(one, pb.Item(tell=pb.Tell(step=self._difference.step)))
                else:
                    self._is_described(0, self.log.describe(self._difference.step))
            return
        for call, dropped in batch.dropped:
            self._dropped.report(rank, dropped, call)
        if batch.wanted > self._alike:
            self._wanted.add(batch.wanted)
        if self._wanted or self._ledger.over:
            self._settle()
        elif self._settles is None:
            self._settles = self._loop.call_later(spacing(self.world), self._settle)
        if self._ledger.over:
            self._send_all(pb.Item(farewell=pb.Farewell()))
            self._listener.steps_over()

    def _settle(self) -> None:
        """Tell all ranks which steps all have done; ask for news of those that some rank waits for."""
        if self._settles is not None:
            self._settles.cancel()
            self._settles = None
        alike = self._ledger.alike()
        if alike > self._alike:
            self._alike = alike
            self._wanted = {steps for steps in self._wanted if steps > alike}
            call = self.log.forget(alike)
            agreed = NO_DROPS if call < 0 else self._dropped.agreed(call)
            self._send_all(proto.alike_to(alike, agreed))
            if call >= 0:
                self._listener.steps_agreed(call, agreed)
        if self._wanted:
            self._ask_for(min(self._wanted))

    def _ask_for(self, steps: int) -> None:
        for rank in self._ledger.late(steps):
            if self._hurried.get(rank, 0) >= steps:
                continue
            self._hurried[rank] = steps
            if rank:
                self._send(rank, pb.Item(hurry=pb.Hurry(steps=steps)))
            else:
                    self._loop.call_soon(self.hurry_up, steps)

    def _is_described(self, rank: int, step: Described | None) -> None:
        """End the run when both ranks that differ have said what they have done."""
        if step is None or self._difference is None:
            return
        self._described[rank] = step
        first, second = self._difference.first, self._difference.second
        if first in self._described and second in self._described:
            text = differs(self._difference, self._described[first], self._described[second])
            self._listener.steps_differ(second, text)
