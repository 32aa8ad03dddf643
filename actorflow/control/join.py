"""The master's wait for all ranks to join; errors name the ranks that are missing or differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from actorflow.rendezvous.roster import Roster, Ticket
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError

MISMATCH_GRACE = 3.0  # seconds in which other ranks can still join and be told of a mismatch
FIRST_NOTICE, NOTICE = 5.0, 10.0  # seconds before the first note about missing ranks, and between notes
LOOK = 1.0  # seconds between looks at what the launcher says
LOOKING = 1.0  # most seconds to look for causes on this machine before the first note


class UnlessFailed(Protocol):
    """Awaits something; raises the run's error as soon as the run has failed, or TimeoutError."""

    def __call__(self, awaitable: Awaitable[object], timeout: float) -> Awaitable[object]:
        """Await it for that many seconds."""


class Reception:
    """The master's list of ranks while they join; used on the gRPC thread alone."""

    def __init__(
        self, own: Ticket, limit: float, doubts: Callable[[], str] = str, lost_node: Callable[[], str] = str
    ) -> None:
        self.roster = Roster(own)
        self._limit = limit  # seconds
        self._doubts = doubts  # returns text: why others may not reach this machine
        self._lost_node = lost_node  # returns text: what has happened to a node whose ranks are gone, if there is one
        self._turned_away: dict[str, set[str]] = {}  # why → addresses
        self._news = asyncio.Event()

    def admit(self, ticket: Ticket) -> None:
        """Record a rank that has joined; raises ClusterError if it does not belong to this run."""
        self.roster.add(ticket)
        self._news.set()

    def turn_away(self, host: str, why: str) -> None:
        """Record a caller that was refused, by its address, and why ("for lack of …")."""
        self._turned_away.setdefault(why, set()).add(host)

    async def wait(self, unless_failed: UnlessFailed) -> list[Ticket]:
        """Every rank's ticket, in order; raises ClusterError when ranks differ, or are missing after the limit."""
        start = now = time.monotonic()
        deadline, notice = start + self._limit, start + FIRST_NOTICE
        doubt: str | None = None
        while not self.roster.complete and now < deadline:
            if now >= notice:
                doubts = ""
                if notice == start + FIRST_NOTICE:  # only once, since slow name resolution must not delay the join
                    with suppress(TimeoutError):
                        doubts = await asyncio.wait_for(asyncio.to_thread(self._doubts), LOOKING)
                notice += NOTICE
                self._say(f"{now - start:.0f} s of {self._limit:g} s" + (f". {doubts}" if doubts else ""))
            if doubt is None and (doubt := self.roster.mismatch()) is not None:
                deadline = min(deadline, now + MISMATCH_GRACE)
            if (lost := self._lost_node()) and not self.roster.complete:
                raise ClusterError(f"{lost} while {self.roster.missing_text()} had still to join")
            with suppress(TimeoutError):
                await unless_failed(self._news.wait(), min(deadline, notice, now + LOOK) - now)
            self._news.clear()
            now = time.monotonic()
        if (doubt := self.roster.mismatch()) is not None:
            raise ClusterError(doubt)
        if not self.roster.complete:
            raise ClusterError(self._missing())
        return [self.roster.tickets[rank] for rank in range(self.roster.world)]

    def _say(self, waited: str) -> None:
        say(f"waiting for {self.roster.missing_text()} to join: {waited}")

    def _missing(self) -> str:
        tokens = "".join(
            f" Callers from {', '.join(sorted(hosts))} were turned away, {why}."
            for why, hosts in sorted(self._turned_away.items())
        )
        return (
            f"{self.roster.missing_text()} did not join within {self._limit:g} s (--join-timeout).{tokens} "
            f"{len(self.roster.tickets)} of {self.roster.world} ranks came. Start the run on every node, with "
            "`actorflow run` and the same --nnodes, --devices, --master-addr and --master-port, or the script itself "
            f"where it names its nodes, and look at the missing node: it says what it waits for. {self._doubts()}"
        ).strip()
