"""Print what the checks found, on this machine and between nodes, and decide whether a run could start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from actorflow.doctor import meeting
from actorflow.doctor.cards import way_to
from actorflow.doctor.checks import CHECKS
from actorflow.doctor.finding import Finding
from actorflow.doctor.machine_facts import MachineFacts
from actorflow.doctor.ports import unusable
from actorflow.rendezvous.roster import Ticket


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at."""

    what: str
    fine: str = ""  # what was seen where nothing is wrong
    finding: Finding | None = None

    @property
    def result(self) -> str:
        """One word for the table."""
        if self.finding is None:
            return "ok"
        return "problem" if self.finding.certain else "doubt"


def local_rows(here: MachineFacts) -> list[Row]:
    """What can be seen on this machine alone."""
    return [Row(what, "", check(here)) for what, check in CHECKS]


def meet(here: MachineFacts, own: Ticket, timeout: float, console: Console) -> list[Row]:
    """What the nodes see of each other; opens the run's port for as long as that takes, at most ``timeout`` seconds."""
    mine = here.nodes[here.node or 0]
    closed = unusable(next((a for a in here.resolve(mine) if here.is_own(a)), "0.0.0.0"), here.port)
    if closed is not None:
        return [] if here.node == 0 else [Row(f"port {here.port}", "", closed)]  # node 0's is in the table already
    party = meeting.Meeting(here, own)
    others = ", ".join(f"node {p.number} ({p.host})" for p in party.peers.values())

    def listening() -> None:
        console.print(f"port {here.port} is open; {others} should run this command within {timeout:g} s", style="dim")

    peers = asyncio.run(party.run(timeout, listening))
    return [row for peer in peers.values() for row in _of_peer(peer, here, own, timeout)]


def _of_peer(peer: meeting.NodePeer, here: MachineFacts, own: Ticket, timeout: float) -> Iterable[Row]:
    name = f"node {peer.number} ({peer.host})"
    found = meeting.outcome(peer, here, timeout)
    if not found:
        card = way_to(here, peer.host)
        by = f" by {card.name}" if card is not None else ""
        seconds = peer.attempt.seconds if peer.attempt else 0.0
        yield Row(f"{name}, both ways", f"connected in {1000 * seconds:.1f} ms{by}")
    for finding in found:
        yield Row(name, "", finding)
    if peer.ticket is not None:
        yield Row(f"{name}: versions", f"torch {own.torch}, Python {own.python}", meeting.differences(own, peer.ticket))


def show(rows: list[Row], console: Console) -> bool:
    """Print the table, and what to do about what was found; whether nothing is certain to stop a run."""
    table = Table(box=None, pad_edge=False)
    for heading in ("looked at", "result", "found"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.what, row.result, row.finding.condition if row.finding else row.fine)
    console.print(table)
    for row in rows:
        if row.finding is not None:
            console.print(f"\n{row.finding.condition}: {row.finding.text}", soft_wrap=True)
    return not any(row.finding is not None and row.finding.certain for row in rows)
