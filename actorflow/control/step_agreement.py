"""Agree between ranks that all do the same common steps, over the tree of ranks, and tell all how far all are.

It runs on the gRPC thread.  A rank compares its own steps with those that the ranks next below it tell of
(``Ledger``), and tells the rank above it of those that are alike in all of its subtree: in batches, some times a
second, or at once where some rank waits for them.  What comes to rank 0 all ranks have done, and it tells all so.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from actorflow.control import proto as proto
from actorflow.control.drops import NO_DROPS, DropSet, DropTally, ReleasedHere
from actorflow.control.ledger import Ledger, StepDifference, differs
from actorflow.control.message_rules import COUNT, one_of_a_range, refuse
from actorflow.control.step_log import DIGEST, CommonStep, Described, StepBatch, StepLog
from actorflow.control.tree_links import TreeLinks
from actorflow.support.refusals import RefusalReason
from actorflow_protos import runtime_pb2 as pb

__all__ = ["SPACING", "StepAgreement", "StepListener"]

SPACING = 0.05  # seconds from one time that a rank tells of steps to the next


class StepListener(Protocol):
    """Who is told what becomes of common steps."""

    def steps_agreed(self, call: int, dropped: DropSet) -> None:
        """All ranks have made this call and those before it, and have released the same plans and variables."""

    def steps_over(self) -> None:
        """On rank 0: the scripts of all ranks have come to their ends."""

    def steps_differ(self, rank: int, text: str) -> None:
        """A rank at or below this one has done something else than another one; the text shows both."""


class StepAgreement:
    """One rank's part in the agreement."""

    def __init__(self, links: TreeLinks, loop: asyncio.AbstractEventLoop, listener: StepListener) -> None:
        self.rank, self._tree, self._loop = links.tree.rank, links.tree, loop
        self.log = StepLog()  # of this rank
        self._links, self._listener = links, listener
        members = (self.rank, *self._tree.children)
        self._ledger = Ledger(members)
        self._dropped = DropTally(members)
        self._telling = False  # new steps of this rank will be counted soon
        self._tells: asyncio.TimerHandle | None = None
        self._settles: asyncio.TimerHandle | None = None
        self._alike = 0  # steps of the whole subtree that the rank above has been told of; on rank 0, all ranks
        self._hurry = 0  # steps that the rank above waits for, so that it is told of them at once
        self._wanted: set[int] = set()  # steps of which some rank below wants to know when all have done them
        self._asked = 0  # the most of them that the rank above has been told of
        self._hurried: dict[int, int] = {}  # rank next below → steps of which it was asked to tell at once
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []  # for steps that the whole subtree has done
        self._released = ReleasedHere()  # all that rank 0 can say to be dropped
        self._said_over = False  # rank 0 has told all that the scripts of all have ended
        self._difference: StepDifference | None = None
        self._described: dict[int, Described] = {}  # by rank: what the two have done that differ

    # -- this rank's steps -----------------------------------------------------------------------

    def announce(self, step: CommonStep, dropped: DropSet) -> int:
        """Add a step of this rank, of which others are told in a while; returns its history.  On any thread."""
        history = self.log.add(step, dropped)
        if not self._telling:
            self._telling = True
            with suppress(RuntimeError):  # the loop is closed: the run is over
                self._loop.call_soon_threadsafe(self._tell_soon)
        return history

    def issue(self, step: CommonStep) -> None:
        """Add a step of this rank, and tell of it at once."""
        self.log.add(step)
        self.tell()

    def tell(self) -> None:
        """Count this rank's new steps, and tell of them."""
        if self._tells is not None:
            self._tells.cancel()
            self._tells = None
        self._telling = False  # before the steps are taken, so that one which is added meanwhile is told of
        batch = self.log.take()
        if batch is None:
            return
        if self.rank:
            for _, dropped in batch.dropped:
                self._released.tell(dropped, self.log.told)
        self._add(self.rank, batch)

    def _tell_soon(self) -> None:
        if self.log.told < self._hurry:
            self.tell()
        elif self._tells is None:
            self._tells = self._loop.call_later(SPACING, self.tell)

    async def until_alike(self, steps: int) -> None:
        """On rank 0: wait until all ranks are known to have done so many steps, the same ones."""
        if self._ledger.alike >= steps:
            return
        waiter = self._loop.create_future()
        self._waiters.append((steps, waiter))
        self._wanted.add(steps)
        self._settle()
        await waiter

    # -- what the rank above says ----------------------------------------------------------------

    def hurry_up(self, steps: int) -> None:
        """The rank above asks to be told of so many steps as soon as all ranks from here on have done them."""
        one_of_a_range("a wait for steps", steps, 1, COUNT)
        self._hurry = max(self._hurry, steps)
        self.tell()
        self._settle()

    def are_alike(self, steps: int, dropped: DropSet) -> None:
        """Rank 0 says how many steps all ranks have done, and what all have released."""
        one_of_a_range("the word of alike steps", steps, self.log.forgotten + 1, self._alike + 1)
        self._released.agree(dropped, steps)
        self._links.down(proto.alike_to(steps, dropped))
        call = self.log.forget(steps)
        if call >= 0:
            self._listener.steps_agreed(call, dropped)

    def describe(self, step: int) -> None:
        """The rank above asks what this rank has done as a step, since another rank has done something else."""
        one_of_a_range("a question about step", step, self.log.forgotten, self.log.told)
        found = self.log.describe(step)
        if found is not None:
            self._links.up(proto.told_to(found))

    def forget(self, dropped: DropSet, steps: int) -> None:
        """Forget drops on which all ranks have agreed by other means, in this rank's first ``steps`` steps."""
        self._dropped.forget(dropped, self.log.last_call(steps))
        if self.rank:
            self._released.forget(dropped, steps)

    # -- what the ranks below say ----------------------------------------------------------------

    @property
    def differ(self) -> bool:
        """Whether two ranks have been found to differ, so that the run is about to end."""
        return self._difference is not None

    def told(self, rank: int) -> int:
        """How many steps a rank next below has told of, which all that are below it have done."""
        return self._ledger.told(rank)

    def hear(self, rank: int, batch: StepBatch) -> None:
        """A rank next below tells of the steps of its subtree."""
        done = self._ledger.told(rank) + len(batch.digests) // DIGEST
        if self._difference is None and self._tree.is_leaf(rank) and batch.wanted > done:
            refuse(RefusalReason.SEQUENCE, f"a wish to know of {batch.wanted} steps", f"at most {done}: its own")
        one_of_a_range("a wish to know of steps", batch.wanted, 0, COUNT)
        self._add(rank, batch)

    def hear_described(self, rank: int, step: Described) -> None:
        """A rank answers what it has done as the step in which it differs."""
        found = self._difference
        if found is None or rank not in (found.first, found.second) or rank in self._described:
            refuse(RefusalReason.SEQUENCE, "an answer about a step", "none: it was not asked")
        self._is_described(rank, step)

    def missing(self, rank: int) -> str:
        """What a rank next below has not done and this or another one there has, as text; else empty."""
        found = self._ledger.missing(rank)
        if found is None:
            return ""
        step, other = found
        own = self.log.describe(step)
        if own is None:
            return f"rank {other} has gone further in its script"
        return f"rank {self.rank} {own.text.partition(' [')[0]}, which it has not"  # without what guards it

    # -- both ------------------------------------------------------------------------------------

    def _add(self, rank: int, batch: StepBatch) -> None:
        if self._difference is not None:
            return
        self._difference = self._ledger.add(rank, batch.digests, batch.ended)
        if self._difference is not None:
            for one in (self._difference.first, self._difference.second):
                if one != self.rank:
                    self._links.put(one, pb.Item(tell=pb.Tell(step=self._difference.step)))
                else:
                    self._is_described(one, self.log.describe(self._difference.step))
            return
        for call, dropped in batch.dropped:
            self._dropped.report(rank, dropped, call)
        if batch.wanted > self._alike:
            self._wanted.add(batch.wanted)
        waits = self._wanted or self._hurry > self._alike or self._ledger.over
        if waits or (self.rank and not self._tree.children):
            self._settle()
        elif self._settles is None:
            self._settles = self._loop.call_later(SPACING, self._settle)

    def _settle(self) -> None:
        """Tell of the steps that the whole subtree has done; ask for news of those that some rank waits for."""
        if self._settles is not None:
            self._settles.cancel()
            self._settles = None
        if self._difference is not None:
            return
        digests = self._ledger.take_alike()
        wanted = max(self._wanted, default=0)
        self._alike += len(digests) // DIGEST
        self._wanted = {steps for steps in self._wanted if steps > self._alike}
        if self.rank == 0:
            self._tell_all(bool(digests))
        elif digests or wanted > self._asked:
            self._tell_above(digests, wanted)
        late = min(self._wanted, default=self._hurry)
        if late > self._alike:
            self._ask_for(late)
        for steps, waiter in self._waiters:
            if steps <= self._alike and not waiter.done():
                waiter.set_result(None)
        self._waiters = [(steps, waiter) for steps, waiter in self._waiters if steps > self._alike]

    def _tell_above(self, digests: bytes, wanted: int) -> None:
        call = self.log.last_call(self._alike) if digests else -1
        agreed = NO_DROPS if call < 0 else self._dropped.agreed(call)
        dropped = ((call, agreed),) if agreed else ()
        more = wanted if wanted > self._asked else 0
        self._asked = max(self._asked, wanted)
        self._links.up(proto.steps_to(StepBatch(digests, dropped, self._ledger.over, more)))

    def _tell_all(self, more: bool) -> None:
        """On rank 0: tell all ranks which steps all have done, if there are more, and when all scripts have ended."""
        if more:
            call = self.log.forget(self._alike)
            agreed = NO_DROPS if call < 0 else self._dropped.agreed(call)
            self._links.down(proto.alike_to(self._alike, agreed))
            if call >= 0:
                self._listener.steps_agreed(call, agreed)
        if self._ledger.over and not self._said_over:
            self._said_over = True
            self._links.down(pb.Item(farewell=pb.Farewell()))
            self._listener.steps_over()

    def _ask_for(self, steps: int) -> None:
        for rank in self._ledger.late(steps):
            if self._hurried.get(rank, 0) >= steps:
                continue
            self._hurried[rank] = steps
            if rank != self.rank:
                self._links.put(rank, pb.Item(hurry=pb.Hurry(steps=steps)))
            elif self._hurry < steps:
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
