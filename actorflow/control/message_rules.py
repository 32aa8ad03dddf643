"""Check what came over the network by itself: fields, sizes, texts, numbers, and who may send such an item to whom.

What follows from the state of the run (which plans there are, which step is next) is checked where that state is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NoReturn, TypeVar, cast

from google.protobuf.message import Message as ProtoMessage

from actorflow.control.tree import Tree
from actorflow.rendezvous.roster import Ticket
from actorflow.support.refusals import MessageRefused, RefusalReason

__all__ = [
    "CHUNK",
    "LONGEST",
    "check_address",
    "check_each_address",
    "check_below",
    "check_fields",
    "check_known",
    "check_sender",
    "check_socket",
    "check_ticket",
    "member",
    "one_of_a_range",
    "refuse",
    "shortened",
    "unreadable",
]

CHUNK = 1 << 20  # most bytes of a payload in one message
LONGEST = 1 << 18  # most characters of a text, and bytes of data that have no limit of their own
MANY = 1 << 16  # most entries of a list that has no limit of its own
RANKS = 1 << 20  # more than any run has
PIDS = 1 << 22  # Linux gives no higher ones
PORTS = 1 << 16
COUNT = 1 << 62  # more than any count of calls or steps comes to
_LIMITS = {  # most entries of a list, or bytes or characters of one entry
    "Part.data": CHUNK,
    "Chunk.data": CHUNK,
    "LogPiece.data": CHUNK,
    "PullRequest.key": 1 << 16,
    "Part.receivers": RANKS,
    "Steps.digests": 1 << 26,
    "Steps.released": 1 << 20,
    "Dropped.plans": 1 << 20,
    "Dropped.variables": 1 << 20,
    **{f"Welcome.{name}": RANKS for name in ("nodes", "hosts", "pids", "addresses", "machines", "sockets")},
    "Ticket.argv": 1 << 20,
}
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]/]+):(\d{1,5})")
_SOCKET = re.compile(r"actorflow-[0-9a-f]{32}")

Kind = TypeVar("Kind", bound=StrEnum)


class _Way(StrEnum):
    """Who sends an item to whom."""

    ANY = "any rank to any other"
    UP = "a rank to the one above it in the tree of ranks"
    DOWN = "a rank to one next below it in the tree of ranks"
    EITHER = "a rank to one next above or below it in the tree of ranks"
    OF_MASTER = "rank 0 to a rank"
    DIALLED = "a rank to one with a lower number, which it has dialled"


_WAYS = {
    "ready": _Way.ANY, "credit": _Way.ANY, "stamp": _Way.ANY, "failure": _Way.ANY, "heard": _Way.ANY,
    "bye": _Way.ANY, "beat": _Way.ANY, "hello": _Way.DIALLED, "near": _Way.DIALLED, "part": _Way.EITHER,
    "steps": _Way.UP, "told": _Way.UP, "failed": _Way.UP, "vote": _Way.UP, "silent": _Way.UP,
    "parent": _Way.OF_MASTER, "welcome": _Way.DOWN, "alike": _Way.DOWN, "hurry": _Way.DOWN,
    "tell": _Way.DOWN, "farewell": _Way.DOWN, "hold": _Way.DOWN, "decision": _Way.DOWN,
}  # fmt: skip


def refuse(reason: RefusalReason, found: str, expected: str) -> NoReturn:
    """Raise MessageRefused; its sender is named where the message came in."""
    raise MessageRefused(reason, found, expected)


def unreadable(why: str) -> MessageRefused:
    """The refusal of bytes that are no message."""
    return MessageRefused(RefusalReason.UNREADABLE, f"bytes that are no message ({why})", "a message of this version")


def check_sender(kind: str, sender: int, tree: Tree) -> None:
    """Raise MessageRefused if a rank never sends an item of this kind to the one whose tree this is."""
    way = _WAYS[kind]
    fits = {
        _Way.ANY: True,
        _Way.UP: sender in tree.children,
        _Way.DOWN: sender == tree.parent,
        _Way.EITHER: sender == tree.parent or sender in tree.children,
        _Way.OF_MASTER: sender == 0,
        _Way.DIALLED: sender > tree.rank,
    }
    if not fits[way]:
        refuse(RefusalReason.SENDER, f"{kind!r} from rank {sender} to rank {tree.rank}", f"it from {way}")


def check_below(tree: Tree, neighbour: int, rank: int) -> None:
    """Raise MessageRefused if what a rank says cannot have come by way of this neighbour, which passes it on."""
    if rank != neighbour and not (neighbour > tree.rank and tree.holds(neighbour, rank)):
        refuse(RefusalReason.SENDER, f"words of rank {rank}", f"those of rank {neighbour}, or of one below it")


def check_known(message: ProtoMessage) -> None:
    """Raise MessageRefused if a message has fields, at any depth, that this version does not know."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        refuse(
            RefusalReason.UNKNOWN_FIELD,
            f"{type(message).__name__} with {size - message.ByteSize()} bytes of fields that are not known",
            "those of this version",
        )


def check_fields(message: ProtoMessage) -> None:
    """Raise MessageRefused where a text, bytes or a list is longer than it ever is, or a number is not finite."""
    kind = message.DESCRIPTOR.name
    for field, value in message.ListFields():
        name = f"{kind}.{field.name}"
        if isinstance(value, ProtoMessage):
            check_fields(value)
        elif isinstance(value, (str, bytes, float, int)):
            _check_each(name, (value,), _LIMITS.get(name, LONGEST))
        else:
            most = _LIMITS.get(name, MANY)
            if len(value) > most:
                refuse(RefusalReason.LIMIT, f"{name} with {len(value)} entries", f"at most {most}")
            _check_each(name, value, LONGEST)


def _check_each(name: str, values: Sequence[object], most: int) -> None:
    """Check the entries of a list, which are of one type; those of a welcome are as many as there are ranks."""
    first = values[0]
    if isinstance(first, ProtoMessage):
        for one in cast(Sequence[ProtoMessage], values):
            check_fields(one)
    elif isinstance(first, (str, bytes)):
        longest = max(map(len, cast(Sequence[str | bytes], values)))
        if longest > most:
            refuse(RefusalReason.LIMIT, f"{name} of length {longest}", f"at most {most}")
    elif isinstance(first, float):
        for number in cast(Sequence[float], values):
            if not math.isfinite(number):
                refuse(RefusalReason.VALUE, f"{name} {number}", "a finite number")


def member(kinds: type[Kind], text: str, what: str) -> Kind:
    """The member of an enumeration with this text; raises MessageRefused if there is none."""
    try:
        return kinds(text)
    except ValueError:
        refuse(RefusalReason.VALUE, f"{what} {text[:80]!r}", f"one of {', '.join(kinds)}")


def one_of_a_range(what: str, value: int, start: int, stop: int) -> int:
    """The value; raises MessageRefused unless it is at least ``start`` and below ``stop``."""
    if not start <= value < stop:
        refuse(RefusalReason.NUMBER, f"{what} {value}", f"{start} to {stop - 1}")
    return value


def check_ticket(ticket: Ticket) -> Ticket:
    """The ticket; raises MessageRefused if no process can have it."""
    for name in ("rank", "node"):
        one_of_a_range(f"{name} of a ticket", getattr(ticket, name), 0, RANKS)
    for name in ("nnodes", "devices"):
        one_of_a_range(f"{name} of a ticket", getattr(ticket, name), 1, RANKS)
    one_of_a_range("pid of a ticket", ticket.pid, 0, PIDS + 1)
    if ticket.lost_after < 0:
        refuse(RefusalReason.VALUE, f"a ticket with lost_after {ticket.lost_after:g}", "seconds")
    if ticket.address:
        check_address(ticket.address)
    check_socket(ticket.socket)
    return ticket


def check_socket(socket: str) -> None:
    """Raise MessageRefused if this is neither empty nor the name of a rank's socket."""
    if socket and not _SOCKET.fullmatch(socket):
        refuse(RefusalReason.VALUE, f"a ticket with the socket {socket[:80]!r}", "the name of a rank's socket")


def check_address(address: str) -> None:
    """Raise MessageRefused if an address is no HOST:PORT."""
    check_each_address((address,))


def check_each_address(addresses: Iterable[str]) -> None:
    """Raise MessageRefused if any of these is no HOST:PORT."""
    for address in addresses:  # of all ranks, on each rank
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[2]) < PORTS:
            refuse(RefusalReason.VALUE, f"the address {address[:80]!r}", "HOST:PORT")


def shortened(text: str) -> str:
    """A text of ours that may be long, as it is sent."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
