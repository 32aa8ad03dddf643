"""The queue threads of one rank: they fire and receive what would hold the compute thread up.

Each queue has a thread of its own, as transfers block, and so do copies from a caller's memory.  Outputs and tokens go
to the compute thread's inbox.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from actorflow.devices import Device
from actorflow.runtime.actor_units import ActorUnit
from actorflow.runtime.collective_order import PostedReceive
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.installed_plan import InstalledPlan
from actorflow.runtime.queue_threads import QueueThread
from actorflow.runtime.recorder import Recorder, clock
from actorflow.runtime.story import actor_error, firing, receiving, wrapped
from actorflow.runtime.stream_events import EventWaits
from actorflow.transport.messages import Filled, Ready, Transport
from actorflow_compiler.plan.plan import Plane
from actorflow_scheduler.machine import Fire

__all__ = ["Coming", "Task", "Transfers"]

Task = tuple[InstalledPlan, ActorUnit, Fire, list[Any], EventWaits]  # a firing; its operands are gathered already
Coming = Ready | PostedReceive | Filled  # what is known of a token of another rank before it is here


class Transfers:
    """Starts a thread for each queue of one rank when it is first needed, and gives it tasks.

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
        finish: Callable[[InstalledPlan, ActorUnit, Fire, Sequence[Any]], None],
        arrive: Callable[..., None],
        installed: Callable[[int], InstalledPlan | None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._rank, self._on, self._transport, self._record = rank, on, transport, record
        self._inbox, self._finish, self._arrive = inbox, finish, arrive
        self._installed, self._fail = installed, fail
        self._lock = threading.Lock()
        self._threads: dict[str, QueueThread[Any]] = {}
        self._ended = False

    # --- for any thread ---

    def fire(self, task: Task) -> None:
        """Fire on the thread of the actor's queue."""
        self._put(task[1].actor.queue, self._fire, task)

    def launch_in_order(self, task: Task | PostedReceive) -> None:
        """Do what is next in the collective order, on the one thread that launches all of it."""
        self._put(Plane.NCCL, self._launch, task)

    def receive(self, peer: int, coming: Coming) -> None:
        """Receive a token on the thread that serves a peer."""
        self._put(f"receive:{peer}", lambda what: self._receive(peer, what), coming)

    def stop(self) -> None:
        """End all threads when they have done what they have; nothing more is taken."""
        with self._lock:
            self._ended = True
            for thread in self._threads.values():
                thread.stop()

    def join(self, end: float) -> None:
        """Wait for the threads to end, until ``time.monotonic()`` is ``end``."""
        for thread in tuple(self._threads.values()):
            if thread.thread is not threading.current_thread():
                thread.thread.join(max(0.0, end - time.monotonic()))

    def explain(self) -> list[str]:
        """What every thread is at."""
        lines = []
        for thread in tuple(self._threads.values()):
            task = thread.doing
            what = "idle" if task is None else receiving(task) if isinstance(task, Coming) else firing(task[1], task[2])
            lines.append(f"thread {thread.name}: {what}")
        return lines

    # --- the threads ---

    def _put(self, name: str, work: Callable[[Any], None], task: Any) -> None:
        thread = self._threads.get(name)
        if thread is None:
            with self._lock:
                thread = self._threads.get(name)
                if thread is None:
                    if self._ended:
                        return
                    thread = self._threads[name] = QueueThread(name, self._on, work, self._failed)
        thread.put(task)

    def _fire(self, task: Task) -> None:
        job, unit, fire, operands, waits = task
        start = 0 if self._record is None else clock()
        with waits.queue.context():
            waits.begin()
            memory = unit.stream.place(operands)
            outputs = unit.stream.own(unit.outputs(operands, fire, self._transport), memory)
        if self._record is not None:
            self._record.firing(job.number, unit.actor, fire.firing, start)
        self._inbox.put(self._finish, job, unit, fire, outputs)

    def _launch(self, next: Task | PostedReceive) -> None:
        if isinstance(next, PostedReceive):
            self._receive(next.call.ranks[0], next)
        else:
            self._fire(next)

    def _receive(self, peer: int, coming: Coming) -> None:
        job = self._installed(coming.plan)
        if job is None:
            return
        if isinstance(coming, Filled):
            filled = job.token(peer, coming)
            token, mark = job.stream_events.bring(coming.register, coming.sequence, lambda: self._on.to_device(filled))
        else:
            if isinstance(coming, Ready):
                job.expect(peer, coming)
            plane, specs = job.plane_of(coming.register), job.slots[coming.register].specs
            token, mark = job.stream_events.bring(coming.register, coming.sequence, lambda: plane.receive(peer, specs))
        self._inbox.put(self._arrive, job, coming.register, coming.sequence, token, mark)

    def _failed(self, error: BaseException, task: Any) -> None:
        if isinstance(task, Coming):
            self._fail(wrapped(error, f"rank {self._rank}, a thread that {receiving(task)}"))
        else:
            self._fail(actor_error(self._rank, task[1], task[2], error, task[0].plan))
