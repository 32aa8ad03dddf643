"""Compute when every firing of a scheduled plan starts and ends, from the duration of each actor's firing.

Registers have one producer and queues have frozen orders, so the start of a firing is the latest of a few other times:
the end of the firing before it on its queue, of the firings that made the tokens it reads, and of the firings that
freed the slots it writes.  If such a firing is on another rank, the latency of the token or credit is added.

Evaluating these equations gives the same times as running the actor machines on a virtual clock, about ten times
as fast; ``tests/scheduler/test_firing_times.py`` compares the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Collective, Plan, Register
from actorflow_scheduler.cost import Durations

Nanoseconds = NDArray[np.int64]  # nanoseconds
SIMULATED = 1_000_000  # firings after which ITERATIONS are enough to know the period: these take seconds
ITERATIONS = 3


class _Queue:
    __slots__ = ("at", "free", "order", "until")

    def __init__(self, order: tuple[_Actor, ...]) -> None:
        self.order = order
        self.at = 0  # firings that have ended so far
        self.until = 0  # firings to evaluate
        self.free = 0  # when its last firing ended


class _Actor:
    __slots__ = ("collective", "duration", "ends", "fired", "id", "needs", "other_needs", "waiting")

    def __init__(self, id: int, duration: int) -> None:
        self.id = id
        self.duration = duration
        self.fired = array("q")  # nanoseconds
        self.ends = array("q")
        # Firing n starts no earlier than the end of firing n - offset of another actor, plus a latency:
        # (that actor's ends, offset, latency, that actor).
        self.needs: list[tuple[array[int], int, int, _Actor]] = []
        # The same if the two fire at different rates, as the arguments of ``FiringTimes._need``.
        self.other_needs: list[tuple[_Actor, int, int, int, int]] = []
        self.waiting: list[_Queue] = []  # queues whose next firing waits for this actor's next firing
        self.collective: _Collective | None = None


class _Collective:
    """A collective with several members: it starts when the last of them has fired, and ends for all at once."""

    __slots__ = ("arrived", "duration", "members")

    def __init__(self, members: list[_Actor]) -> None:
        self.members = members
        self.duration = max(m.duration for m in members)
        self.arrived: dict[_Queue, _Actor] = {}

    def join(self, actor: _Actor, queue: _Queue, todo: list[_Queue]) -> None:
        """Let a member fire at ``queue.free``; when all have fired, end the collective and add queues to ``todo``."""
        if queue in self.arrived:
            return
        self.arrived[queue] = actor
        actor.fired.append(queue.free)
        if len(self.arrived) < len(self.members):
            return
        end = max(q.free for q in self.arrived) + self.duration
        for member_queue, member in self.arrived.items():
            member_queue.at += 1
            member_queue.free = end
            member.ends.append(end)
            todo += member.waiting
            member.waiting.clear()
            todo.append(member_queue)
        self.arrived.clear()


class FiringTimes:
    """The times of all firings of some iterations, all of which are called at time 0; ``run`` adds iterations.

    In nanoseconds: firing n of actor a takes its slots at ``fired[a][n]``, ends at ``ends[a][n]``, and runs for
    ``durations[a]``.  The members of a collective start to run when the last of them has fired.  The constructor raises
    PlanError if a queue has no order.
    """

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = plan
        self.iterations = 0
        self._latency = times.latency
        self._actors = {a.id: _Actor(a.id, times.firing[a.id]) for a in plan.actors}
        self.fired = {id: a.fired for id, a in self._actors.items()}
        self.ends = {id: a.ends for id, a in self._actors.items()}
        self._queues = [_Queue(tuple(self._actors[id] for id in o.actors)) for o in plan.orders if o.actors]
        for rank, queue in sorted({(a.rank, a.queue) for a in plan.actors} - {(o.rank, o.queue) for o in plan.orders}):
            raise PlanError(
                f"plan {plan.name!r}: rank {rank}, queue {queue} has no frozen order; "
                "expected one for each queue: run the plan through schedule() first"
            )
        members: dict[int, list[_Actor]] = {}
        for a in plan.actors:
            if isinstance(a.comm, Collective):
                members.setdefault(a.comm.id, []).append(self._actors[a.id])
        for group in members.values():
            if len(group) > 1:
                collective = _Collective(group)
                for member in group:
                    member.collective = collective
        self.durations = {
            id: a.duration if a.collective is None else a.collective.duration for id, a in self._actors.items()
        }
        for register in plan.registers:
            self._join(register)

    def _join(self, register: Register) -> None:
        producer = self._actors[register.producer]
        latency = self._latency.get(register.producer, 0)
        for read in register.readers:
            reader = self._actors[read.actor]
            self._need(reader, producer, read.firings, register.fill, register.initial, latency)
            self._need(producer, reader, register.fill, read.firings, register.slots - register.initial, latency)

    def _need(self, who: _Actor, whom: _Actor, per: int, made: int, ahead: int, latency: int) -> None:
        """Note that ``who`` needs a token or slot every ``per`` firings, for which ``whom`` fires ``made`` times.

        The first ``ahead`` tokens or slots are there from the start.  The others arrive ``latency`` nanoseconds after
        the last of those firings ends.
        """
        if per == made == 1:
            who.needs.append((whom.ends, ahead, latency, whom))
        else:
            who.other_needs.append((whom, per, made, ahead, latency))

    @property
    def is_long(self) -> bool:
        """Whether more iterations would take long, and those that there are say nearly as much of later ones."""
        return self.iterations >= ITERATIONS and sum(queue.at for queue in self._queues) >= SIMULATED

    def run(self, iterations: int = 1) -> bool:
        """Evaluate more iterations; return False if the plan gets stuck before all their firings have happened."""
        self.iterations += iterations
        todo = list(self._queues)
        for queue in todo:
            queue.until += len(queue.order) * iterations
        while todo:
            self._advance(todo.pop(), todo)
        return all(queue.at == queue.until for queue in self._queues)

    def needs(self, actor: int, n: int) -> Iterator[tuple[int, int, int]]:
        """The firings for whose tokens or slots firing n of an actor, or of its collective, waits.

        Yields (actor, number of its firing, latency in nanoseconds of its token or credit).
        """
        me = self._actors[actor]
        for a in me.collective.members if me.collective is not None else (me,):
            for _, offset, latency, other in a.needs:
                if n >= offset:
                    yield other.id, n - offset, latency
            for other, per, made, ahead, latency in a.other_needs:
                if not n % per and n // per >= ahead:
                    yield other.id, (n // per - ahead + 1) * made - 1, latency

    def members(self, actor: int) -> tuple[int, ...]:
        """The actors of an actor's collective, or the actor alone."""
        collective = self._actors[actor].collective
        return (actor,) if collective is None else tuple(m.id for m in collective.members)

    def _advance(self, queue: _Queue, todo: list[_Queue]) -> None:
        """Evaluate the firings of a queue until one must wait; add the queues that may go on then to ``todo``."""
        order, at, until, free = queue.order, queue.at, queue.until, queue.free
        size = len(order)
        while at < until:
            actor = order[at % size]
            n = len(actor.ends)
            start = free
            for ends, offset, latency, other in actor.needs:
                i = n - offset
                if i >= 0:
                    if i >= len(ends):
                        other.waiting.append(queue)
                        start = -1
                        break
                    end = ends[i] + latency
                    if end > start:
                        start = end
            else:
                for other, per, made, ahead, latency in actor.other_needs:
                    i = (n // per - ahead + 1) * made - 1
                    if i >= 0 and not n % per:
                        if i >= len(other.ends):
                            other.waiting.append(queue)
                            start = -1
                            break
                        start = max(start, other.ends[i] + latency)
            if start < 0:
                break
            if actor.collective is not None:
                queue.at, queue.free = at, start
                actor.collective.join(actor, queue, todo)
                return
            at += 1
            free = start + actor.duration
            actor.fired.append(start)
            actor.ends.append(free)
            if actor.waiting:
                todo += actor.waiting
                actor.waiting.clear()
        queue.at, queue.free = at, free
