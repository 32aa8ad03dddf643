"""Decide when enough nodes are there for an attempt, and which number each has; uses no clock and no I/O.

Node 0's launcher asks it.  Launchers come, say that they are ready for the next attempt, and go; the answers are
decisions, which ``node_meeting`` carries out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from actorflow.rendezvous.roster import Ticket, difference

__all__ = ["Begin", "Decision", "End", "NodeAssembly", "NodeLost", "NodesWait", "Note", "Refuse"]

HOST = 0  # the key of the launcher that holds the meeting, which is always node 0


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin an attempt with these nodes."""

    attempt: int
    numbers: dict[int, int]  # key of a launcher → number of its node


@dataclass(frozen=True, slots=True)
class Refuse:
    """A launcher cannot take part."""

    key: int
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A text for the people who have started a launcher."""

    key: int
    text: str


@dataclass(frozen=True, slots=True)
class NodesWait:
    """So many nodes could be taken in at the next checkpoint."""

    count: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node has no more ranks in the attempt that is under way on others."""

    what: str  # for people: which node, and what has happened


@dataclass(frozen=True, slots=True)
class End:
    """There is no further attempt."""

    text: str


Decision = Begin | Refuse | Note | NodesWait | NodeLost | End


@dataclass(frozen=True, slots=True)
class _Node:
    """A launcher that is there."""

    ticket: Ticket
    wanted: int | None  # its number, where its command line or its engine says it
    ready: bool = True
    number: int | None = None  # in the last attempt
    is_new: bool = True  # that was its first attempt, in a run that was under way


def _name(node: _Node) -> str:
    return f"node {node.number} ({node.ticket.host})"


class NodeAssembly:
    """The launchers of a run's nodes, between attempts and during them.

    ``own`` is the ticket of the host, with which others must agree.  ``least`` to ``most`` nodes take part.  ``limit``:
    seconds to wait for the nodes of the last attempt, or for all nodes at the beginning, before fewer begin.
    ``restarts``: attempts after a failure; the loss of a whole node does not count as one.
    """

    def __init__(self, own: Ticket, least: int, most: int, limit: float, restarts: int) -> None:
        self._own = own
        self._least, self._most, self._limit, self._restarts = least, most, limit, restarts
        self._nodes: dict[int, _Node] = {}  # by key, in the order in which they came
        self._since: float | None = None  # when the wait for the next attempt began, in seconds; None: one is under way
        self._size = 0  # nodes of the last attempt, without those that have left on purpose
        self._members = 0  # nodes of the last attempt
        self._attempts = 0  # so far
        self._failed = False  # the last attempt has failed, and it is not yet known whether that counts
        self._done: list[str] = []  # nodes of the last attempt whose ranks have come to their end
        self._culprit: int | None = None  # the node with the rank that failed in it
        self._failures = 0  # that count: of ranks whose nodes are still there
        self._waiting = 0  # nodes that could be taken in, as last said

    @property
    def deadline(self) -> float | None:
        """When to ask ``pass_time`` again, in seconds; None: not before something happens."""
        return None if self._since is None else self._since + self._limit

    def ready(
        self, key: int, ticket: Ticket, wanted: int | None, failed: bool, now: float, attempts: int = 0,
        culprit: int | None = None,
    ) -> list[Decision]:  # fmt: skip
        """A launcher is ready for the next attempt; ``failed``: the last one has, on its node.

        ``attempts``: how many it has had, perhaps with an earlier launcher of node 0.  ``culprit``: the number of the
        node with the rank that has failed.
        """
        before = self._nodes.get(key)
        if before is None and (why := self._why_not(key, ticket, wanted)):
            return [Refuse(key, why)]
        member = before is not None and before.number is not None
        self._attempts = max(self._attempts, attempts)
        number, is_new = (None, True) if before is None else (before.number, before.is_new)
        self._nodes[key] = _Node(ticket, wanted, True, number, is_new)
        if self._since is not None or member:
            self._failed = self._failed or (failed and member)
            self._culprit = culprit if self._culprit is None else self._culprit
        if self._since is not None:
            return self._decide(now)
        if failed and before is not None and member and key != HOST:
            self._since = now
            return [NodeLost(f"the ranks of {_name(before)} have failed"), *self._decide(now)]
        if self._size and not member:
            return [Note(key, self._what_it_waits_for()), *self._decide(now)]
        self._since = now
        return self._decide(now)

    def gone(self, key: int, now: float) -> list[Decision]:
        """A launcher has ended, or cannot be reached."""
        node = self._nodes.pop(key, None)
        lost: list[Decision] = []
        if self._since is None and node is not None and node.number is not None:
            lost = [NodeLost(f"{_name(node)} has lost its launcher")]
        return [*lost, *self._decide(now)]

    def left(self, key: int, why: str, now: float) -> list[Decision]:
        """A launcher leaves on purpose: where all nodes are needed this is the end, else it is not waited for."""
        node = self._nodes.get(key)
        if node is not None and node.number is not None:
            self._size -= 1
        if self._least == self._most and node is not None:
            return [End(why)]
        return self.gone(key, now)

    def done(self, key: int, now: float) -> list[Decision]:
        """A launcher leaves as the script has ended on its ranks; none of them is there for another attempt."""
        node = self._nodes.pop(key, None)
        if node is not None and node.number is not None:
            self._size -= 1
            self._done.append(_name(node))
        return self._decide(now)

    def pass_time(self, now: float) -> list[Decision]:
        """Look at the clock."""
        return self._decide(now)

    def missing(self) -> str:
        """What an attempt waits for, for people; empty if one is under way."""
        if self._since is None:
            return ""
        ready = sum(node.ready for node in self._nodes.values())
        ending = len(self._nodes) - ready
        wanted = f"{self._least} to {self._most}" if self._least < self._most else f"{self._most}"
        return f"{ready} of {wanted} nodes are ready" + (f", {ending} still end their last attempt" if ending else "")

    def _why_not(self, key: int, ticket: Ticket, wanted: int | None) -> str:
        """Why a launcher that has come cannot take part; empty if it can."""
        other = difference(self._own, ticket)
        if other:
            return other
        if wanted is not None and not 0 <= wanted < self._most:
            return f"node {wanted} is none of {self._most} nodes: numbers go from 0 to {self._most - 1}"
        same = next((node.ticket for node in self._nodes.values() if node.wanted == wanted is not None), None)
        if wanted == 0 and key != HOST:
            same = self._own
        if same is None or (self._size and same is not self._own):  # its earlier process may not be gone yet
            return ""
        return (
            f"two launchers say that they are node {wanted}: pid {same.pid} on {same.host} and pid {ticket.pid} on "
            f"{ticket.host}. Give every node its own --node-rank, or none with --nodes MIN:MAX."
        )

    def _what_it_waits_for(self) -> str:
        before = sum(node.number is None for node in self._nodes.values()) - 1
        if self._size + before < self._most:
            return "the run is under way: this node is taken in at its Keeper's next checkpoint, or after a failure"
        return f"the run has {self._most} nodes, or will have: this one takes the place of a node that is lost"

    def _decide(self, now: float) -> list[Decision]:
        if self._since is None:
            return list(self._told_of_waiting())
        if (broken := self._broken_newcomer()) is not None:
            self._failed = False
            self._size -= 1
            del self._nodes[broken]
            return [Refuse(broken, "the ranks here have failed in their first attempt: the run goes on without them")]
        if self._counts_as_failure():
            self._failures += 1
            if self._failures > self._restarts:
                return [End(f"no restart is left (--max-restarts {self._restarts})")]
        ready = [key for key, node in self._nodes.items() if node.ready]
        late = now >= self._since + self._limit
        none_ends = len(ready) == len(self._nodes)
        complete = none_ends and len(ready) >= max(self._least, self._size or self._most)
        if HOST in ready and (complete or (late and len(ready) >= self._least)):
            return [self._begin(sorted(ready, key=self._precedence)[: self._most])]
        if self._done and none_ends and len(ready) < self._least:
            return [End(f"no restart: {' and '.join(self._done)} had come to the end of the script, and left the run")]
        if late and HOST in ready:
            return [End(f"{self.missing()} after {self._limit:g} s (--join-timeout)")]
        return []

    def _broken_newcomer(self) -> int | None:
        """The node that the run has taken in for an attempt that has failed by it; None if there is none."""
        if not self._failed or not all(node.ready for node in self._nodes.values()):
            return None
        found = (key for key, node in self._nodes.items() if node.number is not None and node.number == self._culprit)
        return next((key for key in found if self._nodes[key].is_new), None)

    def _counts_as_failure(self) -> bool:
        """Whether the last attempt has failed on nodes that are all still there, which is known once all have ended."""
        if not self._failed or not all(node.ready for node in self._nodes.values()):
            return False
        self._failed = False
        return sum(node.number is not None for node in self._nodes.values()) == self._members

    def _precedence(self, key: int) -> tuple[bool, bool, int]:
        """Who takes part first: the host, then nodes of the last attempt, then those that came first."""
        return key != HOST, self._nodes[key].number is None, key

    def _begin(self, keys: list[int]) -> Begin:
        numbers = self._numbers(keys)
        for key, node in self._nodes.items():
            is_new = key in numbers and node.number is None and self._size > 0
            ready = node.ready and key not in numbers
            self._nodes[key] = replace(node, ready=ready, number=numbers.get(key), is_new=is_new)
        self._failed, self._culprit, self._done = False, None, []
        self._since, self._waiting = None, 0
        self._size = self._members = len(keys)
        self._attempts += 1
        return Begin(self._attempts - 1, numbers)

    def _numbers(self, keys: list[int]) -> dict[int, int]:
        """A number for each: the one that it wants or had, where that is free and below the count, else any."""
        numbers = {HOST: 0}
        for key in keys:
            node = self._nodes[key]
            number = node.number if node.wanted is None else node.wanted
            if key != HOST and number is not None and number < len(keys) and number not in numbers.values():
                numbers[key] = number
        free = (number for number in range(len(keys)) if number not in {*numbers.values()})
        return numbers | {key: next(free) for key in keys if key not in numbers}

    def _told_of_waiting(self) -> Iterator[Decision]:
        waiting = sum(node.number is None and node.ready for node in self._nodes.values())
        could = min(waiting, self._most - self._size)
        if could != self._waiting:
            self._waiting = could
            yield NodesWait(could)
