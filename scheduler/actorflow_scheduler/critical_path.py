"""Find the critical path of evaluated firings: from the last firing back to the firing it waited for, and so on."""

from __future__ import annotations

from collections.abc import Iterator

from actorflow_compiler.plan.plan import ActorKind, Order
from actorflow_scheduler.firing_times import FiringTimes


def critical_path(firings: FiringTimes, span: int) -> Iterator[tuple[int, int]]:
    """The firings on the critical path of the last ``span`` nanoseconds, backwards: (actor, nanoseconds).

    The time in which a token or credit is in transit counts for its send.  The path ends early at a firing that waited
    only for the call.
    """
    begin = max(ends[-1] for ends in firings.ends.values()) - span
    for actor, n, latency in _chain(firings, span):
        end = firings.ends[actor][n]
        start = end - firings.durations[actor]
        yield actor, end - max(start, begin)
        if latency is not None and start > begin:
            send, time = latency
            yield send, min(time, start - begin)


def critical_firings(firings: FiringTimes, span: int) -> Iterator[tuple[int, int]]:
    """The firings on the critical path of the last ``span`` nanoseconds: (actor, number of its firing)."""
    return ((actor, n) for actor, n, _ in _chain(firings, span))


def _chain(firings: FiringTimes, span: int) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """Like ``critical_firings``, with what each firing waited for in transit: (send, nanoseconds), or None."""
    plan, ends, durations = firings.plan, firings.ends, firings.durations
    orders: dict[int, _QueueOrder] = {}
    for order in plan.orders:
        orders |= dict.fromkeys(order.actors, _QueueOrder(order))
    actor = max(plan.actors, key=lambda a: ends[a.id][-1]).id
    n = len(ends[actor]) - 1
    begin = ends[actor][n] - span
    while (end := ends[actor][n]) > begin:
        start = end - durations[actor]
        before = [(*b, 0) for m in firings.members(actor) if (b := orders[m].before(m, n)) is not None]
        causes = (*before, *firings.needs(actor, n))
        cause = next(((a, i, latency) for a, i, latency in causes if ends[a][i] + latency == start), None)
        if cause is None:
            yield actor, n, None
            return
        other, i, latency = cause
        sends = plan.actor(other).kind == ActorKind.SEND
        yield actor, n, (other if sends else actor, latency) if latency else None
        actor, n = other, i


class _QueueOrder:
    """The order of the firings on one queue, over all iterations."""

    def __init__(self, order: Order) -> None:
        self._order = order.actors
        self._firings: list[tuple[int, int]] = []  # position → (actor, number of its firing in an iteration)
        self._position: dict[tuple[int, int], int] = {}  # the inverse of ``_firings``
        self._rates: dict[int, int] = {}

    def before(self, actor: int, n: int) -> tuple[int, int] | None:
        """The firing before firing n of an actor on its queue, as (actor, number); None for the first of the run."""
        if not self._firings:
            for a in self._order:
                self._rates[a] = self._rates.get(a, 0) + 1
                self._firings.append((a, self._rates[a] - 1))
            self._position = {firing: position for position, firing in enumerate(self._firings)}
        iteration, nth = divmod(n, self._rates[actor])
        position = self._position[actor, nth]
        iteration -= position == 0
        a, i = self._firings[position - 1]
        return (a, iteration * self._rates[a] + i) if iteration >= 0 else None
