"""Order the firings of one rank on its device, by stream events (marks) that queues record and wait for.

On a device that runs ahead of the host the machine is told that an actor has finished when its work is launched.
What the machine keeps apart must then be kept apart on the device, too: a token is read after it is written, a slot is
written again after the last token in it is read, and a queue's firings follow each other.  A queue of the device sees
to the last itself.  For the other two, a queue records a mark, and the reader's or the next writer's queue waits for
it.  Variables are ordered as well, by registers without tensors between their readers and their writer.

The caching allocator gives a token's memory back to the queue that made it.  Where another queue reads the token,
``RegisterEvents`` holds it until the maker's queue has waited for its readers, or they have passed.  The host never
waits, and no register holds more tokens than it has slots.

On a CPU work is done when its call returns: all queues are one null queue, so no register needs events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actorflow.devices import Device, Mark, Queue
from actorflow.runtime.slots import Slots, Token
from actorflow_compiler.plan.plan import Actor, FromRegister, OfInput, OfPiece, OfScalar, Plan, Register
from actorflow_scheduler.machine import Fire

__all__ = ["NO_MEMORY", "ActorStream", "EventWaits", "RegisterEvents", "StreamEvents", "barrier"]

Holder = list[Token]  # one token; empty once the token may die
NO_MEMORY: frozenset[int] = frozenset()


class RegisterEvents:
    """The marks of one register's slots, where its maker and a reader are on different queues."""

    __slots__ = ("_count", "_held", "_made", "_read", "_slots", "maker")

    def __init__(self, register: Register, slots: Slots, maker: Queue) -> None:
        self.maker = maker
        self._slots = slots
        self._count = register.slots
        self._made: list[Mark | None] = [None] * register.slots
        self._read: list[dict[str, Mark]] = [{} for _ in range(register.slots)]  # by queue: its last reading
        self._held: list[Holder] = [[] for _ in range(register.slots)]
        for slot in range(register.initial):
            self._hold(slot)

    def made(self, sequence: int, mark: Mark | None) -> None:
        """A token is complete, and in its slot, when ``mark`` has passed."""
        slot = sequence % self._count
        self._made[slot] = mark
        self._hold(slot)

    def ready(self, sequence: int) -> Mark | None:
        """The mark of what made a token; None for one that was there from the start."""
        return self._made[sequence % self._count]

    def read(self, sequence: int, queue: Queue, mark: Mark) -> None:
        """A queue has read a token when ``mark`` has passed."""
        self._read[sequence % self._count][queue.name] = mark

    def reuse(self, sequence: int) -> tuple[list[Mark], Holder]:
        """Before a token is made: the marks of who read the one before in its slot, and that one, to let go of then."""
        slot = sequence % self._count
        marks, held = self._read[slot], self._held[slot]
        self._read[slot], self._held[slot] = {}, []
        return list(marks.values()), held

    def released(self, sequence: int) -> tuple[list[Mark], Holder]:
        """All readings of a token are launched: their marks, and the token, to let go of when they have passed."""
        slot = sequence % self._count
        return list(self._read[slot].values()), self._held[slot]

    def _hold(self, slot: int) -> None:
        token = self._slots.held(slot)
        self._held[slot] = [token] if token is not None else []


@dataclass(frozen=True, slots=True)
class EventWaits:
    """What a queue has to wait for before one firing, and the tokens that may die once it does."""

    queue: Queue
    marks: Sequence[Mark | None]
    dying: Sequence[Holder]

    def begin(self) -> None:
        """Let the queue wait."""
        for mark in self.marks:
            self.queue.wait(mark)
        for holder in self.dying:
            holder.clear()


@dataclass(frozen=True, slots=True)
class ActorStream:
    """The queue of one actor on the device, and the marks that its firings wait for and record."""

    device: Device
    queue: Queue
    reads: tuple[tuple[int, RegisterEvents], ...]  # (position in the reads of a firing, register) made by another
    writes: tuple[tuple[int, RegisterEvents], ...]  # (position in the writes, register) that another queue reads
    foreign: tuple[int, ...]  # operands in memory of another queue, or of the caller, that outputs may be views of
    inputs: tuple[int, ...]  # operands that the caller gave, on a device: they may lie in host memory
    prepares: bool  # takes only what the caller gave: it runs in host memory, and its outputs are copied to the device
    ordered: bool  # a firing has to wait for, or to record, marks: it reads or writes registers of two queues
    moves: bool  # operands or outputs may have to be copied: ``place`` and ``own`` are not for nothing

    def waits(self, fire: Fire) -> EventWaits:
        """What a firing has to wait for."""
        marks = [events.ready(fire.reads[at][1]) for at, events in self.reads]
        dying = []
        for at, events in self.writes:
            readers, held = events.reuse(fire.writes[at][1])
            marks += readers
            dying.append(held)
        once = {id(mark): mark for mark in marks if mark is not None}  # one firing may have made several of the tokens
        return EventWaits(self.queue, tuple(once.values()), dying)

    def place(self, values: list[Any]) -> frozenset[int]:
        """Copy operands to the device where needed, in the list, inside the queue's context.

        Returns the addresses of memory that outputs may not keep, as it is given back, or changed by the caller,
        without regard to the outputs' readers: pass it to ``own``.
        """
        given = [values[at] for at in self.inputs]
        self.queue.use(given)
        memory = frozenset(_memory(values[at]) for at in self.foreign)
        if not self.prepares:
            for at, value in zip(self.inputs, self.device.to_device(given), strict=True):
                values[at] = value
        return memory

    def own(self, outputs: Sequence[Any], memory: frozenset[int]) -> Sequence[Any]:
        """The outputs of a firing on the device, copied where they lie in ``memory`` (see ``place``)."""
        if self.prepares:
            outputs = self.device.to_device(outputs)
        if memory:
            outputs = [out.clone() if out.numel() and _memory(out) in memory else out for out in outputs]
        return outputs

    def end(self, fire: Fire, result: bool = False) -> Mark | None:
        """Record a mark after all that the firing has launched; None where nobody can wait for it.

        Other queues can wait for it, and for a ``result`` the host.
        """
        made = [(events, fire.writes[at][1]) for at, events in self.writes if fire.writes[at][2]]
        if not (made or self.reads or result):
            return None
        mark = self.queue.mark()
        for at, events in self.reads:
            events.read(fire.reads[at][1], self.queue, mark)
        for events, sequence in made:
            events.made(sequence, mark)
        return mark


class StreamEvents:
    """The marks of a plan's registers on one rank, and the tokens to let go of.  For the compute thread.

    ``registers`` are those that two queues use: none on a CPU.  ``leaving`` holds tokens whose readings have all been
    launched, with the marks of these readings.
    """

    def __init__(self, plan: Plan, rank: int, device: Device, slots: Mapping[int, Slots]) -> None:
        self._plan = plan
        self._device = device
        self.registers: dict[int, RegisterEvents] = {}
        self.leaving: deque[tuple[list[Mark], Holder]] = deque()
        for register in plan.registers:
            if register.id not in slots:
                continue
            producer = plan.actor(register.producer)
            queue = device.queue(producer.queue if producer.rank == rank else receiving(producer.rank))
            readers = [device.queue(plan.actor(read.actor).queue) for read in register.readers]
            for slot in range(register.initial):  # their memory comes from the thread that installs the plan
                for reader in readers:
                    reader.use(slots[register.id].held(slot) or ())
            if any(reader != queue for reader in readers):
                self.registers[register.id] = RegisterEvents(register, slots[register.id], queue)

    def actor_stream(self, actor: Actor, host: bool) -> ActorStream:
        """The queue of an actor and its marks; ``host`` where its body would run in host memory as well."""
        plan, known, queue = self._plan, self.registers, self._device.queue(actor.queue)
        reads = [(at, known[r.id]) for at, r in enumerate(plan.inputs_of[actor.id]) if r.id in known]
        writes = [(at, known[r.id]) for at, r in enumerate(plan.outputs_of[actor.id]) if r.id in known]
        away = {r.id for r in plan.inputs_of[actor.id] if r.id in known and known[r.id].maker != queue}
        ahead = self._device.ahead  # else inputs lie where they are used, unchanged until the call is done
        inputs = tuple(i for i, o in enumerate(actor.operands) if ahead and isinstance(o, OfInput))
        keeps = any(isinstance(target, FromRegister) for target in actor.targets)
        prepares = host and bool(inputs) and all(isinstance(o, OfInput | OfScalar | OfPiece) for o in actor.operands)
        foreign = tuple(
            i
            for i, o in enumerate(actor.operands)
            if keeps and (i in inputs or (isinstance(o, FromRegister) and o.register in away))
        )
        return ActorStream(
            device=self._device,
            queue=queue,
            reads=tuple((at, events) for at, events in reads if events.maker != queue),
            writes=tuple(writes),
            foreign=foreign,
            inputs=inputs,
            prepares=prepares,
            ordered=bool(reads or writes),
            moves=bool(inputs or foreign),
        )

    def bring(
        self, register: int, sequence: int, take: Callable[[], Sequence[Tensor]]
    ) -> tuple[Sequence[Tensor], Mark]:
        """Put a token of another rank on the device, when its slot there is free: what ``take`` returns, and its mark.

        On the thread that receives the token.
        """
        waits = self._receive(register, sequence)
        with waits.queue.context():
            waits.begin()
            return take(), waits.queue.mark()

    def _receive(self, register: int, sequence: int) -> EventWaits:
        events = self.registers.get(register)
        if events is None:
            producer = self._plan.actor(self._plan.register(register).producer)
            return EventWaits(self._device.queue(receiving(producer.rank)), (), ())
        marks, held = events.reuse(sequence)
        return EventWaits(events.maker, marks, [held])

    def received(self, register: int, sequence: int, mark: Mark | None) -> None:
        """A token from another rank is in its slot when the mark has passed."""
        events = self.registers.get(register)
        if events is not None:
            events.made(sequence, mark)

    def release(self, register: int, sequence: int) -> None:
        """All readings of a token are launched."""
        events = self.registers.get(register)
        if events is not None:
            self.leaving.append(events.released(sequence))

    def sweep(self) -> None:
        """Let go of the tokens whose readings have passed."""
        leaving = self.leaving
        while leaving and all(mark.passed() for mark in leaving[0][0]):
            leaving.popleft()[1].clear()


def receiving(peer: int) -> str:
    """The name of the queue on which tokens of another rank come in."""
    return f"receive:{peer}"


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def barrier(before: Iterable[Queue], after: Iterable[Queue]) -> None:
    """Let all that is put into the queues ``after`` from now on wait for all that is in the queues ``before``."""
    queues = list(after)
    for queue in before:
        mark = queue.mark()
        for other in queues:
            if other != queue:
                other.wait(mark)
