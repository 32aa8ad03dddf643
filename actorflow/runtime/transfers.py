"""Firings that would hold the compute thread up enter, and what peers announce; outputs and tokens leave for its inbox.

Each queue has a thread of its own: transfers block, and so does what is copied from a caller's memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from actorflow.devices import Device
from actorflow.runtime.collective_order import Post
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.job import Job, Unit
from actorflow.runtime.queue_threads import Lane
from actorflow.runtime.recorder import Recorder, clock
from actorflow.runtime.story import actor_error, firing, receiving, wrapped
from actorflow.runtime.stream_events import Waits
from actorflow.transport.messages import Filled, Ready, Transport
from actorflow.transport.shared import fill
from actorflow.transport.small_tensors import encode
from actorflow_compiler.plan.plan import Collective, Plane, Send
from actorflow_scheduler.machine import Fire

__all__ = ["Coming", "Task", "Transfers"]

Task = tuple[Job, Unit, Fire, list[Any], Waits | None]  # a firing; its operands are gathered already
Coming = Ready | Post | Filled  # what is known of a token of another rank before it is here


class Transfers:
    """The threads of one rank's queues.

    ``finish`` and ``arrive`` are what the compute thread does with outputs and with tokens; they go to
    ``inbox``.  ``installed`` waits for the plan of a number, and gives None where the run ends before.
    ``fail`` is told of the first error of a thread, which ends that thread.
    """

    def __init__(
        self,
        rank: int,
        on: Device,
        transport: Transport,
        record: Recorder | None,
        inbox: Inbox,
        finish: Callable[[Job, Unit, Fire, Sequence[Any]], None],
        arrive: Callable[..., None],
        installed: Callable[[int], Job | None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._rank, self._on, self._transport, self._record = rank, on, transport, record
        self._inbox, self._finish, self._arrive = inbox, finish, arrive
        self._installed, self._fail = installed, fail
        self._lock = threading.Lock()
        self._lanes: dict[str, Lane[Any]] = {}
        self._ended = False

    # --- for any thread ---

    def fire(self, task: Task) -> None:
        """Fire on the thread of the actor's queue."""
        self._put(task[1].actor.queue, self._carry, task)

    def turn(self, turn: Task | Post) -> None:
        """Do what comes next in the order of all ranks, on the one thread that issues all of it."""
        self._put(Plane.NCCL, self._take_turn, turn)

    def receive(self, peer: int, coming: Coming) -> None:
        """Receive a token on the thread that serves a peer."""
        self._put(f"receive:{peer}", lambda what: self._receive(peer, what), coming)

    def bring(self, job: Job, coming: Coming, take: Callable[[], Sequence[Tensor]]) -> None:
        """Put a token of another rank on a device that runs ahead, on this thread, when its slot there is free."""
        assert job.trails is not None
        waits = job.trails.receive(coming.register, coming.sequence)
        with waits.queue.context():
            waits.begin()
            token = take()
            mark = waits.queue.mark()
        self._inbox.put(self._arrive, job, coming.register, coming.sequence, token, mark)

    def outputs(self, job: Job, unit: Unit, fire: Fire, operands: list[Any]) -> Sequence[Any]:
        """Compute or communicate, on this thread; the operands' list is emptied by a kernel."""
        if unit.run is not None:
            return unit.run(operands)
        if unit.kernel is not None:
            sums = unit.adding.sums() if unit.adding is not None else None
            if unit.adding is None or not sums:
                return unit.kernel(operands)
            operands += sums
            del sums
            return unit.adding.kernel(operands)
        if unit.comm is None:
            return operands
        if unit.sent is not None:
            return self._send(job, unit, fire, operands)
        assert unit.plane is not None
        assert isinstance(unit.comm, Collective)
        return unit.plane.collective(unit.comm, operands, unit.specs)

    def stop(self) -> None:
        """End all threads when they have done what they have; nothing more is taken."""
        with self._lock:
            self._ended = True
            for lane in self._lanes.values():
                lane.stop()

    def join(self, end: float) -> None:
        """Wait for the threads to end, until ``time.monotonic()`` is ``end``."""
        for lane in tuple(self._lanes.values()):
            if lane.thread is not threading.current_thread():
                lane.thread.join(max(0.0, end - time.monotonic()))

    def explain(self) -> list[str]:
        """What every thread is at."""
        lines = []
        for lane in tuple(self._lanes.values()):
            task = lane.doing
            what = "idle" if task is None else receiving(task) if isinstance(task, Coming) else firing(task[1], task[2])
            lines.append(f"thread {lane.name}: {what}")
        return lines

    # --- the threads ---

    def _put(self, name: str, work: Callable[[Any], None], task: Any) -> None:
        lane = self._lanes.get(name)
        if lane is None:
            with self._lock:
                lane = self._lanes.get(name)
                if lane is None:
                    if self._ended:
                        return
                    lane = self._lanes[name] = Lane(name, self._on, work, self._failed)
        lane.put(task)

    def _carry(self, task: Task) -> None:
        job, unit, fire, operands, waits = task
        start = 0 if self._record is None else clock()
        if waits is None or unit.passage is None:
            outputs = self.outputs(job, unit, fire, operands)
        else:
            with waits.queue.context():
                waits.begin()
                memory = unit.passage.place(operands)
                outputs = unit.passage.own(self.outputs(job, unit, fire, operands), memory)
        if self._record is not None:
            self._record.firing(job.number, unit.actor, fire.firing, start)
        self._inbox.put(self._finish, job, unit, fire, outputs)

    def _take_turn(self, turn: Task | Post) -> None:
        if isinstance(turn, Post):
            self._receive(turn.call.ranks[0], turn)
        else:
            self._carry(turn)

    def _send(self, job: Job, unit: Unit, fire: Fire, operands: list[Tensor]) -> Sequence[Any]:
        assert isinstance(unit.comm, Send)
        assert unit.sent is not None
        at, register = unit.sent
        to, sequence = unit.comm.to_rank, fire.writes[at][1]
        if unit.plane is None and unit.passage is not None:
            operands = self._on.to_host(operands)
        if unit.shared:
            fill(job.rooms[register], sequence, operands)
            self._transport.send(to, Filled(job.number, register, sequence))
            return ()
        if unit.in_turn and unit.plane is not None:  # the other rank knows of it, and receives in its turn
            unit.plane.send(to, operands)
            return ()
        payload = encode(operands) if unit.plane is None else None
        nbytes = sum(t.nbytes for t in operands)
        self._transport.send(to, Ready(job.number, register, sequence, nbytes, payload))
        if unit.plane is not None:
            unit.plane.send(to, operands)
        return ()

    def _receive(self, peer: int, coming: Coming) -> None:
        job = self._installed(coming.plan)
        if job is None:
            return
        if isinstance(coming, Filled):
            filled = job.token(peer, coming)
            self.bring(job, coming, lambda: self._on.to_device(filled))
            return
        if isinstance(coming, Ready):
            job.expect(peer, coming)
        plane, specs = job.plane_of(coming.register), job.slots[coming.register].specs
        if job.trails is None:
            self._inbox.put(self._arrive, job, coming.register, coming.sequence, plane.receive(peer, specs))
        else:
            self.bring(job, coming, lambda: plane.receive(peer, specs))

    def _failed(self, error: BaseException, task: Any) -> None:
        if isinstance(task, Coming):
            self._fail(wrapped(error, f"rank {self._rank}, a thread that {receiving(task)}"))
        else:
            self._fail(actor_error(self._rank, task[1], task[2], error, task[0].plan))
