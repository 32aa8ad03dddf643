"""The tickets of the ranks that have joined: who is missing, and what does not match.

The roster is on the master.  It uses no clock and no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from actorflow_compiler.core.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who a rank is, where it runs, and what it is going to run."""

    rank: int
    node: int
    nnodes: int
    devices: int  # on its node
    host: str
    pid: int
    address: str  # host:port of its server
    version: str  # of actorflow
    python: str
    torch: str
    script: str  # path
    digest: str  # SHA-256 of the script's contents
    argv: tuple[str, ...]
    machine: str = ""  # equal for ranks that can share sockets and memory; empty: this one cannot
    socket: str = ""  # name of its Unix socket
    libraries: str = ""  # its communication library, with version
    lost_after: float = 0.0  # seconds of silence after which it takes a rank for lost
    fan_out: int = 0  # ranks that each one passes the run's messages on to

    @property
    def place(self) -> str:
        """The rank as errors name it."""
        return f"rank {self.rank} (node {self.node}, {self.host})"


# what must be equal on all ranks: (field, its name, what to do)
_EQUAL = (
    ("nnodes", "number of nodes", "Start every node with the same --nnodes."),
    ("devices", "number of devices of a node", "Start every node with the same --devices."),
    ("version", "version of actorflow", "Install the same version on every node."),
    ("python", "version of Python", "Use the same version on every node."),
    ("torch", "version of torch", "Install the same version on every node."),
    (
        "libraries",
        "communication library",
        "Ranks whose libraries differ may wait for each other for ever: install the same build of torch, and the same "
        "versions of NCCL and CUDA, on every node.",
    ),
    ("lost_after", "limit of silence (--lost-after)", "Start every node with the same --lost-after, or with none."),
    ("fan_out", "ranks that each passes messages on to (ACTORFLOW_FAN_OUT)", "Give every node the same, or none."),
    ("digest", "script", "Copy the same script to every node."),
    ("argv", "arguments of the script", "Start every node with the same arguments."),
)
_COUNTS = ("nnodes", "devices")  # while these differ, ranks cannot be counted


class Roster:
    """The ranks that have joined; their tickets are compared with the master's."""

    def __init__(self, own: Ticket) -> None:
        self.own = own
        self.world = own.nnodes * own.devices
        self.tickets: dict[int, Ticket] = {own.rank: own}

    def add(self, ticket: Ticket) -> None:
        """Record a rank; raises ClusterError if it does not belong to this run."""
        for name in _COUNTS:
            if getattr(ticket, name) != getattr(self.own, name):
                raise ClusterError(_mismatch(name, self.own, ticket))
        if not 0 <= ticket.rank < self.world:
            raise ClusterError(
                f"{ticket.place} is no rank of this run of {self.own.nnodes} nodes × {self.own.devices} devices. "
                f"--node-rank goes from 0 to {self.own.nnodes - 1}."
            )
        other = self.tickets.get(ticket.rank)
        if other is not None:
            raise ClusterError(
                f"two processes say that they are rank {ticket.rank}: pid {other.pid} on {other.host} and "
                f"pid {ticket.pid} on {ticket.host}. Give every node its own --node-rank."
            )
        self.tickets[ticket.rank] = ticket

    @property
    def complete(self) -> bool:
        """Whether all ranks have joined."""
        return len(self.tickets) == self.world

    def mismatch(self) -> str | None:
        """A text that shows both values, if a rank would run something else than the master."""
        return next(iter(self.mismatches()), None)

    def mismatches(self) -> list[str]:
        """A text for each value of a rank that is not the master's."""
        return [
            _mismatch(name, self.own, self.tickets[rank])
            for rank in sorted(self.tickets)
            for name, _, _ in _EQUAL
            if getattr(self.tickets[rank], name) != getattr(self.own, name)
        ]

    def missing(self) -> list[int]:
        """The ranks that have not joined, in order."""
        return [rank for rank in range(self.world) if rank not in self.tickets]

    def missing_text(self) -> str:
        """Those ranks by node: "ranks 2-3 (node 1), rank 6 (node 3)"."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in self.missing():
            nodes[rank // self.own.devices].append(rank)
        return ", ".join(f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)} (node {node})" for node, ranks in nodes.items())


def _spans(ranks: Iterable[int]) -> str:
    """Shorten sorted numbers: 0, 2-5."""

    def runs() -> Iterator[tuple[int, int]]:
        first = last = -1
        for rank in ranks:
            if first >= 0 and rank == last + 1:
                last = rank
                continue
            if first >= 0:
                yield first, last
            first = last = rank
        yield first, last

    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs())


def difference(own: Ticket, other: Ticket) -> str:
    """A text that shows both values, if a node's launcher would run something else than node 0's; empty if not."""
    name = next((name for name, _, _ in _EQUAL if getattr(own, name) != getattr(other, name)), None)
    places = tuple(f"the launcher on {ticket.host} (pid {ticket.pid})" for ticket in (own, other))
    return "" if name is None else _mismatch(name, own, other, places, "the nodes do")


def _mismatch(name: str, a: Ticket, b: Ticket, places: tuple[str, ...] | None = None, who: str = "ranks do") -> str:
    label, advice = next((label, advice) for field, label, advice in _EQUAL if field == name)
    first, second = places or (a.place, b.place)
    return f"{who} not agree on the {label}:\n  {first}: {_shown(name, a)}\n  {second}: {_shown(name, b)}\n{advice}"


def _shown(name: str, ticket: Ticket) -> str:
    if name == "digest":
        return f"{ticket.script} (SHA-256 {ticket.digest[:12]}…)"
    if name == "argv":
        return " ".join(ticket.argv) or "(none)"
    if name == "lost_after":
        return f"{ticket.lost_after:g} s"
    return str(getattr(ticket, name))
