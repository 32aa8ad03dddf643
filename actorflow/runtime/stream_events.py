"""Firings of one rank enter in the order in which they are launched; marks leave that order them on a device.

On a device that runs ahead the machine is told that an actor has finished when its work is launched.  What
the machine's rules keep apart must then be kept apart by the queues of the device: a token before its
readers, the readers of a slot before the next token in it, and the firings of each queue.  The last a queue
does itself; the first two are marks, which a register's trail holds.  So variables are ordered, too: registers
without tensors keep their readers and their writer in turn.

A token's memory comes from the queue that makes it, and goes back to what that queue does next.  So where
another queue reads it, the trail holds the token until the maker's queue has waited for its readers, or
until they have passed; nothing is ever waited for on the host, and no register holds more tokens than slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actorflow.devices import Device, Mark, Queue
from actorflow.runtime.slots import Slots, Token
from actorflow_compiler.plan.plan import Actor, FromRegister, OfInput, OfPiece, OfScalar, Plan, Register
from actorflow_scheduler.machine import Fire

__all__ = ["Passage", "Trail", "Trails", "Waits"]

Holder = list[Token]  # one token, or none once it may die


class Trail:
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
class Waits:
    """What a queue has to wait for before one firing, and the tokens that may die when it has been told to."""

    queue: Queue
    marks: Sequence[Mark | None]
    dying: Sequence[Holder]

    def begin(self) -> None:
        """Tell the queue."""
        for mark in self.marks:
            self.queue.wait(mark)
        for holder in self.dying:
            holder.clear()


@dataclass(frozen=True, slots=True)
class Passage:
    """How the firings of one actor go through the queues of a device that runs ahead."""

    device: Device
    queue: Queue
    reads: tuple[tuple[int, Trail], ...]  # (position in the reads of a firing, register) of another queue
    writes: tuple[tuple[int, Trail], ...]  # (position in the writes of a firing, register) that another queue reads
    foreign: tuple[int, ...]  # operands in memory of another queue, or of the caller, that outputs may be views of
    inputs: tuple[int, ...]  # operands that the caller gave; they may lie in host memory
    blocks: bool  # it moves data between ranks, or from host memory: for a thread of its own
    prepares: bool  # takes only what the caller gave: it runs where that lies, and its outputs go to the device

    @property
    def inline(self) -> bool:
        """Whether a firing only launches work, so that the compute thread may do it."""
        return not self.blocks

    def waits(self, fire: Fire) -> Waits:
        """What a firing has to wait for."""
        marks = [trail.ready(fire.reads[at][1]) for at, trail in self.reads]
        dying = []
        for at, trail in self.writes:
            readers, held = trail.reuse(fire.writes[at][1])
            marks += readers
            dying.append(held)
        once = {
            id(mark): mark for mark in marks if mark is not None
        }  # one firing may have made all that this one reads
        return Waits(self.queue, tuple(once.values()), dying)

    def place(self, values: list[Any]) -> frozenset[int]:
        """Bring operands to the device, in place, inside of the queue; what of their memory may not be kept.

        Who fires puts outputs that lie in such memory elsewhere (``own``), as it is given back, or changed
        by the caller, without regard to who reads those outputs.
        """
        given = [values[at] for at in self.inputs]
        self.queue.use(given)
        memory = frozenset(_memory(values[at]) for at in self.foreign)
        if not self.prepares:
            for at, value in zip(self.inputs, self.device.to_device(given), strict=True):
                values[at] = value
        return memory

    def own(self, outputs: Sequence[Any], memory: frozenset[int]) -> Sequence[Any]:
        """Outputs of a firing on the device, in memory of this queue."""
        if self.prepares:
            outputs = self.device.to_device(outputs)
        if memory:
            outputs = [out.clone() if out.numel() and _memory(out) in memory else out for out in outputs]
        return outputs

    def end(self, fire: Fire, result: bool = False) -> Mark | None:
        """Leave a mark, where somebody may wait for it: all that the firing does is in the queue.

        ``result`` says that the host may.
        """
        made = [(trail, fire.writes[at][1]) for at, trail in self.writes if fire.writes[at][2]]
        if not (made or self.reads or result):
            return None
        mark = self.queue.mark()
        assert mark is not None
        for at, trail in self.reads:
            trail.read(fire.reads[at][1], self.queue, mark)
        for trail, sequence in made:
            trail.made(sequence, mark)
        return mark


class Trails:
    """The trails of a plan's registers on one rank, and what is to be let go of.  For the compute thread."""

    def __init__(self, plan: Plan, rank: int, device: Device, slots: Mapping[int, Slots]) -> None:
        self._plan = plan
        self._device = device
        self._trails: dict[int, Trail] = {}
        self._leaving: deque[tuple[list[Mark], Holder]] = deque()
        for register in plan.registers:
            if register.id not in slots:
                continue
            producer = plan.actor(register.producer)
            queue = producer.queue if producer.rank == rank else receiving(producer.rank)
            readers = [plan.actor(read.actor).queue for read in register.readers]
            for slot in range(register.initial):  # their memory comes from the thread that installs the plan
                for reader in readers:
                    device.queue(reader).use(slots[register.id].held(slot) or ())
            if producer.rank != rank or any(reader != queue for reader in readers):
                self._trails[register.id] = Trail(register, slots[register.id], device.queue(queue))

    def passage(self, actor: Actor, host: bool) -> Passage:
        """The passage of an actor; ``host`` where its body would run in host memory as well."""
        plan, queue = self._plan, self._device.queue(actor.queue)
        writes = [(at, self._trails[r.id]) for at, r in enumerate(plan.outputs_of[actor.id]) if r.id in self._trails]
        reads = [(at, self._trails[r.id]) for at, r in enumerate(plan.inputs_of[actor.id]) if r.id in self._trails]
        away = {r.id for r in plan.inputs_of[actor.id] if r.id in self._trails and self._trails[r.id].maker != queue}
        inputs = tuple(i for i, o in enumerate(actor.operands) if isinstance(o, OfInput))
        keeps = any(isinstance(target, FromRegister) for target in actor.targets)
        prepares = host and bool(inputs) and all(isinstance(o, OfInput | OfScalar | OfPiece) for o in actor.operands)
        return Passage(
            device=self._device,
            queue=queue,
            reads=tuple((at, trail) for at, trail in reads if trail.maker != queue),
            writes=tuple(writes),
            foreign=tuple(
                i
                for i, o in enumerate(actor.operands)
                if keeps and (isinstance(o, OfInput) or (isinstance(o, FromRegister) and o.register in away))
            ),
            inputs=inputs,
            blocks=actor.comm is not None or prepares,
            prepares=prepares,
        )

    def receive(self, register: int, sequence: int) -> Waits:
        """What a token from another rank has to wait for; on the thread that receives it."""
        trail = self._trails[register]
        marks, held = trail.reuse(sequence)
        return Waits(trail.maker, marks, [held])

    def received(self, register: int, sequence: int, mark: Mark | None) -> None:
        """A token from another rank is in its slot when ``mark`` has passed."""
        self._trails[register].made(sequence, mark)

    def release(self, register: int, sequence: int) -> None:
        """All readings of a token are launched."""
        trail = self._trails.get(register)
        if trail is not None:
            self._leaving.append(trail.released(sequence))

    def sweep(self) -> None:
        """Let go of the tokens whose readings have passed."""
        leaving = self._leaving
        while leaving and all(mark.passed() for mark in leaving[0][0]):
            leaving.popleft()[1].clear()


def receiving(peer: int) -> str:
    """The name of the queue on which tokens of another rank come in."""
    return f"receive:{peer}"


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def barrier(before: Iterable[Queue], after: Iterable[Queue]) -> None:
    """Let what comes into some queues wait for all that is in others."""
    queues = list(after)
    for queue in before:
        mark = queue.mark()
        for other in queues:
            if other != queue:
                other.wait(mark)
