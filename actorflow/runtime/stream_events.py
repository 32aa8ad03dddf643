"""Order the firings of one rank on its device, by stream events (marks) that queues record and wait for.

On a device that runs ahead of the host, the machine learns that an actor has finished when its work is launched, not
when it is done.  So the device must keep the machine's order, too: a token is read after it is written, a slot is
written again after its last token is read, and the firings of a queue follow each other.  Each queue of the device is
in order by itself, which gives the third.  For the other two, a queue records a mark, and the queue of the reader or
of the next writer waits for it.  Variables are ordered in the same way, by registers without tensors between the
actors that read a variable and the one that writes it.

The caching allocator gives the memory of a freed token back to the queue that made it.  If another queue reads the
token, ``RegisterEvents`` keeps it alive until the maker's queue has waited for the readers' marks, or these have
passed.  The host never waits, and no register holds more tokens than it has slots.

On a CPU, work is done when its call returns: all queues are one null queue, so no register needs marks.
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

Holder = list[Token]  # keeps one token alive; emptied when its memory may be freed
NO_MEMORY: frozenset[int] = frozenset()


class RegisterEvents:
    """The marks of the slots of one register whose maker and a reader are on different queues."""

    __slots__ = ("_count", "_held", "_made", "_read", "_slots", "maker")

    def __init__(self, register: Register, slots: Slots, maker: Queue) -> None:
        self.maker = maker
        self._slots = slots
        self._count = register.slots
        self._made: list[Mark | None] = [None] * register.slots
        self._read: list[dict[str, Mark]] = [{} for _ in range(register.slots)]  # by queue: mark of its last read
        self._held: list[Holder] = [[] for _ in range(register.slots)]
        for slot in range(register.initial):
            self._hold(slot)

    def made(self, sequence: int, mark: Mark | None) -> None:
        """Note that a token, which is in its slot, is complete on the device when ``mark`` has passed."""
        slot = sequence % self._count
        self._made[slot] = mark
        self._hold(slot)

    def ready(self, sequence: int) -> Mark | None:
        """The mark after the work that made a token; None for an initial token."""
        return self._made[sequence % self._count]

    def read(self, sequence: int, queue: Queue, mark: Mark) -> None:
        """Note that a queue is done reading a token when ``mark`` has passed."""
        self._read[sequence % self._count][queue.name] = mark

    def reuse(self, sequence: int) -> tuple[list[Mark], Holder]:
        """Prepare to write token ``sequence`` into its slot, over the token that was there before.

        Returns the marks of the old token's readers, to wait for, and its holder, to clear once the wait is launched.
        """
        slot = sequence % self._count
        marks, held = self._read[slot], self._held[slot]
        self._read[slot], self._held[slot] = {}, []
        return list(marks.values()), held

    def released(self, sequence: int) -> tuple[list[Mark], Holder]:
        """The marks of a token's reads, all of which are launched, and its holder, to clear when they have passed."""
        slot = sequence % self._count
        return list(self._read[slot].values()), self._held[slot]

    def _hold(self, slot: int) -> None:
        token = self._slots.held(slot)
        self._held[slot] = [token] if token is not None else []


@dataclass(frozen=True, slots=True)
class EventWaits:
    """The marks that a queue must wait for before one firing, and the tokens that may be freed after that."""

    queue: Queue
    marks: Sequence[Mark | None]
    dying: Sequence[Holder]

    def begin(self) -> None:
        """Make the queue wait, and free the tokens.  Does not block the host."""
        for mark in self.marks:
            self.queue.wait(mark)
        for holder in self.dying:
            holder.clear()


@dataclass(frozen=True, slots=True)
class ActorStream:
    """The queue of one actor on the device, and the marks that its firings wait for and record."""

    device: Device
    queue: Queue
    reads: tuple[tuple[int, RegisterEvents], ...]  # (position in a firing's reads, register that another queue fills)
    writes: tuple[tuple[int, RegisterEvents], ...]  # (position in a firing's writes, register used by two queues)
    foreign: tuple[int, ...]  # operands in memory of another queue or of the caller, of which outputs may be views
    inputs: tuple[int, ...]  # operands that the caller passed and that may lie in host memory; empty on a CPU
    prepares: bool  # all tensor operands are the caller's: it runs on the host, and outputs are copied to the device
    ordered: bool  # it reads or writes registers used by two queues, so firings wait for marks or record them
    moves: bool  # operands or outputs may have to be copied, so ``place`` and ``own`` must be called

    def waits(self, fire: Fire) -> EventWaits:
        """The marks that a firing must wait for, and the tokens that it may free."""
        marks = [events.ready(fire.reads[at][1]) for at, events in self.reads]
        dying = []
        for at, events in self.writes:
            readers, held = events.reuse(fire.writes[at][1])
            marks += readers
            dying.append(held)
        once = {id(mark): mark for mark in marks if mark is not None}  # one firing may have made several of the tokens
        return EventWaits(self.queue, tuple(once.values()), dying)

    def place(self, values: list[Any]) -> frozenset[int]:
        """Replace operands in the list by copies on the device where needed.  Call it inside the queue's context.

        Returns the addresses of storages that outputs must not share, because the memory may be freed, or changed by
        the caller, before the readers of the outputs are done.  Pass them to ``own``.
        """
        given = [values[at] for at in self.inputs]
        self.queue.use(given)
        memory = frozenset(_memory(values[at]) for at in self.foreign)
        if not self.prepares:
            for at, value in zip(self.inputs, self.device.to_device(given), strict=True):
                values[at] = value
        return memory

    def own(self, outputs: Sequence[Any], memory: frozenset[int]) -> Sequence[Any]:
        """The outputs of a firing, on the device; those in ``memory``, which ``place`` returned, are copied."""
        if self.prepares:
            outputs = self.device.to_device(outputs)
        if memory:
            outputs = [out.clone() if out.numel() and _memory(out) in memory else out for out in outputs]
        return outputs

    def end(self, fire: Fire, result: bool = False) -> Mark | None:
        """Record a mark after the work of a firing, note it in the registers, and return it.

        Returns None if nobody will wait for it: no register used by two queues, and no ``result`` for the host.
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
    """The marks of a plan's registers on one rank, and the tokens to free.  For the compute thread, except ``bring``.

    ``registers`` are the registers that two queues use: none on a CPU.  ``leaving`` holds the tokens whose reads have
    all been launched, with the marks of these reads.
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
            for slot in range(register.initial):  # initial tokens were allocated by the thread that installs the plan
                for reader in readers:
                    reader.use(slots[register.id].held(slot) or ())
            if any(reader != queue for reader in readers):
                self.registers[register.id] = RegisterEvents(register, slots[register.id], queue)

    def actor_stream(self, actor: Actor, host: bool) -> ActorStream:
        """The ``ActorStream`` of an actor; ``host`` says that its body can also run on tensors in host memory."""
        plan, known, queue = self._plan, self.registers, self._device.queue(actor.queue)
        reads = [(at, known[r.id]) for at, r in enumerate(plan.inputs_of[actor.id]) if r.id in known]
        writes = [(at, known[r.id]) for at, r in enumerate(plan.outputs_of[actor.id]) if r.id in known]
        away = {r.id for r in plan.inputs_of[actor.id] if r.id in known and known[r.id].maker != queue}
        ahead = self._device.ahead  # else inputs are used where they lie; they stay unchanged until the call is done
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
        """Bring a token of another rank to the device once its slot is free there.

        ``take`` receives it inside the queue's context.  Returns the token and the mark after which it may be read.
        For the thread that receives the token.
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
        """Note that a token from another rank, which is in its slot, is complete when the mark has passed."""
        events = self.registers.get(register)
        if events is not None:
            events.made(sequence, mark)

    def release(self, register: int, sequence: int) -> None:
        """Note that all reads of a token are launched; ``sweep`` frees it when they are done."""
        events = self.registers.get(register)
        if events is not None:
            self.leaving.append(events.released(sequence))

    def sweep(self) -> None:
        """Free the tokens whose reads are done on the device."""
        leaving = self.leaving
        while leaving and all(mark.passed() for mark in leaving[0][0]):
            leaving.popleft()[1].clear()


def receiving(peer: int) -> str:
    """The name of the queue that receives tokens of another rank."""
    return f"receive:{peer}"


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def barrier(before: Iterable[Queue], after: Iterable[Queue]) -> None:
    """Make work that is put into the queues ``after`` from now on wait for all work now in the queues ``before``."""
    queues = list(after)
    for queue in before:
        mark = queue.mark()
        for other in queues:
            if other != queue:
                other.wait(mark)
