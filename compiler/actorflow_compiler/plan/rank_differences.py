"""What ranks of one class do differently: where in a tensor their parts begin, and with whom they communicate.

A step is lowered and cut for one rank of each class.  What the others do is the same but for this, which is recorded
beside it, so that the plan of all ranks can be made of that of the listed ones (``unfold.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from actorflow_compiler.core.ops import Arg, refs
from actorflow_compiler.plan.plan import Body, Exchange, Step

_T = TypeVar("_T")


class UnlikeError(Exception):
    """Ranks that were taken for alike are not: what one does cannot be made of what another one does."""


class ExchangesOfGroup(Protocol):
    """The exchanges of a tensor in a collective, as of ``boxing.GroupExchanges``."""

    def of(self, rank: int, group: tuple[int, ...]) -> tuple[Exchange, ...]:
        """Those of a rank in its group."""


@dataclass(frozen=True, slots=True, eq=False)
class OfRank:
    """An argument of an op that differs between the ranks of a class; never part of a plan."""

    values: Mapping[int, Arg]  # rank → the argument there, in which there is no value of the program


def merged(given: Mapping[int, Arg]) -> Arg:
    """One argument for these ranks; raises UnlikeError where they read other values."""
    first = next(iter(given.values()))
    if all(one is first or _equal(one, first) for one in given.values()):
        return first
    if not any(refs((one,)) for one in given.values()):
        return OfRank(given)
    if any(type(one) is not tuple or len(one) != len(first) for one in given.values()):
        raise UnlikeError
    return tuple(merged({rank: one[i] for rank, one in given.items()}) for i in range(len(first)))


def merged_steps(given: Mapping[int, Step]) -> Step:
    """One step for ranks that run the same op; raises UnlikeError where they do not."""
    first = next(iter(given.values()))
    names = [name for name, _ in first.kwargs]
    for other in given.values():
        same = (other.op, other.outs, len(other.args)) == (first.op, first.outs, len(first.args))
        if not same or [name for name, _ in other.kwargs] != names:
            raise UnlikeError
    args = [merged({rank: s.args[i] for rank, s in given.items()}) for i in range(len(first.args))]
    values = [merged({rank: s.kwargs[i][1] for rank, s in given.items()}) for i in range(len(names))]
    return Step(first.op, tuple(args), tuple(zip(names, values, strict=True)), first.outs)


def same_arguments(one: Arg, other: Arg) -> bool:
    """Whether two arguments are equal on every rank of a class."""
    if type(one) is OfRank and type(other) is OfRank:
        return one is other or one.values == other.values
    return type(one) is type(other) and _equal(one, other)


def _equal(one: Arg, other: Arg) -> bool:
    """Whether two arguments are equal, and of equal types: True is not 1, and -0.0 is not 0.0."""
    return one == other and repr(one) == repr(other)


def varies(body: Body) -> bool:
    """Whether anything in a body differs between ranks."""
    return any(_varies((*s.args, *(value for _, value in s.kwargs))) for s in body.steps)


def _varies(args: Sequence[Arg]) -> bool:
    return any(type(arg) is OfRank or (type(arg) is tuple and _varies(arg)) for arg in args)


def on_rank(body: Body, rank: int) -> Body:
    """The body as a rank of the class runs it.  Raises UnlikeError for a rank of another class."""
    steps = (
        replace(s, args=_on(s.args, rank), kwargs=tuple((name, _on(value, rank)) for name, value in s.kwargs))
        for s in body.steps
    )
    return replace(body, steps=tuple(steps))


def _on(arg: Arg, rank: int) -> Arg:
    if type(arg) is OfRank:
        return _found(arg.values, rank)
    return tuple(_on(one, rank) for one in arg) if type(arg) is tuple else arg


@dataclass(frozen=True, slots=True, eq=False)
class GroupSides:
    """How all ranks move one tensor in a collective."""

    groups: Mapping[int, tuple[int, ...]]  # rank → its group
    moved: ExchangesOfGroup

    def ranks(self, rank: int) -> tuple[int, ...]:
        """The group of a rank.  Raises UnlikeError if it has none."""
        return _found(self.groups, rank)

    def exchanges(self, rank: int) -> tuple[Exchange, ...]:
        """As ``Collective.exchanges``."""
        return self.moved.of(rank, self.ranks(rank))


@dataclass(frozen=True, slots=True, eq=False)
class SendSides:
    """To whom the ranks of a class send."""

    to: Mapping[int, int]  # rank → the rank that it sends to

    def ranks(self, rank: int) -> tuple[int, ...]:
        """The rank, and the one that it sends to.  Raises UnlikeError if there is none."""
        return rank, _found(self.to, rank)

    def exchanges(self, rank: int) -> tuple[Exchange, ...]:
        """There are none."""
        del rank
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class BodyOfClass:
    """The body of an actor, whose arguments may be ``OfRank``."""

    body: Body


@dataclass(frozen=True, slots=True, eq=False)
class CommOfClass:
    """The communication of an actor, which may consist of several that leave together."""

    sides: tuple[GroupSides | SendSides, ...]
    picked: tuple[int, ...]  # for each operand of the actor the exchange that moves it

    def ranks(self, rank: int) -> tuple[int, ...]:
        """The group of a rank; of a send (from, to).  Raises UnlikeError if what leaves together has several."""
        first, *others = (one.ranks(rank) for one in self.sides)
        if any(other != first for other in others):
            raise UnlikeError
        return first

    def exchanges(self, rank: int) -> tuple[Exchange, ...]:
        """As ``Collective.exchanges``; none for an all-reduce and a send."""
        every = [exchange for one in self.sides for exchange in one.exchanges(rank)]
        return tuple(every[i] for i in self.picked) if every else ()


OfClass = BodyOfClass | CommOfClass


def _found(of: Mapping[int, _T], rank: int) -> _T:
    if rank not in of:
        raise UnlikeError
    return of[rank]
