"""Evaluated firings enter; the chain of firings that each waited for the one before leaves, from the end backwards."""

from __future__ import annotations

from collections.abc import Iterator

from actorflow_compiler.plan.plan import Order
from actorflow_scheduler.firing_times import FiringTimes


def critical_path(firings: FiringTimes, span: int) -> Iterator[tuple[int, int]]:
    """(actor, nanoseconds) of the firings that the last ``span`` nanoseconds were spent in, one at any time.

    While a token or a credit is under way, it is its send that is waited for.  It ends early where a firing waited for
    nothing but the call.
    """
    begin = max(ends[-1] for ends in firings.ends.values()) - span
    for actor, n, way in _chain(firings, span):
        end = firings.ends[actor][n]
        start = end - firings.lasts[actor]
        yield actor, end - max(start, begin)
        if way is not None and start > begin:
            send, time = way
            yield send, min(time, start - begin)


def critical_firings(firings: FiringTimes, span: int) -> Iterator[tuple[int, int]]:
    """The same firings, as (actor, which of its firings since the start)."""
    return ((actor, n) for actor, n, _ in _chain(firings, span))


def _chain(firings: FiringTimes, span: int) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """The same, and what was under way before each: the send and the nanoseconds, or None."""
    plan, ends, lasts = firings.plan, firings.ends, firings.lasts
    turns: dict[int, _Turns] = {}
    for order in plan.orders:
        of_queue = _Turns(order)
        turns |= dict.fromkeys(order.actors, of_queue)
    actor = max(plan.actors, key=lambda a: ends[a.id][-1]).id
    n = len(ends[actor]) - 1
    begin = ends[actor][n] - span
    while (end := ends[actor][n]) > begin:
        start = end - lasts[actor]
        before = [(*b, 0) for m in firings.members(actor) if (b := turns[m].before(m, n)) is not None]
        causes = (*before, *firings.needs(actor, n))
        cause = next(((a, i, way) for a, i, way in causes if ends[a][i] + way == start), None)
        if cause is None:
            yield actor, n, None
            return
        other, i, way = cause
        sends = plan.actor(other).kind == "send"
        yield actor, n, (other if sends else actor, way) if way else None
        actor, n = other, i


class _Turns:
    """Which firing precedes which on one queue."""

    def __init__(self, order: Order) -> None:
        self._order = order.actors
        self._firings: list[tuple[int, int]] = []  # turn → (actor, which of its firings in an iteration)
        self._turn: dict[tuple[int, int], int] = {}
        self._rates: dict[int, int] = {}

    def before(self, actor: int, n: int) -> tuple[int, int] | None:
        """The firing before firing n of an actor; None for the first of all."""
        if not self._firings:
            for a in self._order:
                self._rates[a] = self._rates.get(a, 0) + 1
                self._firings.append((a, self._rates[a] - 1))
            self._turn = {firing: turn for turn, firing in enumerate(self._firings)}
        iteration, nth = divmod(n, self._rates[actor])
        turn = self._turn[actor, nth]
        iteration -= turn == 0
        a, i = self._firings[turn - 1]
        return (a, iteration * self._rates[a] + i) if iteration >= 0 else None
