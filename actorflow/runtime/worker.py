"""Plans and calls of one rank enter; its actors fire when their registers allow, and results leave.

The compute thread owns all state of the plans: it runs the actor machines, fires what computes, and
hands communication to lanes, which hand back what came of it.  Nothing polls and nothing sleeps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.runtime.call import Call, fresh
from actorflow.runtime.data_plane.shared import fill, owned
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.job import Job, Unit, open_planes
from actorflow.runtime.kernels import Kernels
from actorflow.runtime.lanes import Lane, prepare_thread
from actorflow.runtime.lines import Lines
from actorflow.runtime.messages import Credit, DataPlane, Filled, Line, Message, Ready, Region, Transport
from actorflow.runtime.story import actor_error, firing, receiving, wrapped
from actorflow.runtime.wire import decode, encode
from actorflow_compiler.errors import CallError, ClusterError, PlanError
from actorflow_compiler.plan import Plan
from actorflow_scheduler.machine import Arrived, Credited, Fire, GiveCredit, Instruction, Issued
from actorflow_scheduler.notation import COMPUTING

_ISSUED = Issued()
_Task = tuple[Job, Unit, Fire, list[Tensor]]  # a communication: its operands are gathered already
_JOIN = 5.0  # seconds that close() waits for threads, which a peer that stands still may hold for ever


class Worker:
    """The runtime of one rank.

    ``variables`` is the one state that all plans share.  ``in_flight`` calls may be unfinished at a
    time.  Where ``gated``, call n waits for ``permit(n)``.  ``library`` holds the ops named
    ``actorflow.NAME``; the compiler's own by default.  Of each plan's first ``trace`` iterations it
    is kept in which order the actors of the compute queue fired.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        planes: Mapping[str, DataPlane],
        device: torch.device | str = "cpu",
        *,
        in_flight: int = 4,
        gated: bool = True,
        library: Mapping[str, Callable[..., Any]] | None = None,
        trace: int = 0,
    ) -> None:
        self.rank = rank
        self.device = torch.device(device)
        self.variables: dict[str, Tensor] = {}
        self._transport = transport
        self._planes = dict(planes)
        self._in_flight = in_flight
        self._gated = gated
        self._kernels = Kernels(self.device, _library() if library is None else library)
        self._changed = threading.Condition()  # guards what the threads of users see: the next seven
        self._jobs: dict[int, Job] = {}
        self._issued = 0
        self._unfinished: deque[Call] = deque()
        self._lanes: dict[str, Lane[Any]] = {}
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._closed = False
        # Only the compute thread touches the following.
        self._pending: deque[tuple[Job, Unit, Fire]] = deque()  # fires for the compute thread
        self._waiting: deque[tuple[Job, Call]] = deque()  # issued, not begun
        self._permits: set[int] = set()
        self._early: dict[int, list[tuple[int, Message]]] = {}  # messages for plans that are not installed
        self._active = 0  # calls that are begun and unfinished
        self._current: Job | None = None  # theirs
        self._doing: tuple[Unit, Fire] | None = None
        self._trace = trace
        self._fired: dict[int, list[int]] = {}  # by plan
        self._stopped = False
        self._inbox = Inbox()  # (method, *arguments)
        self._lines = Lines(self._inbox, self._deliver_here)
        self._thread = threading.Thread(target=self._compute, name=f"actorflow rank {rank} compute", daemon=True)
        self._thread.start()

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
        job = Job(number, plan, self.rank, self.device, self._kernels, self._planes, self.variables, constants)
        open_planes(plan, self.rank, self._planes)
        for home, region in job.lend():
            self._transport.send(home, region)
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
                self._issued, number, inputs, scalars, job.results, job.firings, self._changed, lambda: self._failure
            )
            self._issued += 1
            self._unfinished.append(call)
            self._inbox.put(self._enqueue, job, call)
        return call

    def observed(self) -> list[tuple[Plan, tuple[int, ...]]]:
        """Each plan and the actors of its compute queue in the order in which they fired, as far as ``trace`` goes."""
        return [(self._jobs[number].plan, tuple(actors)) for number, actors in sorted(self._fired.items())]

    def permit(self, number: int) -> None:
        """Let call ``number`` start: every rank has issued it."""
        self._inbox.put(self._allow, number)

    def deliver(self, peer: int, message: Message) -> None:
        """Take a message of another rank, whose messages come in order; early ones are kept for later."""
        if isinstance(message, Ready) and message.payload is None:
            lane = self._lane(f"receive:{peer}", lambda ready: self._receive(peer, ready))
            if lane is not None:
                lane.put(message)
        else:
            self._inbox.put(self._take_in, peer, message)

    def attach(self, line: Line) -> None:
        """Read the messages of another rank from a socket from now on."""
        self._inbox.put(self._lines.watch, line)

    def wait_all(self, timeout: float | None = None) -> None:
        """Return when every issued call is done.  Raises the worker's failure, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unfinished or self._failure is not None, timeout):
                raise TimeoutError(
                    f"rank {self.rank}: {len(self._unfinished)} calls were not done in {timeout} s\n{self.explain()}"
                )
            self._raise_failure()

    def fail(self, failure: BaseException) -> None:
        """End the work: everyone who waits, now and later, gets ``failure``.  Only the first one counts."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
            self._halt()
        for callback in callbacks:
            callback(failure)

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
            lanes = list(self._lanes.values())
        end = time.monotonic() + _JOIN
        for thread in (self._thread, *(lane.thread for lane in lanes)):
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def explain(self) -> str:
        """What every queue and thread of the rank is at, and what it waits for."""
        job, at = self._current, self._doing
        lines = [f"rank {self.rank}: {len(self._unfinished)} unfinished calls, {self._active} of them begun"]
        if job is not None:
            lines.append(f"plan {job.number} {job.plan.name!r}:")
            lines += [f"  {line}" for line in job.machine.waiting()]
        call = next((c for c in tuple(self._unfinished) if not c.begun), None)
        if call is not None:
            alone = self._gated and call.number not in self._permits
            why = "the permit of all ranks" if alone else "the calls before it"
            lines.append(f"call {call.number} of plan {call.plan} {self._jobs[call.plan].plan.name!r} waits for {why}")
        lines.append(f"thread compute: {'waits for an event' if at is None else firing(*at)}")
        for lane in tuple(self._lanes.values()):
            task = lane.doing
            what = "idle" if task is None else receiving(task) if isinstance(task, Ready) else firing(task[1], task[2])
            lines.append(f"thread {lane.name}: {what}")
        return "\n".join(lines)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure)

    def _halt(self) -> None:
        """Wake everyone and end the threads; the caller holds ``_changed``."""
        self._changed.notify_all()
        self._inbox.put(self._stop)
        for lane in self._lanes.values():
            lane.stop()
        for plane in self._planes.values():
            plane.close()

    def _lane(self, name: str, work: Callable[[Any], None]) -> Lane[Any] | None:
        """The thread of a queue; None when the worker has ended."""
        lane = self._lanes.get(name)
        if lane is None and self._failure is None:
            with self._changed:
                lane = self._lanes.get(name)
                if lane is None and self._failure is None:
                    lane = self._lanes[name] = Lane(name, self.device, work, self._lane_failed)
        return lane

    # --- the compute thread ---

    def _compute(self) -> None:
        prepare_thread(self.device)
        inbox, pending, lines = self._inbox, self._pending, self._lines
        items = inbox.items
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
                    self._fire(*pending.popleft())
                else:
                    inbox.look(wait=True)
        except BaseException as error:
            at = self._doing
            self.fail(
                wrapped(error, f"rank {self.rank}: the compute thread failed")
                if at is None
                else actor_error(self.rank, *at, error)
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
            self._current = job
            if not job.firings:
                self._end(call)
                continue
            self._active += 1
            job.calls[job.begun] = call
            job.begun += 1
            self._apply(job, job.machine.handle(_ISSUED))

    def _end(self, call: Call) -> None:
        with self._changed:
            call.done = True
            call.inputs = {}
            self._unfinished.remove(call)
            self._changed.notify_all()

    def _take_in(self, peer: int, message: Message) -> None:
        job = self._jobs.get(message.plan)
        if job is None:
            self._early.setdefault(message.plan, []).append((peer, message))
        elif isinstance(message, Credit):
            self._apply(job, job.machine.handle(Credited(message.register)))
        elif isinstance(message, Filled):
            self._arrive(job, message.register, message.sequence, job.token(peer, message))
        elif isinstance(message, Region):
            job.borrow(peer, message)
        else:
            job.expect(peer, message)
            payload = message.payload
            assert payload is not None
            specs = job.slots[message.register].specs
            self._arrive(job, message.register, message.sequence, decode(payload, specs, self.device))

    def _arrive(self, job: Job, register: int, sequence: int, token: Sequence[Tensor]) -> None:
        job.slots[register].put(sequence, token)
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
                else:
                    lane = self._lane(unit.actor.queue, self._communicate)
                    if lane is not None:
                        lane.put((job, unit, todo, self._gather(job, unit, todo)))
            elif type(todo) is GiveCredit:
                self._transport.send(job.sources[todo.register].rank, Credit(job.number, todo.register))

    def _gather(self, job: Job, unit: Unit, fire: Fire) -> list[Any]:
        held = fire.reads
        boxes: list[Any] = [slots.take(held[at][1]) for at, slots in unit.reads]
        if unit.outer:
            iteration, piece = divmod(fire.firing, unit.rate)
            call = job.calls[iteration]
            boxes += (self.variables, job.constants, call.inputs, call.scalars, (piece,))
        return [boxes[box][key] for box, key in unit.operands]

    def _fire(self, job: Job, unit: Unit, fire: Fire) -> None:
        self._doing = (unit, fire)
        if self._trace and fire.firing < self._trace * unit.rate and unit.actor.queue == COMPUTING:
            self._fired.setdefault(job.number, []).append(fire.actor)
        values = self._gather(job, unit, fire)
        if unit.kernel is not None:
            sums = unit.adding.sums() if unit.adding is not None else None
            if unit.adding is None or not sums:
                outputs = unit.kernel(values)
            else:
                values += sums
                outputs = unit.adding.kernel(values)
            del sums
            self._finish(job, unit, fire, outputs)
        elif unit.comm is None:
            self._finish(job, unit, fire, values)
        else:
            self._finish(job, unit, fire, self._send(job, unit, fire, values))

    def _finish(self, job: Job, unit: Unit, fire: Fire, outputs: Sequence[Any]) -> None:
        """Put the outputs where they belong and tell the machine."""
        self._doing = (unit, fire)
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
            self._give(call, unit, outputs)
        self._doing = None
        self._apply(job, job.machine.handle(unit.finished))
        call.left -= 1
        if not call.left:
            del job.calls[fire.firing // unit.rate]
            self._active -= 1
            self._end(call)
            self._begin()

    def _give(self, call: Call, unit: Unit, outputs: Sequence[Any]) -> None:
        found = [
            (index, outputs[output].clone() if shared else outputs[output]) for output, index, shared in unit.results
        ]
        with self._changed:
            for index, value in found:
                call.results[index] = value
            self._changed.notify_all()

    # --- the lanes ---

    def _communicate(self, task: _Task) -> None:
        job, unit, fire, operands = task
        if unit.sent is not None:
            outputs: Sequence[Any] = self._send(job, unit, fire, operands)
        else:
            assert unit.comm is not None
            assert unit.plane is not None
            outputs = unit.plane.collective(unit.comm, operands, unit.specs)
        self._inbox.put(self._finish, job, unit, fire, outputs)

    def _send(self, job: Job, unit: Unit, fire: Fire, operands: list[Tensor]) -> Sequence[Any]:
        assert unit.comm is not None
        assert unit.sent is not None
        at, register = unit.sent
        to, sequence = unit.comm.group[1], fire.writes[at][1]
        if unit.shared:
            fill(job.rooms[register], sequence, operands)
            self._transport.send(to, Filled(job.number, register, sequence))
            return ()
        payload = encode(operands) if unit.plane is None else None
        nbytes = sum(t.nbytes for t in operands)
        self._transport.send(to, Ready(job.number, register, sequence, nbytes, payload))
        if unit.plane is not None:
            unit.plane.send(to, operands)
        return ()

    def _receive(self, peer: int, ready: Ready) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ready.plan in self._jobs or self._failure is not None)
            if self._failure is not None:
                return
            job = self._jobs[ready.plan]
        job.expect(peer, ready)
        token = job.plane_of(ready.register).receive(peer, job.slots[ready.register].specs)
        self._inbox.put(self._arrive, job, ready.register, ready.sequence, token)

    def _lane_failed(self, error: BaseException, task: Any) -> None:
        if isinstance(task, Ready):
            self.fail(wrapped(error, f"rank {self.rank}, a thread that {receiving(task)}"))
        else:
            _, unit, fire, _ = task
            self.fail(actor_error(self.rank, unit, fire, error))


def _library() -> Mapping[str, Callable[..., Any]]:
    from actorflow_compiler.library import OPS

    return OPS
