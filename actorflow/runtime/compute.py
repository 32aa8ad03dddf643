"""The compute thread of one rank: it runs the state machines of the plans and fires actors that compute.

The thread owns all state of the plans.  Messages, permits and calls come to its inbox.  Communication that blocks goes
to queue threads (``transfers.py``), which put their outputs into the inbox.  The thread sleeps until there is an event;
on a core of its own it looks for peers' messages a little before it does.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor

from actorflow.devices import Device, Mark
from actorflow.runtime.actor_units import ActorUnit, ComputeUnit, SharedCollectiveUnit
from actorflow.runtime.bodies.kernels import culprit
from actorflow.runtime.call import Call, told
from actorflow.runtime.call_stamps import CallStamps
from actorflow.runtime.collective_order import CollectiveOrder
from actorflow.runtime.early_messages import EarlyMessages
from actorflow.runtime.group_progress import GroupProgress
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.installed_plan import InstalledPlan
from actorflow.runtime.lines import PeerSockets
from actorflow.runtime.memory import ran_out
from actorflow.runtime.queue_threads import prepare_thread
from actorflow.runtime.recorder import Recorder, clock
from actorflow.runtime.snapshot import Snapshot
from actorflow.runtime.story import actor_error, again, cause_of, firing, line_of, some, wrapped
from actorflow.runtime.stream_events import NO_MEMORY
from actorflow.runtime.transfers import Task, Transfers
from actorflow.standins.logical_batch import RowsRead
from actorflow.transport.abandon import Decision, Failed, Hold, Order, Vote, Word
from actorflow.transport.messages import (
    Contributed,
    Credit,
    Filled,
    Line,
    Message,
    Ready,
    Region,
    Stamp,
    Transport,
)
from actorflow.transport.shared import owned
from actorflow.transport.small_tensors import decode
from actorflow_compiler.plan.plan import VariableKind
from actorflow_scheduler.machine import CallIssued, Fire, GiveCredit, Instruction, Release

__all__ = ["Compute"]

_ISSUED = CallIssued()
_PATIENCE = (
    200e-6  # seconds that it looks before it sleeps: a peer answers a message within less, if it only waits for it
)
OTHERS = "other calls are done as ever"


class Compute:
    """The thread that fires one rank's actors.

    Any thread may call the public methods, which return at once, except ``join``.

    ``variables`` are the tensors that plans read and write, by name.  A call that is not ``free`` waits for ``permit``.
    ``is_last(number)`` says whether no later call was issued.  Callbacks: ``fired`` for each call whose actors have all
    fired, ``lost`` for each call that is given up, ``fail`` with the error that ended the thread.
    """

    def __init__(
        self,
        rank: int,
        on: Device,
        transport: Transport,
        record: Recorder | None,
        cores: Set[int],
        variables: dict[str, Tensor],
        fired: Callable[[Call], None],
        lost: Callable[[Call], None],
        is_last: Callable[[int], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._rank, self._on, self._transport, self._record = rank, on, transport, record
        self._variables = variables
        self._fired, self._lose, self._is_last, self._fail = fired, lost, is_last, fail
        self.say: Callable[[Word], object] | None = None  # sends the coordinator what this rank says of failed calls
        self._jobs: dict[int, InstalledPlan] = {}
        self._pending: deque[tuple[InstalledPlan, ActorUnit, Fire]] = deque()  # firings for this thread
        self._order: CollectiveOrder[Task] = CollectiveOrder()  # communications that all ranks launch in one order
        self._waiting: deque[tuple[InstalledPlan, Call]] = deque()  # issued, not begun
        self._permitted = -1  # the last call that every rank is known to have made
        self._stamps = CallStamps()
        self._early = EarlyMessages()
        self._current: InstalledPlan | None = None  # the plan of the calls under way
        self._doing: tuple[ActorUnit, Fire] | None = None  # the firing in progress, for errors and texts
        self._awaited: dict[str, RowsRead] = {}  # by name of a source: rows without which it cannot fire
        self._cores = cores
        self._start = 0  # when the firing in progress began, in ns, if it is recorded
        self._stopped = False
        # a device that works ahead of this thread does not wait for it to wake; items are (method, *arguments)
        self._inbox = Inbox(_PATIENCE if cores and not on.ahead else 0.0)
        self._transfers = Transfers(
            rank, on, transport, record, self._inbox, self._finish_transfer,
            self._arrive, fail,
        )  # fmt: skip
        self._lines = PeerSockets(self._inbox, self._deliver_here)
        self.active = 0  # calls that have begun and are unfinished
        self._lost = 0  # those of ``active`` that were given up
        self._enqueued = -1  # number of the last call that was enqueued
        self._unended = 0  # calls that were enqueued and have not ended
        self._snapshots: list[Snapshot] = []  # with variables that are still to be copied
        self._held: dict[int, list[Callable[[], None]]] = {}  # by call that failed on some rank: postponed steps
        self._raised: dict[int, tuple[BaseException, str]] = {}  # by call that failed here: error, obstacle to going on
        self._given_up: dict[int, tuple[BaseException, str]] = {}  # calls that have not begun here: error, user's line
        self._thread = threading.Thread(target=self._run, name=f"actorflow rank {rank} compute", daemon=True)
        self._thread.start()

    # --- for any thread ---

    def install(self, job: InstalledPlan) -> None:
        """Add a plan."""
        self._inbox.put(self._install, job)

    def drop(self, job: InstalledPlan) -> None:
        """Remove a plan whose calls are done."""
        self._inbox.put(self._drop, job)

    def enqueue(self, job: InstalledPlan, call: Call) -> None:
        """Execute a call after those that were enqueued before."""
        self._inbox.put(self._enqueue, job, call)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Have each variable copied before a call changes it that is enqueued after this."""
        self._inbox.put(self._add_snapshot, snapshot)

    def permit(self, number: int) -> None:
        """Let calls up to ``number`` begin: every rank has made them alike."""
        self._inbox.put(self._allow, number)

    def obey(self, order: Order) -> None:
        """Follow the coordinator's order about a call that has failed on some rank."""
        self._inbox.put(self._decide if isinstance(order, Decision) else self._vote, order)

    def deliver(self, peer: int, message: Message) -> None:
        """Process a message of another rank; messages of one rank must come in order.

        A message for a plan that is not installed yet is kept until it is.
        """
        if isinstance(message, Ready) and message.payload is None:
            self._transfers.receive(peer, message)
        else:
            self._inbox.put(self._take_in, peer, message)

    def attach(self, line: Line) -> None:
        """Read another rank's messages from this socket from now on."""
        self._inbox.put(self._lines.watch, line)

    def stop(self) -> None:
        """Ask all threads to end; returns at once (see ``join``)."""
        self._inbox.put(self._stop)
        self._transfers.stop()

    def join(self, end: float) -> None:
        """Wait for the threads to end, until ``time.monotonic()`` is ``end``."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, end - time.monotonic()))
        self._transfers.join(end)

    @property
    def current(self) -> InstalledPlan | None:
        """The plan of the calls under way, or of the last ones."""
        return self._current

    @property
    def doing(self) -> str:
        """The firing in progress, as text; empty if there is none."""
        at = self._doing
        return "" if at is None else firing(*at)

    @property
    def awaited(self) -> str:
        """The rows of a data source without which a source cannot fire, as text; empty if none waits."""
        return next((f"{read.text} of {read.source}" for read in tuple(self._awaited.values())), "")

    def waits_for_peers(self, call: Call) -> bool:
        """Whether a call that has not begun waits for other ranks to make it."""
        return not call.free and call.common > self._permitted

    def missing_calls(self) -> Mapping[int, int]:
        """Other rank → the first call, as all ranks count them, that something here waits for it to make."""
        first = tuple(self._waiting)[:1]  # which waits for the calls before it while these are of another plan
        return self._stamps.missing(
            (job.stamps_first, call.common)
            for job, call in first
            if call.stamp is not None and (job is self._current or not self.active)
        )

    def explain(self) -> list[str]:
        """What every thread is doing, as lines of text."""
        waiting = self._order.waiting()
        return [
            f"thread compute: {self.doing or 'waits for an event'}",
            *self._transfers.explain(),
            *([waiting] if waiting else []),
            *self._met(),
            *(f"{name} waits for {read.text} of {read.source}" for name, read in tuple(self._awaited.items())),
            *(f"call {call} waits for rank {rank} to make it" for rank, call in sorted(self.missing_calls().items())),
            *(f"rank {rank} has made another call {call}" for rank, call in tuple(self._stamps.differing.items())),
            *(f"call {number} has failed on some rank: it waits for the votes of all" for number in tuple(self._held)),
        ]

    def _met(self) -> list[str]:
        """The collectives in shared memory that are under way, as lines of text."""
        job = self._current
        if job is None:
            return []
        return [
            f"{firing(*under_way[:2])} waits for ranks {list(group.waits_for())}"
            for group in job.groups.values()
            if (under_way := group.firing) is not None
        ]

    # --- the thread ---

    def _run(self) -> None:
        prepare_thread(self._on, self._cores)
        inbox, pending, lines = self._inbox, self._pending, self._lines
        items = inbox.items
        fire = self._fire_in_context if self._on.ahead else self._fire
        try:
            while not self._stopped:
                if items:
                    method, *arguments = items.popleft()
                    method(*arguments)
                    del method, arguments
                    continue
                if lines:
                    if inbox.look(wait=False):
                        continue
                    if not pending or pending[0][1].computes:
                        lines.flush()  # messages of short firings leave together, before a kernel or before sleep
                if pending:
                    fire(*pending.popleft())
                else:
                    inbox.look(wait=True)
        except BaseException as error:
            at = self._doing
            self._fail(
                wrapped(error, f"rank {self._rank}: the compute thread failed")
                if at is None
                else actor_error(self._rank, *at, error, None if self._current is None else self._current.plan)
            )
        pending.clear()
        self._early.close()
        inbox.close()

    def _deliver_here(self, peer: int, message: Message) -> None:
        """Process a message from a socket: a transfer that blocks goes to its queue thread, the rest is done here."""
        if type(message) is Ready and message.payload is None:
            self.deliver(peer, message)
        else:
            self._take_in(peer, message)

    def _stop(self) -> None:
        self._stopped = True

    def _install(self, job: InstalledPlan) -> None:
        self._jobs[job.number] = job
        self._transfers.install(job)
        self._order.install(job.number, job.nccl_calls, {r.id: (r.slots, r.initial) for r in job.plan.registers})
        for peer, message in self._early.take(job.number):
            self._take_in(peer, message)

    def _drop(self, job: InstalledPlan) -> None:
        del self._jobs[job.number]
        self._early.drop(job.number)
        self._transfers.drop(job.number)
        self._order.drop(job.number)
        if self._current is job:
            self._current = None

    def _allow(self, number: int) -> None:
        self._permitted = max(self._permitted, number)
        self._stamps.agreed(number)
        self._begin()

    def _add_snapshot(self, snapshot: Snapshot) -> None:
        snapshot.begin(self._enqueued, self._unended)
        self._snapshots = [*(one for one in self._snapshots if not one.finished), snapshot]

    def _before_change(self, job: InstalledPlan, call: Call, unit: ActorUnit) -> None:
        """Note the call that is about to change variables, and have snapshots copy these."""
        job.changing[unit.actor.id] = call.common
        for snapshot in self._snapshots:
            snapshot.before_change(call.number, unit.changes)

    def _enqueue(self, job: InstalledPlan, call: Call) -> None:
        self._enqueued = call.number
        self._unended += 1
        self._waiting.append((job, call))
        self._order.made(job.number)
        if call.stamp is not None:
            for peer in job.stamps_to:
                self._transport.send(peer, call.stamp)
            self._stamps.made(call.stamp)
        self._begin()

    def _begin(self) -> None:
        """Begin the calls that may begin; a call of another plan waits until the calls of the current one are done."""
        while self._waiting:
            job, call = self._waiting[0]
            if self.waits_for_peers(call) or (self._stamps.differing and self._differs_by(call)):
                return
            if self.active and job is not self._current:
                return
            if call.stamp is not None and not self._stamps.have(job.stamps_first, call.common):
                return
            self._waiting.popleft()
            call.begun = True
            job.join(self._current, call)
            if not job.firings:
                if call.number in self._held:
                    self._held[call.number].append(partial(self._end_without_actors, call))
                else:
                    self._end_without_actors(call)
                continue
            if call.number in self._given_up:
                self._give_up(call, *self._given_up.pop(call.number))
            self._current = job  # of plans with actors here: the next plan's queues wait for its
            self.active += 1
            if self._record is not None:
                self._record.began(job.number, job.begun, call.issued)
            job.calls[job.begun] = call
            job.begun += 1
            self._order.begin(job.number)
            self._apply(job, job.machine.handle(_ISSUED))

    def _differs_by(self, call: Call) -> bool:
        """Whether a rank has made another call before this one, or in its place: then the run is about to end."""
        return any(number <= call.common for number in tuple(self._stamps.differing.values()))

    def _take_in(self, peer: int, message: Message) -> None:
        if type(message) is Stamp:
            self._stamps.arrived(peer, message)
            self._begin()
            return
        if peer in self._stamps.differing:  # what it sends is not what its tokens are taken for here
            if type(message) is Region:
                os.close(message.descriptor)
            return
        assert not isinstance(message, Stamp)
        job = self._jobs.get(message.plan)
        if job is None:
            self._early.keep(peer, message)
        elif isinstance(message, Credit):
            job.check_credit(peer, message.register)
            if not self._order.may_be_credited(job.number, message.register):
                raise job.credited_too_often(peer, message.register)
            if self._record is not None:
                self._record.credited(job.number, message.register)
            if self._order.credited(job.number, message.register):
                self._credited(job, message.register)
        elif isinstance(message, Filled):
            self._take_filled(job, peer, message)
        elif isinstance(message, Contributed):
            group = job.group(peer, message.group)
            group.hear(peer, message.step)
            self._advance(job, group)
        elif isinstance(message, Region):
            job.borrow(peer, message)
            if message.group >= 0:
                self._advance(job, job.groups[message.group])
        else:
            job.expect(peer, message)
            payload = message.payload
            assert payload is not None
            token = decode(payload, job.slots[message.register].specs)
            register, sequence = message.register, message.sequence
            if self._on.ahead:
                there, mark = job.stream_events.bring(register, sequence, lambda: self._on.to_device(token))
                self._arrive(job, register, sequence, there, mark)
            else:
                self._arrive(job, register, sequence, token)

    def _credited(self, job: InstalledPlan, register: int) -> None:
        self._apply(job, job.credited(register))

    def _take_filled(self, job: InstalledPlan, peer: int, filled: Filled) -> None:
        """Read a token in shared memory where it lies; a queue thread copies it to a device with memory of its own."""
        if self._on.ahead:
            self._transfers.receive(peer, filled)
        else:
            self._arrive(job, filled.register, filled.sequence, job.token(peer, filled))

    def _arrive(
        self, job: InstalledPlan, register: int, sequence: int, token: Sequence[Tensor], mark: Mark | None = None
    ) -> None:
        if self._stamps.differing and job.sources[register].rank in self._stamps.differing:
            return
        follows = job.arrived(register, sequence)
        if self._record is not None:
            self._record.arrived(job.number, register, sequence)
        job.slots[register].put(sequence, token)
        job.stream_events.received(register, sequence, mark)
        self._apply(job, follows)

    def _apply(self, job: InstalledPlan, instructions: list[Instruction]) -> None:
        for todo in instructions:
            if type(todo) is Fire:
                self._begin_firing(job, job.units[todo.actor], todo)
            elif type(todo) is GiveCredit:
                self._transport.send(job.sources[todo.register].rank, Credit(job.number, todo.register))
                self._order.freed(job.number, todo.register)
            elif job.stream_events.registers and type(todo) is Release:
                job.stream_events.release(todo.register, todo.sequence)
        if job.nccl_calls and self._order:
            for task in self._order.ready():
                self._transfers.launch_in_order(task)

    def _begin_firing(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> None:
        if unit.inputs and self._arriving(job, unit, fire):
            return
        if unit.agrees and not self._have_agreed(job, unit, fire):
            return
        if self._held and (held := self._holding(job.calls[fire.firing // unit.rate], unit)) is not None:
            held.append(partial(self._begin_firing, job, unit, fire))
        elif unit.inline:
            if unit.computes:
                self._pending.append((job, unit, fire))
            else:  # it is short, and other ranks may wait for it
                self._pending.appendleft((job, unit, fire))
        elif unit.ordered:
            came = self._order.fired(job.number, fire.actor, self._task(job, unit, fire))
            if came is not None:
                self._inbox.put(self._credited, job, came)
        else:
            self._transfers.fire(self._task(job, unit, fire))

    def _have_agreed(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> bool:
        """Whether a firing may join a collective; if not, it begins when other ranks have made the call alike."""
        stamp = job.calls[fire.firing // unit.rate].stamp
        if stamp is None or self._stamps.have(unit.agrees, stamp.call):
            return True
        self._stamps.when(unit.agrees, stamp.call, partial(self._begin_firing, job, unit, fire))
        return False

    def _arriving(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> bool:
        """Whether rows that a source takes are still being read; then it begins to fire when they are here."""
        call = job.calls[fire.firing // unit.rate]
        if not call.by_rows:
            return False
        self._awaited.pop(unit.actor.name, None)
        if call.lost is not None:
            return False
        self._doing = (unit, fire)
        late = call.arriving(unit.inputs)
        self._doing = None
        if late is None:
            return False
        self._awaited[unit.actor.name] = late.read
        if self._record is None:
            late.read.then(partial(self._inbox.put, self._begin_firing, job, unit, fire))
        else:
            late.read.then(partial(self._rows_came, self._record, clock(), late.read, job, unit, fire))
        return True

    def _rows_came(
        self, record: Recorder, since: int, read: RowsRead, job: InstalledPlan, unit: ActorUnit, fire: Fire
    ) -> None:
        """Record that rows have come for which a source waited, and let it begin to fire.  For any thread."""
        record.waited(job.number, unit.actor, fire.firing, since, read)
        self._inbox.put(self._begin_firing, job, unit, fire)

    def _gather(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> list[Any]:
        held = fire.reads
        boxes: list[Any] = [slots.take(held[at][1]) for at, slots in unit.reads]
        # tokens of a call that is given up are empty, but transfers still send tensors, whose contents do not matter
        if self._lost and job.calls[fire.firing // unit.rate].lost is not None:
            boxes = [token or slots.blank() for token, (_, slots) in zip(boxes, unit.reads, strict=True)]
        if unit.outer:
            iteration, piece = divmod(fire.firing, unit.rate)
            call = job.calls[iteration]
            boxes += (self._variables, job.constants, call.inputs, call.scalars, (piece, call.by_rows))
        return [boxes[box][key] for box, key in unit.operands]

    def _task(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> Task:
        """A firing for another thread, with its operands and the marks that its queue must wait for."""
        if unit.changes:
            self._before_change(job, job.calls[fire.firing // unit.rate], unit)
        return job, unit, fire, self._gather(job, unit, fire), unit.stream.waits(fire)

    def _fire_in_context(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> None:
        """Fire inside the queue's context, which only a device that runs ahead needs; it costs a tiny call 1 %."""
        with unit.stream.queue.context():
            self._fire(job, unit, fire)

    def _fire(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> None:
        """Fire on this thread."""
        self._doing = (unit, fire)
        stream = unit.stream
        if stream.ordered:
            stream.waits(fire).begin()
        if self._record is not None:
            self._start = clock()
        if self._lost and not unit.communicates and job.calls[fire.firing // unit.rate].lost is not None:
            for at, slots in unit.reads:
                slots.take(fire.reads[at][1])
            self._forgo(job, unit, fire)
            return
        if unit.undone:
            self._keep(job.calls[fire.firing // unit.rate], unit)
        if unit.changes:
            self._before_change(job, job.calls[fire.firing // unit.rate], unit)
        values = self._gather(job, unit, fire)
        if isinstance(unit, SharedCollectiveUnit):
            group = job.group_of[unit.actor.id]
            group.firing = unit, fire, self._start
            given_up = self._lost and job.calls[fire.firing // unit.rate].lost is not None
            into = {} if given_up else {output: self._variables[name] for output, name in unit.placed}
            group.begin(unit.actor.id, values, into)
            self._advance(job, group)
            return
        memory = stream.place(values) if stream.moves else NO_MEMORY
        try:
            if isinstance(unit, ComputeUnit):  # most firings: this saves a Python call
                outputs = unit.execute(values)
            else:
                outputs = unit.outputs(values, fire, self._transport)
        except Exception as error:
            self._broken(job, unit, fire, error)
            return
        if stream.moves:
            outputs = stream.own(outputs, memory)
        self._finish(job, unit, fire, outputs)
        if job.stream_events.leaving:
            job.stream_events.sweep()

    def _advance(self, job: InstalledPlan, group: GroupProgress) -> None:
        """Go on with the collective of a group that is under way, if there is one, as far as other ranks have come."""
        under_way = group.firing
        if under_way is None:
            return
        unit, fire, began = under_way
        self._doing = (unit, fire)
        outputs = group.advance(partial(self._announce, job, group))
        self._doing = None
        if outputs is not None:
            group.firing = None
            self._start = began
            self._finish(job, unit, fire, outputs)

    def _announce(self, job: InstalledPlan, group: GroupProgress, step: int) -> None:
        message = Contributed(job.number, group.id, step)
        for rank in group.others:
            self._transport.send(rank, message)
        if self._lines:
            self._lines.flush()  # others may wait for it, and this thread goes on with the next step

    def _broken(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, error: Exception) -> None:
        """Handle the failure of a firing: give up its call if that leaves no changes behind, else end the run.

        On one device, buffers may stay changed: in PyTorch, too, a forward pass that fails leaves the buffers changed
        that it had reached.  On several ranks, changed buffers are put back, as each rank may have reached another
        point.

        The other actors of a call that is given up fire without computing, so that other calls find all registers as
        usual.  Raises the error that ends the run where the call cannot be given up.
        """
        raised = actor_error(self._rank, unit, fire, error, job.plan)
        if not isinstance(unit, ComputeUnit) or raised is error or (job.plan.world > 1 and ran_out(error)):
            raise raised
        if self._on.ahead:  # it is not known what the device has changed meanwhile
            raise raised
        iteration = fire.firing // unit.rate
        call = job.calls[iteration]
        changed = job.changed_in(iteration, unit, culprit(unit.body, error))
        line, leaves = self._takes_back(call, line_of(unit, error, job.plan))
        if job.plan.world > 1:
            if self.say is None:
                raise told(raised, "a run on several ranks ends here: look at the batch before the call, on every rank")
            self._doing = None
            self._hold(call).append(partial(self._forgo, job, unit, fire))
            self._raised[call.number] = raised, self._obstacle(job, iteration, [*changed, *leaves])
            self.say(Failed(call.number, str(raised), *cause_of(raised), line))
            return
        buffers = [
            name for name in changed if (v := job.plan.variable(name)) is not None and v.kind == VariableKind.BUFFER
        ]
        more = [*(name for name in changed if name not in buffers), *call.leaves, *leaves]
        if more or job.carries:
            had = f"the call had changed {some(more)} before, and no call can follow it: load a checkpoint"
            raise told(raised, had)
        what = f"buffers ({some(buffers)}) and nothing else" if buffers else "nothing"
        self._give_up(call, told(raised, f"the call has changed {what}{_but(line)}, and {OTHERS}"), line)
        self._forgo(job, unit, fire)

    def _takes_back(self, call: Call, line: str) -> tuple[str, Sequence[str]]:
        """Whether a call's changes in the script can be taken back: (the line to take them back at, changes that stay).

        They can if the step always makes the same changes before that line (``TakesBack.lines``) and nobody has seen
        them, so this call is the last one issued.  Then the second part is empty; otherwise the line is empty.
        """
        if call.undo is None:
            return "", ()
        return (line, ()) if line in call.undo.lines and self._is_last(call.number) else ("", call.undo.places)

    def _give_up(self, call: Call, error: BaseException, line: str) -> None:
        self._lost += 1
        call.lose(error, line)
        self._lose(call)

    # --- calls that fail on some of several ranks ---

    def _hold(self, call: Call | int) -> list[Callable[[], None]]:
        """Start no more firings of a call; return the list of its postponed steps, to append to."""
        number = call if isinstance(call, int) else call.number
        held = self._held.setdefault(number, [])
        if self._current is not None:
            self._current.spare(number)
        for entry in [e for e in self._pending if e[0].calls[e[2].firing // e[1].rate].number == number]:
            self._pending.remove(entry)
            held.append(partial(self._begin_firing, *entry))
        return held

    def _holding(self, call: Call, unit: ActorUnit) -> list[Callable[[], None]] | None:
        """The list of postponed steps that a firing must join, or None if it may fire.

        It must wait if its call is held, or if it changes variables that a held call before it may have to put back.
        """
        first = min(self._held)
        return self._held[first] if unit.undone and call.number > first else self._held.get(call.number)

    def _vote(self, order: Order) -> None:
        """Hold a call, and tell the coordinator whether it can be given up on this rank."""
        assert isinstance(order, Hold)
        number = order.call
        self._hold(number)
        job = self._current
        iteration = next((i for i, c in job.calls.items() if c.number == number), None) if job is not None else None
        if number in self._raised:
            obstacle = self._raised[number][1]
        elif job is not None and iteration is not None:
            obstacle = self._obstacle(job, iteration, job.changed_in(iteration))
        elif number <= self._enqueued and all(call.number != number for _, call in self._waiting):
            obstacle = "it had ended the call before"
        else:
            obstacle = ""  # the call has not begun here
        if order.line and not obstacle and not self._is_last(number):
            obstacle = "calls that came after it read what it had changed of the script"
        assert self.say is not None
        self.say(Vote(number, obstacle))

    def _obstacle(self, job: InstalledPlan, iteration: int, changed: Sequence[str]) -> str:
        """Why a call cannot be given up on this rank; empty if it can."""
        call = job.calls[iteration]
        if self._on.ahead:
            return f"{self._on.where} runs ahead of what is known of its calls"
        late = {name for other in job.calls.values() if other.number > call.number for name in other.before}
        more = [*(name for name in changed if name not in call.before or name in late), *call.leaves]
        if more:
            return f"the call had changed {some(more)} before"
        return "registers carry values from call to call" if job.carries else ""

    def _decide(self, decision: Order) -> None:
        """Give up a call that every rank holds, or end the run, as the coordinator decided."""
        assert isinstance(decision, Decision)
        number, failed = decision.call, decision.failed
        raised, _ = self._raised.pop(number, (None, ""))
        raised = raised or again(failed.text, failed.cause, failed.message)
        if decision.obstacle:
            raise told(raised, f"no call can follow it: load a checkpoint ({decision.obstacle})")
        error = told(raised, f"the call has changed nothing{_but(failed.line)}, and {OTHERS}")
        under_way = () if self._current is None else self._current.calls.values()
        call = next((c for c in under_way if c.number == number), None)
        if call is None:
            self._given_up[number] = error, failed.line
        else:
            for name, value in call.before.items():
                self._variables[name].copy_(value)
            self._give_up(call, error, failed.line)
        for go_on in self._held.pop(number):  # a step that another held call holds back is postponed again
            go_on()

    def _keep(self, call: Call, unit: ActorUnit) -> None:
        """Keep copies of the small variables that a firing is about to change, to put them back if the call fails."""
        for name in unit.undone:
            if name not in call.before:
                call.before[name] = self._variables[name].clone()

    def _forgo(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> None:
        """Finish a firing of a call that is given up, without computing: no variable changes, its tokens are empty."""
        if self._record is not None:
            self._record.firing(job.number, unit.actor, fire.firing, self._start)
        for store in unit.stores:
            _, sequence, complete = fire.writes[store.at]
            store.slots.forgo(sequence, complete)
        self._end(job, unit, fire, job.calls[fire.firing // unit.rate])

    def _finish(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, outputs: Sequence[Any]) -> None:
        """Store the outputs of a firing in registers, variables and results, and tell the machine that it ended."""
        call = job.calls[fire.firing // unit.rate]
        if self._held and call.number in self._held:  # a transfer that had started before the call was held
            self._held[call.number].append(partial(self._finish, job, unit, fire, outputs))
            return
        self._doing = (unit, fire)
        if self._record is not None and unit.inline:
            self._record.firing(job.number, unit.actor, fire.firing, self._start)
        if unit.borrows:
            outputs = owned(outputs, [job.shared[r] for r in unit.borrows if r in job.shared])
        for store in unit.stores:
            _, sequence, complete = fire.writes[store.at]
            token = outputs if store.all else [outputs[i] for i in store.outputs]
            if store.slots.fill == 1:
                store.slots.put(sequence, token)
            else:
                store.slots.add(sequence, token, complete, store.summed)
        if call.lost is None:
            if unit.undone:
                self._keep(call, unit)
            for output, name in unit.variables:
                variable = self._variables[name]
                if outputs[output] is not variable:
                    variable.copy_(outputs[output])
        if unit.results and call.lost is None:
            self._give(call, unit, fire, outputs)
        elif unit.stream.ordered:
            unit.stream.end(fire)
        self._end(job, unit, fire, call)

    def _end_without_actors(self, call: Call) -> None:
        if call.number in self._given_up:
            call.lose(*self._given_up.pop(call.number))
            self._lose(call)
        self._ended(call)

    def _end(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, call: Call) -> None:
        """Tell the machine that a firing ended; after the last firing of a call, end the call and begin the next."""
        self._doing = None
        self._apply(job, job.machine.handle(unit.finished))
        call.left -= 1
        if not call.left:
            self._lost -= call.lost is not None
            call.ended = [queue.mark() for queue in job.queues] if self._on.ahead else ()
            del job.calls[fire.firing // unit.rate]
            self.active -= 1
            self._ended(call)
            self._begin()

    def _ended(self, call: Call) -> None:
        self._unended -= 1
        if self._snapshots:
            self._snapshots = [one for one in self._snapshots if not one.finished]
            for snapshot in self._snapshots:
                snapshot.ended(call.number, call.ended, call.lost)
        self._fired(call)

    def _finish_transfer(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, outputs: Sequence[Any]) -> None:
        """Finish a firing whose outputs a queue thread has made."""
        with unit.stream.queue.context():
            self._finish(job, unit, fire, outputs)
        if job.stream_events.leaving:
            job.stream_events.sweep()

    def _give(self, call: Call, unit: ActorUnit, fire: Fire, outputs: Sequence[Any]) -> None:
        found = [(i, outputs[o].clone() if shared else outputs[o]) for o, i, shared in unit.results]
        mark = unit.stream.end(fire, result=True)
        call.give(found, mark if self._on.ahead else None)


def _but(line: str) -> str:
    """A clause about the changes that a failed call leaves: Python code of its step before ``line``; or empty."""
    return " but what its step does in Python before that line" if line else ""
