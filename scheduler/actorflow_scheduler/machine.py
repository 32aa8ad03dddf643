"""The actor state machine of one rank, which turns events into instructions, such as to fire an actor.

An actor fires when each register it reads holds a token, each register it writes has a free slot,
an iteration was called for it, and it is its turn on its queue.  There is no I/O, no clock and no tensor here: a
worker drives the machine in a real run, the liveness proof in a simulated one.

>>> machine = Machine(plan, rank=0)
>>> machine.handle(CallIssued())
[Fire(actor=0, firing=0, reads=(), writes=((0, 0, True),))]
>>> machine.handle(ActorFinished(0))
[Fire(actor=1, firing=0, reads=((0, 0, True),), writes=())]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Actor, Order, Plan, Register
from actorflow_scheduler.events import (
    ActorFinished,
    CallIssued,
    CreditReturned,
    Event,
    Fire,
    GiveCredit,
    IllegalEvent,
    Instruction,
    Release,
    TokenArrived,
    TokenUse,
    Wait,
    WaitReason,
    explain,
    name,
)

__all__ = [
    "TokenArrived",
    "CreditReturned",
    "Event",
    "ActorFinished",
    "Fire",
    "GiveCredit",
    "TokenUse",
    "IllegalEvent",
    "Instruction",
    "CallIssued",
    "Machine",
    "Release",
    "Wait",
    "WaitReason",
]

HISTORY = 8  # events that an actor or register keeps for error messages


class _Queue:
    """A queue of the rank; it runs one actor at a time, in a frozen order."""

    __slots__ = ("head", "name", "order", "position", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.order: tuple[_Actor, ...] = ()
        self.position = 0
        self.head: _Actor | None = None
        self.running: _Actor | None = None


class _Actor:
    __slots__ = ("fired", "history", "id", "inputs", "limit", "missing", "outputs", "queue", "rate")

    def __init__(self, actor: Actor, queue: _Queue) -> None:
        self.id = actor.id
        self.rate = actor.rate
        self.queue = queue
        self.inputs: tuple[_Reader, ...] = ()
        self.outputs: tuple[_Register, ...] = ()
        self.fired = 0
        self.limit = 0  # firings that the calls so far allow
        self.missing = 0  # unmet conditions of the next firing: empty or full registers, no iteration called
        self.history: deque[object] = deque(maxlen=HISTORY)


class _Register:
    __slots__ = (
        "begun",
        "complete",
        "fill",
        "filled_remotely",
        "history",
        "id",
        "producer",
        "read_remotely",
        "readers",
        "released",
        "slots",
    )

    def __init__(self, register: Register, filled_remotely: bool, read_remotely: bool) -> None:
        self.id = register.id
        self.slots = register.slots
        self.fill = register.fill
        self.begun = register.initial  # tokens that have got a slot so far, including the initial ones
        self.complete = register.initial
        self.released = 0
        self.filled_remotely = filled_remotely
        self.read_remotely = read_remotely
        self.producer: _Actor | None = None
        self.readers: tuple[_Reader, ...] = ()
        self.history: deque[object] = deque(maxlen=HISTORY)


class _Reader:
    """One actor that reads one register."""

    __slots__ = ("actor", "done", "firings", "register")

    def __init__(self, actor: _Actor, register: _Register, firings: int) -> None:
        self.actor = actor
        self.register = register
        self.firings = firings
        self.done = 0  # tokens that it has finished reading


class Machine:
    """One rank's actors, registers and queues.

    ``plan`` is a whole plan or ``plan.for_rank(rank)``.  The constructor raises PlanError if a queue has no order.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self._left = 0  # firings of all calls that have not ended
        self._queues: dict[str, _Queue] = {}
        self._actors: dict[int, _Actor] = {}
        self._registers: dict[int, _Register] = {}
        own = plan.of_rank(rank)
        for actor in own.actors:
            if actor.rank == rank:
                queue = self._queues.setdefault(actor.queue, _Queue(actor.queue))
                self._actors[actor.id] = _Actor(actor, queue)
        for register in own.registers:
            self._join(register)
        for a in self._actors.values():
            a.missing = 1 + sum(_is_empty(e) for e in a.inputs) + sum(_is_full(r, a) for r in a.outputs)
        self._firings = sum(a.rate for a in self._actors.values())
        self._freeze(own.orders)
        self._handlers: dict[type, Callable[..., list[Instruction]]] = {
            ActorFinished: self._finished,
            TokenArrived: self._arrived,
            CreditReturned: self._credited,
            CallIssued: self._issued,
        }

    def _join(self, register: Register) -> None:
        local = register.producer in self._actors
        here = self.plan.home(register) == self.rank
        r = self._registers[register.id] = _Register(register, filled_remotely=not local, read_remotely=not here)
        if local:
            r.producer = self._actors[register.producer]
            r.producer.outputs += (r,)
        if here:
            r.readers = tuple(_Reader(self._actors[read.actor], r, read.firings) for read in register.readers)
            for e in r.readers:
                e.actor.inputs += (e,)

    def _freeze(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if order.actors:
                queue = self._queues[order.queue]
                queue.order = tuple(self._actors[id] for id in order.actors)
                queue.head = queue.order[0]
        for queue in self._queues.values():
            if not queue.order:
                raise PlanError(
                    f"plan {self.plan.name!r}: rank {self.rank}, queue {queue.name} has no frozen order; "
                    "expected one for each queue: run the plan through schedule() first"
                )

    def handle(self, event: Event) -> list[Instruction]:
        """Process one event; return instructions: tokens to drop and credits to send first, then actors to fire.

        Raises IllegalEvent if the event cannot have happened.
        """
        return self._handlers[type(event)](event)

    def idle(self) -> bool:
        """Whether every iteration that was called has ended on this rank."""
        return self._left == 0

    def _issued(self, event: CallIssued) -> list[Instruction]:
        out: list[Instruction] = []
        self._left += self._firings
        for actor in self._actors.values():
            if actor.fired == actor.limit:
                actor.missing -= 1
            actor.limit += actor.rate
        for queue in self._queues.values():
            if queue.running is None and queue.head is not None and not queue.head.missing:
                self._fire(queue.head, out)
        return out

    def _finished(self, event: ActorFinished) -> list[Instruction]:
        actor = self._actors.get(event.actor)
        if actor is None or actor.queue.running is not actor:
            raise self._illegal(event, actor, "the actor is not running on this rank")
        actor.history.append(event)
        self._left -= 1
        out: list[Instruction] = []
        woken: list[_Actor] = []
        fired = actor.fired
        for e in actor.inputs:
            if e.firings == 1 or not fired % e.firings:
                r = e.register
                e.done += 1
                if len(r.readers) == 1 or (e.done == r.released + 1 and all(x.done > r.released for x in r.readers)):
                    self._release(r, out, woken)
        for r in actor.outputs:
            if (r.fill == 1 or not fired % r.fill) and not r.read_remotely:
                self._complete(r, out, woken)
        queue = actor.queue
        queue.running = None
        head = queue.head
        if head is not None and not head.missing:
            self._fire(head, out)
        if woken:
            self._wake(woken, out)
        return out

    def _arrived(self, event: TokenArrived) -> list[Instruction]:
        r = self._registers.get(event.register)
        if r is None or not r.filled_remotely or r.complete - r.released >= r.slots:
            raise self._illegal(event, r, "no slot of such a register was free on this rank")
        r.history.append(event)
        r.begun += 1
        out: list[Instruction] = []
        woken: list[_Actor] = []
        self._complete(r, out, woken)
        self._wake(woken, out)
        return out

    def _credited(self, event: CreditReturned) -> list[Instruction]:
        r = self._registers.get(event.register)
        if r is None or not r.read_remotely or r.begun == r.released:
            raise self._illegal(event, r, "no slot of such a register was taken by this rank")
        r.history.append(event)
        out: list[Instruction] = []
        woken: list[_Actor] = []
        self._free_slot(r, woken)
        self._wake(woken, out)
        return out

    def _complete(self, r: _Register, out: list[Instruction], woken: list[_Actor]) -> None:
        """Count a token as complete: its last firing ended, or it arrived from another rank."""
        sequence = r.complete
        r.complete = sequence + 1
        for e in r.readers:
            actor = e.actor
            if actor.fired == sequence if e.firings == 1 else actor.fired // e.firings == sequence:
                actor.missing -= 1
                if not actor.missing:
                    woken.append(actor)
        if not r.readers:
            self._release(r, out, woken)

    def _release(self, r: _Register, out: list[Instruction], woken: list[_Actor]) -> None:
        """Free the oldest token's slot: its last reader is done with it."""
        out.append(Release(r.id, r.released))
        if r.filled_remotely:
            r.released += 1
            out.append(GiveCredit(r.id))
        else:
            self._free_slot(r, woken)

    def _free_slot(self, r: _Register, woken: list[_Actor]) -> None:
        producer = r.producer
        assert producer is not None
        if r.begun - r.released == r.slots and not producer.fired % r.fill:
            producer.missing -= 1
            if not producer.missing:
                woken.append(producer)
        r.released += 1

    def _wake(self, woken: list[_Actor], out: list[Instruction]) -> None:
        """Fire the given actors that are at the head of an idle queue."""
        for actor in woken:
            if actor.queue.head is actor and actor.queue.running is None:
                self._fire(actor, out)

    def _fire(self, actor: _Actor, out: list[Instruction]) -> None:
        """Start the actor's next firing and count the unmet conditions of the one after it."""
        firing = actor.fired
        after = firing + 1
        reads: list[TokenUse] = []
        writes: list[TokenUse] = []
        missing = 0
        for e in actor.inputs:
            r = e.register
            if e.firings == 1:
                reads.append((r.id, firing, True))
                if r.complete == after:
                    missing += 1
            else:
                sequence = firing // e.firings
                last = not after % e.firings
                reads.append((r.id, sequence, last))
                if last and r.complete == sequence + 1:
                    missing += 1
        for r in actor.outputs:
            if r.fill == 1:
                writes.append((r.id, r.begun, True))
                r.begun += 1
                if r.begun - r.released == r.slots:
                    missing += 1
            else:
                if not firing % r.fill:
                    r.begun += 1
                last = not after % r.fill
                writes.append((r.id, r.begun - 1, last))
                if last and r.begun - r.released == r.slots:
                    missing += 1
        actor.fired = after
        actor.missing = missing if after != actor.limit else missing + 1
        queue = actor.queue
        queue.running = actor
        if queue.order:
            queue.position = position = (queue.position + 1) % len(queue.order)
            queue.head = queue.order[position]
        fire = Fire(actor.id, firing, tuple(reads), tuple(writes))
        actor.history.append(fire)
        out.append(fire)

    def _illegal(self, event: Event, about: _Actor | _Register | None, why: str) -> IllegalEvent:
        last = "unknown here" if about is None else ", ".join(map(str, about.history)) or "nothing happened to it yet"
        return IllegalEvent(f"plan {self.plan.name!r}, rank {self.rank}: {event}: {why}; its last events: {last}")

    def tokens(self) -> dict[int, tuple[int, int]]:
        """Register → (complete tokens, tokens being written or in transit) in its slots."""
        return {
            r.id: (r.begun - r.released, 0) if r.read_remotely else (r.complete - r.released, r.begun - r.complete)
            for r in self._registers.values()
        }

    def unfinished(self) -> list[int]:
        """The actors that have firings left or are running."""
        return [a.id for a in self._actors.values() if a.fired < a.limit or a.queue.running is a]

    def finished(self, actor: int) -> int:
        """How many firings of an actor have ended, over all iterations."""
        a = self._actors[actor]
        return a.fired - (a.queue.running is a)

    def moved(self) -> int:
        """A counter that grows with every event: equal values mean that nothing happened in between."""
        fired = sum(2 * a.fired - (a.queue.running is a) for a in self._actors.values())
        return fired + sum(r.begun + r.complete + r.released for r in self._registers.values())

    def laggards(self, register: int) -> tuple[int, ...]:
        """The readers that still need a register's oldest token; all readers if they are on another rank."""
        r = self._registers[register]
        if r.read_remotely:
            return tuple(read.actor for read in self.plan.register(register).readers)
        return tuple(e.actor.id for e in r.readers if e.done == r.released)

    def waits(self, actor: int) -> list[Wait]:
        """The reasons why an actor cannot fire now; empty if it is running or ready."""
        a = self._actors[actor]
        queue = a.queue
        if queue.running is a:
            return []
        ahead = queue.running or queue.head
        if ahead is not None and ahead is not a:
            return [Wait(actor, WaitReason.TURN, -1, (ahead.id,))]
        found = [
            Wait(actor, WaitReason.EMPTY, e.register.id, (self.plan.register(e.register.id).producer,))
            for e in a.inputs
            if _is_empty(e)
        ]
        found += [Wait(actor, WaitReason.FULL, r.id, self.laggards(r.id)) for r in a.outputs if _is_full(r, a)]
        if a.fired == a.limit:
            found.append(Wait(actor, WaitReason.CALL, -1, ()))
        return found

    def waiting(self) -> list[str]:
        """A line for each queue with work left: what its next actor waits for, and which actors could end the wait."""
        lines: list[str] = []
        for queue in self._queues.values():
            mine = (a for a in self._actors.values() if a.queue is queue and a.fired < a.limit)
            heads = [queue.head] if queue.head is not None else list(mine)
            if queue.running is not None:
                lines.append(f"queue {queue.name}: {name(self.plan, queue.running.id)} is running")
                continue
            for head in heads:
                if head.fired < head.limit:
                    why = " and ".join(explain(self.plan, w) for w in self.waits(head.id)) or "could fire"
                    lines.append(f"queue {queue.name}: {name(self.plan, head.id)} {why}")
        return lines


def _is_empty(reader: _Reader) -> bool:
    return reader.register.complete <= reader.actor.fired // reader.firings


def _is_full(register: _Register, producer: _Actor) -> bool:
    return not producer.fired % register.fill and register.begun - register.released >= register.slots
