"""A plan with frozen orders and the time of each actor enter; when every firing starts and ends leaves.

Registers are private and orders frozen, so when a firing starts follows from when others end: the
one before it on its queue, those that made what it reads, those that freed the slots it writes; of
those on other ranks also from how long a token, or a credit, is under way.
This evaluates these equations, which are the actor machine's rules with the events left out, about
ten times as fast; ``tests/scheduler/test_firing_times.py`` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Plan, Register
from actorflow_scheduler.cost import Durations

Nanoseconds = NDArray[np.int64]  # nanoseconds


class _Queue:
    __slots__ = ("at", "free", "order", "until")

    def __init__(self, order: tuple[_Actor, ...]) -> None:
        self.order = order
        self.at = 0  # firings so far
        self.until = 0
        self.free = 0  # when its last firing ended


class _Actor:
    __slots__ = ("ends", "fired", "id", "lasts", "meeting", "needs", "other_needs", "waiting")

    def __init__(self, id: int, lasts: int) -> None:
        self.id = id
        self.lasts = lasts
        self.fired: list[int] = []
        self.ends: list[int] = []
        self.needs: list[tuple[list[int], int, int, _Actor]] = []  # so long after firing n - offset of another
        self.other_needs: list[tuple[_Actor, int, int, int, int]] = []  # the same where rates differ
        self.waiting: list[_Queue] = []  # queues that wait for its next firing
        self.meeting: _Meeting | None = None


class _Meeting:
    """A collective: it starts when the last of its members was fired and ends for all at once."""

    __slots__ = ("here", "lasts", "members")

    def __init__(self, members: list[_Actor]) -> None:
        self.members = members
        self.lasts = max(m.lasts for m in members)
        self.here: dict[_Queue, _Actor] = {}

    def join(self, actor: _Actor, queue: _Queue, todo: list[_Queue]) -> None:
        """A member comes, at ``queue.free``; the last one sets all queues going."""
        if queue in self.here:
            return
        self.here[queue] = actor
        actor.fired.append(queue.free)
        if len(self.here) < len(self.members):
            return
        end = max(q.free for q in self.here) + self.lasts
        for here, member in self.here.items():
            here.at += 1
            here.free = end
            member.ends.append(end)
            todo += member.waiting
            member.waiting.clear()
            todo.append(here)
        self.here.clear()


class FiringTimes:
    """The firings of some iterations, all called at time 0; ``run`` adds iterations.

    ``fired[a][n]`` is when firing n of actor a takes its slots, ``ends[a][n]`` when it is done and
    ``lasts[a]`` how long it runs, in nanoseconds; a collective's members run when the last of them
    was fired.  Raises PlanError if a queue has no order.
    """

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = plan
        self.iterations = 0
        self._way = times.way
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
            if a.comm is not None and a.comm.kind != "send":
                members.setdefault(a.comm.id, []).append(self._actors[a.id])
        for group in members.values():
            if len(group) > 1:
                meeting = _Meeting(group)
                for member in group:
                    member.meeting = meeting
        self.lasts = {id: a.lasts if a.meeting is None else a.meeting.lasts for id, a in self._actors.items()}
        for register in plan.registers:
            self._join(register)

    def _join(self, register: Register) -> None:
        producer = self._actors[register.producer]
        way = self._way.get(register.producer, 0)
        for read in register.readers:
            reader = self._actors[read.actor]
            self._need(reader, producer, read.firings, register.fill, register.initial, way)
            self._need(producer, reader, register.fill, read.firings, register.slots - register.initial, way)

    def _need(self, who: _Actor, whom: _Actor, per: int, made: int, ahead: int, way: int) -> None:
        """Every ``per`` firings, ``who`` needs one token more, of ``made`` firings of ``whom``; ``ahead`` are free.

        It is under way for ``way`` nanoseconds.
        """
        if per == made == 1:
            who.needs.append((whom.ends, ahead, way, whom))
        else:
            who.other_needs.append((whom, per, made, ahead, way))

    def run(self, iterations: int = 1) -> bool:
        """Add iterations; whether all their firings can happen."""
        self.iterations += iterations
        todo = list(self._queues)
        for queue in todo:
            queue.until += len(queue.order) * iterations
        while todo:
            self._advance(todo.pop(), todo)
        return all(queue.at == queue.until for queue in self._queues)

    def needs(self, actor: int, n: int) -> Iterator[tuple[int, int, int]]:
        """The firings (actor, number) on other queues that firing n of an actor, or of its collective, waits for.

        The third number is how long what they give is under way.
        """
        me = self._actors[actor]
        for a in me.meeting.members if me.meeting is not None else (me,):
            for _, offset, way, other in a.needs:
                if n >= offset:
                    yield other.id, n - offset, way
            for other, per, made, ahead, way in a.other_needs:
                if not n % per and n // per >= ahead:
                    yield other.id, (n // per - ahead + 1) * made - 1, way

    def members(self, actor: int) -> tuple[int, ...]:
        """The actors of an actor's collective, or the actor alone."""
        meeting = self._actors[actor].meeting
        return (actor,) if meeting is None else tuple(m.id for m in meeting.members)

    def _advance(self, queue: _Queue, todo: list[_Queue]) -> None:
        """Fire what a queue can; the queues that this sets going are added to ``todo``."""
        order, at, until, free = queue.order, queue.at, queue.until, queue.free
        size = len(order)
        while at < until:
            actor = order[at % size]
            n = len(actor.ends)
            start = free
            for ends, offset, way, other in actor.needs:
                i = n - offset
                if i >= 0:
                    if i >= len(ends):
                        other.waiting.append(queue)
                        start = -1
                        break
                    end = ends[i] + way
                    if end > start:
                        start = end
            else:
                for other, per, made, ahead, way in actor.other_needs:
                    i = (n // per - ahead + 1) * made - 1
                    if i >= 0 and not n % per:
                        if i >= len(other.ends):
                            other.waiting.append(queue)
                            start = -1
                            break
                        start = max(start, other.ends[i] + way)
            if start < 0:
                break
            if actor.meeting is not None:
                queue.at, queue.free = at, start
                actor.meeting.join(actor, queue, todo)
                return
            at += 1
            free = start + actor.lasts
            actor.fired.append(start)
            actor.ends.append(free)
            if actor.waiting:
                todo += actor.waiting
                actor.waiting.clear()
        queue.at, queue.free = at, free
