"""Test the connections between the nodes of a run beforehand: each node reaches out to all others.

One TCP connection for each direction: both sides say who they are, in a line of JSON each; then the caller
tries a second port, one that the system chose, as ranks use such ports too, and says whether it got there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from actorflow.doctor.finding import Finding
from actorflow.doctor.machine_facts import MachineFacts
from actorflow.doctor.reach import Attempt, reach, unreached
from actorflow.rendezvous.roster import Roster, Ticket

MARK = "actorflow doctor 1"  # the first word of the conversation
_LINE = 1 << 16  # bytes at most
_ANSWER = 5.0  # seconds for a line to come
_PAUSE = 0.3  # seconds between attempts
_TRY = 2.0  # seconds for one attempt
_STRANGE = (OSError, ValueError, TimeoutError, KeyError, TypeError)  # errors that another program's answers cause


@dataclass(slots=True)
class NodePeer:
    """What this node knows of another one so far."""

    number: int
    host: str
    attempt: Attempt | None = None  # the last one to reach its port
    answered: bool = True  # what listens there is the doctor
    ticket: Ticket | None = None  # what it says of itself
    high: Attempt | None = None  # to reach a port there that the system chose
    called: bool = False  # it has reached us
    called_high: bool = False  # and a port here that the system chose

    @property
    def complete(self) -> bool:
        """Whether nothing is left to find out."""
        return self.high is not None and self.called


class Meeting:
    """This node's part of the test; ``run`` it on every node at the same time."""

    def __init__(self, here: MachineFacts, own: Ticket) -> None:
        assert here.node is not None
        self._here, self._own = here, own
        self.peers = {n: NodePeer(n, host) for n, host in enumerate(here.nodes) if n != here.node}
        self._news = asyncio.Event()
        self._high = 0  # our second port

    async def run(self, timeout: float, listening: Callable[[], object] = bool) -> dict[int, NodePeer]:
        """Meet the others, for at most so many seconds; the peers by number.

        ``listening`` is called when this node's port is open.  Raises OSError where it cannot be opened.
        """
        mine = self._here.nodes[self._here.node or 0]
        own = next((a for a in self._here.resolve(mine) if self._here.is_own(a)), None)
        server = await asyncio.start_server(self._answer, own, self._here.port, limit=_LINE)
        high = await asyncio.start_server(lambda _, writer: writer.close(), own, 0)
        self._high = high.sockets[0].getsockname()[1]
        listening()
        calls = [asyncio.ensure_future(self._reach(peer)) for peer in self.peers.values()]
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_complete(), timeout)
        for call in calls:
            call.cancel()
        server.close()
        high.close()
        return self.peers

    async def _all_complete(self) -> None:
        while not all(peer.complete for peer in self.peers.values()):
            await self._news.wait()
            self._news.clear()

    # -- calling ---------------------------------------------------------------------------------

    async def _reach(self, peer: NodePeer) -> None:
        """Try until the other has answered and its second port was tried."""
        while peer.high is None:
            peer.attempt = await asyncio.to_thread(reach, peer.host, self._here.port, _TRY)
            if peer.attempt.reached:
                with suppress(*_STRANGE):
                    await self._greet(peer)
                peer.answered = peer.ticket is not None
            if peer.high is None:
                await asyncio.sleep(_PAUSE)
        self._news.set()

    async def _greet(self, peer: NodePeer) -> None:
        reader, writer = await asyncio.open_connection(peer.host, self._here.port, limit=_LINE)
        try:
            writer.write(self._hello())
            said = await _line(reader)
            peer.ticket = _ticket(said)
            high = await asyncio.to_thread(reach, peer.host, int(said["high"]), _TRY)
            writer.write(json.dumps({"reached": high.reached}).encode() + b"\n")
            await writer.drain()
            peer.high = high
        finally:
            writer.close()

    # -- answering -------------------------------------------------------------------------------

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(*_STRANGE):
                said = await _line(reader)
                peer = self.peers.get(said["node"])
                if peer is None:
                    return
                writer.write(self._hello())
                outcome = await _line(reader)
                peer.called, peer.called_high = True, bool(outcome["reached"])
                self._news.set()
        finally:
            writer.close()

    def _hello(self) -> bytes:
        hello = {"mark": MARK, "node": self._here.node, "high": self._high, "ticket": asdict(self._own)}
        return json.dumps(hello).encode() + b"\n"


async def _line(reader: asyncio.StreamReader) -> dict[str, Any]:
    found = json.loads(await asyncio.wait_for(reader.readline(), _ANSWER))
    if not isinstance(found, dict):
        raise ValueError("a dictionary was expected")
    return found


def _ticket(said: dict[str, Any]) -> Ticket:
    if said.get("mark") != MARK:
        raise ValueError("another program answers")
    known = {field.name for field in fields(Ticket)}
    given = {name: value for name, value in said["ticket"].items() if name in known}
    return Ticket(**{**given, "argv": tuple(given["argv"])})


# -- what it means ---------------------------------------------------------------------------------


def differences(own: Ticket, other: Ticket) -> Finding | None:
    """What the two nodes would run with that is not the same."""
    roster = Roster(own)
    roster.tickets[other.rank] = other
    texts = roster.mismatches()
    return Finding("nodes differ", " ".join(texts), "", "") if texts else None


def outcome(peer: NodePeer, here: MachineFacts, timeout: float) -> list[Finding]:
    """What keeps this node and another apart; nothing where each reached the other."""
    who = f"node {peer.number}"
    found: list[Finding] = []
    if peer.attempt is None or not peer.attempt.reached:
        finding = peer.attempt and unreached(peer.attempt, who)
        found += [finding] if finding else []
    elif not peer.answered:
        found.append(
            Finding(
                "another program answers",
                f"What listens on port {here.port} of {who} ({peer.host}) is not this check.",
                "The run's control server needs the port for itself.",
                "End that program, or choose another port (--master-port), the same on every node.",
            )
        )
    elif peer.high is not None and not peer.high.reached:
        found.append(
            Finding(
                "other ports are closed",
                f"Port {here.port} of {who} ({peer.host}) was reached, but not another one: {peer.high.tried}.",
                "Ranks of the two nodes use ports that the system chooses as well.",
                "Open all ports between the nodes; start containers with --net=host.",
            )
        )
    if not peer.called:
        found.append(
            Finding(
                "not reached from there",
                f"{who[0].upper()}{who[1:]} ({peer.host}) has not reached this node within {timeout:g} s.",
                "",
                f"Run `actorflow doctor` with the same --nodes and --master-port {here.port} there at the same time; "
                "what it prints there says what keeps it away.",
            )
        )
    elif not peer.called_high:
        found.append(
            Finding(
                "other ports are closed here",
                f"{who[0].upper()}{who[1:]} ({peer.host}) has reached port {here.port} here, but not another one.",
                "Ranks of the two nodes use ports that the system chooses as well.",
                "Open all ports of this machine for the other nodes; start containers with --net=host.",
            )
        )
    return found
