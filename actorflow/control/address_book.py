"""The tickets of all ranks as one rank knows them: its own, those it has been shown, and those of the welcome.

A welcome has a column for each thing in which ranks differ, and a ticket is made of it when somebody asks for it: each
rank of a large run has the book of all, and few look up more than their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from actorflow.control.message_rules import PIDS, PORTS, RANKS, check_each_address, check_socket, one_of_a_range, refuse
from actorflow.rendezvous.roster import Ticket
from actorflow.support.refusals import RefusalReason
from actorflow_protos import runtime_pb2 as pb

__all__ = ["AddressBook", "check_welcome", "welcome_to"]


class AddressBook(Mapping[int, Ticket]):
    """Rank → ticket."""

    def __init__(self) -> None:
        self._known: dict[int, Ticket] = {}
        self._rest = pb.Welcome()
        self._like: Ticket | None = None  # in all that is equal on all ranks

    def add(self, ticket: Ticket) -> None:
        """Take in a ticket that has been checked."""
        self._known[ticket.rank] = ticket

    def welcome(self, welcome: pb.Welcome, own: Ticket) -> None:
        """Take in the tickets of all ranks, which have been checked."""
        self._rest, self._like = welcome, own

    def __getitem__(self, rank: int) -> Ticket:
        if rank not in self._known:
            if self._like is None or not 0 <= rank < len(self._rest.nodes):
                raise KeyError(rank)
            self._known[rank] = _ticket_of(self._rest, rank, self._like)
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter({**self._known, **dict.fromkeys(range(len(self._rest.nodes)))})

    def __len__(self) -> int:
        return max(len(self._known), len(self._rest.nodes))


def welcome_to(tickets: Sequence[Ticket], store: tuple[str, int], logs_port: int) -> pb.Welcome:
    """The welcome of ranks with these tickets, in order of rank, from rank 0."""
    return pb.Welcome(
        nodes=[ticket.node for ticket in tickets],
        hosts=[ticket.host for ticket in tickets],
        pids=[ticket.pid for ticket in tickets],
        addresses=[ticket.address for ticket in tickets],
        machines=[ticket.machine for ticket in tickets],
        sockets=[ticket.socket for ticket in tickets],
        store_host=store[0],
        store_port=store[1],
        logs_port=logs_port,
    )


def check_welcome(item: pb.Welcome, world: int, own: Ticket) -> None:
    """Raise MessageRefused for a welcome that is not one of all ranks, the receiver's ``own`` ticket among them."""
    columns = (item.nodes, item.hosts, item.pids, item.addresses, item.machines, item.sockets)
    if {len(column) for column in columns} != {world}:
        refuse(RefusalReason.NUMBER, f"tickets of {len(item.nodes)} ranks", f"those of ranks 0 to {world - 1} in order")
    for what, numbers, stop in (("a node", item.nodes, RANKS), ("a pid", item.pids, PIDS + 1)):
        one_of_a_range(what, max(numbers), 0, stop)
    check_each_address(item.addresses)
    for socket in {*item.sockets}:
        check_socket(socket)
    if _ticket_of(item, own.rank, own) != own:
        refuse(RefusalReason.VALUE, f"another ticket of rank {own.rank}", "the one that it has sent")
    one_of_a_range("the port of the store", item.store_port, 1, PORTS)
    one_of_a_range("the port for logs", item.logs_port, 0, PORTS)


def _ticket_of(item: pb.Welcome, rank: int, like: Ticket) -> Ticket:
    return replace(
        like, rank=rank, node=item.nodes[rank], host=item.hosts[rank], pid=item.pids[rank],
        address=item.addresses[rank], machine=item.machines[rank], socket=item.sockets[rank],
    )  # fmt: skip
