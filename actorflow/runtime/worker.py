"""Plans and calls of one rank enter; its actors fire when their registers allow, and results leave.

The compute thread owns all state of the plans: it runs the actor machines, fires what computes, and
hands communication to lanes, which hand back what came of it.  Nothing polls and nothing sleeps.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from actorflow.runtime.call import Behind, Call, fresh
from actorflow.runtime.data_plane.shared import owned
from actorflow.runtime.devices import Device, Mark, make_device
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.job import Job, Unit, open_planes
from actorflow.runtime.kernels import Kernels
from actorflow.runtime.lanes import prepare_thread
from actorflow.runtime.lines import Lines
from actorflow.runtime.messages import Credit, DataPlane, Filled, Line, Message, Ready, Region, Transport
from actorflow.runtime.recorder import Recorder, clock
from actorflow.runtime.story import actor_error, explain_plans, firing, wrapped
from actorflow.runtime.transfers import Task, Transfers
from actorflow.runtime.turns import Turns
from actorflow.runtime.wire import decode
from actorflow_compiler.errors import CallError, ClusterError, PlanError
from actorflow_compiler.plan import Plan
from actorflow_scheduler.machine import Arrived, Credited, Fire, GiveCredit, Instruction, Issued, Release

_ISSUED = Issued()
_JOIN = 5.0  # seconds that close() waits for threads, which a peer that stands still may hold for ever
_open: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """The runtime of one rank.

    ``variables`` is the one state that all plans share.  ``in_flight`` calls may be unfinished at a
    time.  Where ``gated``, call n waits for ``permit(n)``.  ``library`` holds the ops named
    ``actorflow.NAME``; the compiler's own by default.  ``record`` is told what happens, and when.
    ``cores`` are those that it computes on; where there are none, on any.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        planes: Mapping[str, DataPlane],
        device: Device | torch.device | str = "cpu",
        *,
        in_flight: int = 4,
        gated: bool = True,
        library: Mapping[str, Callable[..., Any]] | None = None,
        record: Recorder | None = None,
        cores: Set[int] = frozenset(),
    ) -> None:
        self.rank = rank
        self.on = make_device(device) if isinstance(device, torch.device | str) else device
        self.device = self.on.where
        self.variables: dict[str, Tensor] = {}
        self._transport = transport
        self._planes = dict(planes)
        self._in_flight = in_flight
        self._gated = gated
        self._kernels = Kernels(self.device, _library() if library is None else library)
        self._changed = threading.Condition()  # guards what the threads of users see: the next six
        self._jobs: dict[int, Job] = {}
        self._issued = 0
        self._unfinished: deque[Call] = deque()
        self._behind = Behind()
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._closed = False
        # Only the compute thread touches the following.
        self._pending: deque[tuple[Job, Unit, Fire]] = deque()  # fires for the compute thread
        self._turns: Turns[Task] = Turns()  # communications that leave in the plan's order
        self._waiting: deque[tuple[Job, Call]] = deque()  # issued, not begun
        self._permits: set[int] = set()
        self._early: dict[int, list[tuple[int, Message]]] = {}  # messages for plans that are not installed
        self._active = 0  # calls that are begun and unfinished
        self._current: Job | None = None  # theirs
        self._doing: tuple[Unit, Fire] | None = None
        self.record = record
        self._cores = cores
        self._start = 0  # of the firing that the compute thread is at, in ns, where it is recorded
        self._stopped = False
        self._inbox = Inbox()  # (method, *arguments)
        self._transfers = Transfers(
            rank, self.on, transport, record, self._inbox, self._finish_ordered if self.on.ahead else self._finish,
            self._arrive, self._installed, self.fail,
        )  # fmt: skip
        self._lines = Lines(self._inbox, self._deliver_here)
        self._thread = threading.Thread(target=self._compute, name=f"actorflow rank {rank} compute", daemon=True)
        self._thread.start()
        _open.add(self)

    # --- for users of the worker, on any thread ---

    def install(
        self,
        number: int,
        plan: Plan,
        variables: Mapping[str, Tensor] | None = None,
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take in this rank's part of a plan; every rank installs the same plans in the same order.

        Variables that the worker holds already keep their tensors.  Without ``constants`` those
        of the plan are used.  Blocks until all ranks that the plan joins have connected.  Raises
        PlanError where the plan cannot be run here, and the worker's failure.
        """
        with self._changed:
            self._raise_failure()
            if number in self._jobs:
                raise PlanError(f"rank {self.rank}: plan number {number} is installed already; expected a new number")
            for name, tensor in (variables or {}).items():
                self.variables.setdefault(name, tensor.detach())
        job = Job(number, plan, self.rank, self.on, self._kernels, self._planes, self.variables, constants)
        open_planes(plan, self.rank, self._planes)
        if self.record is not None:
            self.record.install(number, plan)
        for home, region in job.lend():
            self._transport.send(home, region)
        self.on.synchronize()  # what the caller and this have put there, for whatever thread uses it first
        with self._changed:
            self._raise_failure()
            self._jobs[number] = job
            self._inbox.put(self._replay, job)
            self._changed.notify_all()

    def issue(
        self, number: int, inputs: Mapping[str, Tensor] | None = None, scalars: Mapping[str, float] | None = None
    ) -> Call:
        """Call plan ``number`` once more; calls execute in the order in which they are issued.

        Returns at once, unless ``in_flight`` calls are unfinished; then it waits for the first of
        them.  ``inputs`` must stay as they are until the call is done.  Raises CallError for
        missing arguments, and the worker's failure.
        """
        inputs, scalars = dict(inputs or {}), dict(scalars or {})
        self._behind.keep_pace(self._unfinished, self._in_flight)
        with self._changed:
            self._raise_failure()
            job = self._jobs.get(number)
            if job is None:
                raise CallError(
                    f"rank {self.rank}: plan number {number} was called; installed are {sorted(self._jobs)}"
                )
            job.check(inputs, scalars)
            while len(self._unfinished) >= self._in_flight:
                self._changed.wait()
                self._raise_failure()
            call = Call(
                self._issued, number, inputs, scalars, job.results, job.firings, self._changed, lambda: self._failure,
                self.on,
            )  # fmt: skip
            self._issued += 1
            self._unfinished.append(call)
            self._inbox.put(self._enqueue, job, call)
        return call

    def observed(self) -> list[tuple[Plan, tuple[int, ...]]]:
        """Each plan and the actors of its compute queue in the order in which they fired, as far as it is recorded."""
        if self.record is None:
            return []
        return [(job.plan, self.record.order(number, job.plan)) for number, job in sorted(self._jobs.items())]

    def permit(self, number: int) -> None:
        """Let call ``number`` start: every rank has issued it."""
        self._inbox.put(self._allow, number)

    def deliver(self, peer: int, message: Message) -> None:
        """Take a message of another rank, whose messages come in order; early ones are kept for later."""
        if isinstance(message, Ready) and message.payload is None:
            self._transfers.receive(peer, message)
        else:
            self._inbox.put(self._take_in, peer, message)

    def attach(self, line: Line) -> None:
        """Read the messages of another rank from a socket from now on."""
        self._inbox.put(self._lines.watch, line)

    def wait_all(self, timeout: float | None = None) -> None:
        """Return when every issued call is done.

        Raises the worker's failure, or TimeoutError after ``timeout`` seconds in which their actors did not all fire.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unfinished or self._failure is not None, timeout):
                raise TimeoutError(
                    f"rank {self.rank}: {len(self._unfinished)} calls were not done in {timeout} s\n{self.explain()}"
                )
            self._raise_failure()
        self._behind.wait()

    def fail(self, failure: BaseException) -> None:
        """End the work: everyone who waits, now and later, gets ``failure``.  Only the first one counts."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
            self._halt()
        with ExitStack() as stack:  # each hears of it, also where telling another one fails
            for callback in callbacks:
                stack.callback(callback, failure)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Call back once when the worker fails, on the thread where it does; at once if it has."""
        with self._changed:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def close(self) -> None:
        """End all threads; calls that are not done fail with ClusterError."""
        with self._changed:
            if not self._closed:
                self._closed = True
                if self._failure is None:
                    self._failure = ClusterError(
                        f"rank {self.rank}: the worker was closed with {len(self._unfinished)} unfinished calls"
                    )
                    self._callbacks.clear()
                    self._halt()
        end = time.monotonic() + _JOIN
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)
        self._transfers.join(end)

    def standing(self) -> tuple[Job | None, bool, str]:
        """The job of the calls that are under way; whether the next call waits for other ranks; what is fired now."""
        at, call = self._doing, next((c for c in tuple(self._unfinished) if not c.begun), None)
        early = call is not None and self._gated and call.number not in self._permits
        return self._current if self._active else None, early, "" if at is None else firing(*at)

    def explain(self) -> str:
        """What every queue and thread of the rank is at, and what it waits for."""
        _, early, at = self.standing()
        call = next((c for c in tuple(self._unfinished) if not c.begun), None)
        return "\n".join([
            f"rank {self.rank}: {len(self._unfinished)} unfinished calls, {self._active} of them begun",
            *explain_plans(self._current, None if call is None else (call, self._jobs[call.plan]), early),
            f"thread compute: {at or 'waits for an event'}",
            *self._transfers.explain(),
            *filter(None, (self._turns.waiting(), *(plane.explain() for plane in self._planes.values()))),
        ])  # fmt: skip

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure)

    def _halt(self) -> None:
        """Wake everyone and end the threads; the caller holds ``_changed``."""
        self._changed.notify_all()
        self._inbox.put(self._stop)
        self._transfers.stop()
        for plane in self._planes.values():
            with suppress(Exception):  # a device that has failed may refuse whatever it is asked; the others end
                plane.close()

    def _installed(self, number: int) -> Job | None:
        """The job of this number, when it is installed; None when the worker ends before."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._jobs or self._failure is not None)
            return None if self._failure is not None else self._jobs[number]

    # --- the compute thread ---

    def _compute(self) -> None:
        prepare_thread(self.on, self._cores)
        inbox, pending, lines = self._inbox, self._pending, self._lines
        items = inbox.items
        fire = self._fire_ordered if self.on.ahead else self._fire
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
                    if not pending or pending[0][1].kernel is not None:
                        lines.flush()  # what came of short firings leaves together, before a kernel or sleep
                if pending:
                    fire(*pending.popleft())
                else:
                    inbox.look(wait=True)
        except BaseException as error:
            at = self._doing
            self.fail(
                wrapped(error, f"rank {self.rank}: the compute thread failed")
                if at is None
                else actor_error(self.rank, *at, error, None if self._current is None else self._current.plan)
            )
        pending.clear()
        inbox.close()

    def _deliver_here(self, peer: int, message: Message) -> None:
        """What a line brings: a transfer that blocks goes to its lane, the rest is for this thread."""
        if type(message) is Ready and message.payload is None:
            self.deliver(peer, message)
        else:
            self._take_in(peer, message)

    def _stop(self) -> None:
        self._stopped = True

    def _replay(self, job: Job) -> None:
        self._turns.install(job.number, job.frozen, {r.id: (r.slots, r.initial) for r in job.plan.registers})
        for peer, message in self._early.pop(job.number, ()):
            self._take_in(peer, message)

    def _allow(self, number: int) -> None:
        self._permits.add(number)
        self._begin()

    def _enqueue(self, job: Job, call: Call) -> None:
        self._waiting.append((job, call))
        self._begin()

    def _begin(self) -> None:
        """Begin the calls that may: a call of another plan than the running one waits until that is done."""
        while self._waiting:
            job, call = self._waiting[0]
            if self._gated and call.number not in self._permits:
                return
            if self._active and job is not self._current:
                return
            self._waiting.popleft()
            call.begun = True
            self._permits.discard(call.number)
            if job.queues:
                job.join(self._current, call)
            if not job.firings:
                self._end(call)
                continue
            self._current = job  # the last one that had something to do here: the next one's queues wait for its
            self._active += 1
            if self.record is not None:
                self.record.began(job.number, job.begun, call.issued)
            job.calls[job.begun] = call
            job.begun += 1
            self._turns.begin(job.number)
            self._apply(job, job.machine.handle(_ISSUED))

    def _end(self, call: Call) -> None:
        with self._changed:
            call.fired = True
            call.inputs = {}
            self._unfinished.remove(call)
            if call.ended:
                self._behind.add(call)
            self._changed.notify_all()

    def _take_in(self, peer: int, message: Message) -> None:
        job = self._jobs.get(message.plan)
        if job is None:
            self._early.setdefault(message.plan, []).append((peer, message))
        elif isinstance(message, Credit):
            if self.record is not None:
                self.record.credited(job.number, message.register)
            if self._turns.credited(job.number, message.register):
                self._credited(job, message.register)
        elif isinstance(message, Filled):
            self._take_filled(job, peer, message)
        elif isinstance(message, Region):
            job.borrow(peer, message)
        else:
            job.expect(peer, message)
            payload = message.payload
            assert payload is not None
            token = decode(payload, job.slots[message.register].specs)
            if job.trails is None:
                self._arrive(job, message.register, message.sequence, token)
            else:
                self._transfers.bring(job, message, lambda: self.on.to_device(token))

    def _credited(self, job: Job, register: int) -> None:
        self._apply(job, job.machine.handle(Credited(register)))

    def _take_filled(self, job: Job, peer: int, filled: Filled) -> None:
        """A token in shared memory is read where it lies; for a device with memory of its own a lane takes it there."""
        if job.trails is None:
            self._arrive(job, filled.register, filled.sequence, job.token(peer, filled))
            return
        self._transfers.receive(peer, filled)

    def _arrive(
        self, job: Job, register: int, sequence: int, token: Sequence[Tensor], mark: Mark | None = None
    ) -> None:
        if self.record is not None:
            self.record.arrived(job.number, register, sequence)
        job.slots[register].put(sequence, token)
        if job.trails is not None:
            job.trails.received(register, sequence, mark)
        self._apply(job, job.machine.handle(Arrived(register)))

    def _apply(self, job: Job, instructions: list[Instruction]) -> None:
        for todo in instructions:
            if type(todo) is Fire:
                unit = job.units[todo.actor]
                if unit.inline:
                    if unit.kernel is None:  # it is short, and others may wait for it
                        self._pending.appendleft((job, unit, todo))
                    else:
                        self._pending.append((job, unit, todo))
                elif unit.in_turn:
                    came = self._turns.fired(job.number, todo.actor, self._task(job, unit, todo))
                    if came is not None:
                        self._inbox.put(self._credited, job, came)
                else:
                    self._transfers.fire(self._task(job, unit, todo))
            elif type(todo) is GiveCredit:
                self._transport.send(job.sources[todo.register].rank, Credit(job.number, todo.register))
                self._turns.freed(job.number, todo.register)
            elif job.trails is not None and type(todo) is Release:
                job.trails.release(todo.register, todo.sequence)
        if job.frozen and self._turns:
            for turn in self._turns.ready():
                self._transfers.turn(turn)

    def _gather(self, job: Job, unit: Unit, fire: Fire) -> list[Any]:
        held = fire.reads
        boxes: list[Any] = [slots.take(held[at][1]) for at, slots in unit.reads]
        if unit.outer:
            iteration, piece = divmod(fire.firing, unit.rate)
            call = job.calls[iteration]
            boxes += (self.variables, job.constants, call.inputs, call.scalars, (piece,))
        return [boxes[box][key] for box, key in unit.operands]

    def _task(self, job: Job, unit: Unit, fire: Fire) -> Task:
        """A firing for another thread."""
        waits = None if unit.passage is None else unit.passage.waits(fire)
        return job, unit, fire, self._gather(job, unit, fire), waits

    def _fire_ordered(self, job: Job, unit: Unit, fire: Fire) -> None:
        """Fire on a device that runs ahead."""
        assert unit.passage is not None
        with unit.passage.queue.context():
            unit.passage.waits(fire).begin()
            self._fire(job, unit, fire)
        job.sweep()

    def _fire(self, job: Job, unit: Unit, fire: Fire) -> None:
        self._doing = (unit, fire)
        if self.record is not None:
            self._start = clock()
        values = self._gather(job, unit, fire)
        if unit.passage is not None:
            memory = unit.passage.place(values)
            outputs = unit.passage.own(self._transfers.outputs(job, unit, fire, values), memory)
        elif unit.comm is None and unit.adding is None:
            outputs = values if unit.kernel is None else unit.kernel(values)
        else:
            outputs = self._transfers.outputs(job, unit, fire, values)
        self._finish(job, unit, fire, outputs)

    def _finish(self, job: Job, unit: Unit, fire: Fire, outputs: Sequence[Any]) -> None:
        """Put the outputs where they belong and tell the machine."""
        self._doing = (unit, fire)
        if self.record is not None and unit.inline:
            self.record.firing(job.number, unit.actor, fire.firing, self._start)
        if unit.borrows:
            outputs = owned(outputs, [job.rooms[r] for r in unit.borrows if r in job.rooms])
        call = job.calls[fire.firing // unit.rate]
        for store in unit.stores:
            _, sequence, complete = fire.writes[store.at]
            token = outputs if store.all else [outputs[i] for i in store.outputs]
            if store.slots.fill == 1:
                store.slots.put(sequence, token)
            else:
                store.slots.add(sequence, token, complete, store.summed)
        for output, name in unit.variables:
            variable = self.variables[name]
            if outputs[output] is not variable:
                variable.copy_(outputs[output])
        if unit.results:
            self._give(call, unit, fire, outputs)
        elif unit.passage is not None:
            unit.passage.end(fire)
        self._doing = None
        self._apply(job, job.machine.handle(unit.finished))
        call.left -= 1
        if not call.left:
            call.ended = [m for m in [queue.mark() for queue in job.queues] if m is not None]
            del job.calls[fire.firing // unit.rate]
            self._active -= 1
            self._end(call)
            self._begin()

    def _finish_ordered(self, job: Job, unit: Unit, fire: Fire, outputs: Sequence[Any]) -> None:
        """The same for what a lane has launched on a device that runs ahead."""
        assert unit.passage is not None
        with unit.passage.queue.context():
            self._finish(job, unit, fire, outputs)
        job.sweep()

    def _give(self, call: Call, unit: Unit, fire: Fire, outputs: Sequence[Any]) -> None:
        found = [(i, outputs[o].clone() if shared else outputs[o]) for o, i, shared in unit.results]
        mark = None if unit.passage is None else unit.passage.end(fire, result=True)
        with self._changed:
            for index, value in found:
                if mark is not None:
                    call.marks[index] = mark
                call.results[index] = value
            self._changed.notify_all()


@atexit.register
def _close_all() -> None:
    """A thread that is in an op when the interpreter goes away would end the process with SIGABRT."""
    for worker in tuple(_open):
        worker.close()


def _library() -> Mapping[str, Callable[..., Any]]:
    from actorflow_compiler.library import OPS

    return OPS
