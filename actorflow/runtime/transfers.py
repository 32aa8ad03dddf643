"""The queue threads of one rank, which do the firings and receives that would block the compute thread.

Transfers block, and so do copies from a caller's memory, so each queue has its own thread.  The threads put outputs and
received tokens into the compute thread's inbox.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from actorflow.devices import Device
from actorflow.runtime.actor_units import ActorUnit
from actorflow.runtime.collective_order import PostedReceive
from actorflow.runtime.early_messages import EarlyMessages
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.installed_plan import InstalledPlan
from actorflow.runtime.queue_threads import QueueThread
from actorflow.runtime.recorder import Recorder, clock
from actorflow.runtime.story import actor_error, firing, receiving, wrapped
from actorflow.runtime.stream_events import EventWaits
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.messages import Filled, Ready, Transport
from actorflow_compiler.plan.plan import Plane
from actorflow_scheduler.machine import Fire

__all__ = ["Coming", "Task", "Transfers"]

Task = tuple[InstalledPlan, ActorUnit, Fire, list[Any], EventWaits]  # a firing with its operands
Coming = Ready | PostedReceive | Filled  # announces a token of another rank, or says that it can be received


class Transfers:
    """Gives tasks to one thread for each queue of a rank, which is started when it is first needed.

    ``finish`` and ``arrive`` are put into ``inbox``, for the compute thread to call with outputs and with received
    tokens.  ``fail`` is called with the error that ends a thread.  No thread waits for a plan: what comes before its
    plan is kept until that is installed.
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
        fail: Callable[[BaseException], None],
    ) -> None:
        self._rank, self._on, self._transport, self._record = rank, on, transport, record
        self._inbox, self._finish, self._arrive = inbox, finish, arrive
        self._fail = fail
        self._lock = threading.RLock()
        self._jobs: dict[int, InstalledPlan] = {}
        self._early = EarlyMessages()
        self._threads: dict[str, QueueThread[Any]] = {}
        self._ended = False

    # --- for any thread ---

    def fire(self, task: Task) -> None:
        """Do a firing on the thread of the actor's queue."""
        self._put(task[1].actor.queue, self._fire, task)

    def launch_in_order(self, task: Task | PostedReceive) -> None:
        """Launch the next call of the collective order, on the one thread that launches all of them."""
        self._put(Plane.NCCL, self._launch, task)

    def receive(self, peer: int, coming: Ready | Filled) -> None:
        """Receive a token on the thread that receives from this peer, once its plan is here.

        Raises MessageRefused for a plan that was dropped, or is further ahead than any rank.
        """
        with self._lock:  # what comes while a plan is installed stays behind what has come before
            if coming.plan in self._jobs:
                self._put(f"receive:{peer}", lambda what: self._receive(peer, what), coming)
            else:
                self._early.keep(peer, coming)

    def install(self, job: InstalledPlan) -> None:
        """Add a plan, and receive what has been announced for it."""
        with self._lock:
            self._jobs[job.number] = job
            for peer, coming in self._early.take(job.number):
                assert isinstance(coming, Ready | Filled)
                self.receive(peer, coming)

    def drop(self, number: int) -> None:
        """Remove a plan whose calls are done."""
        with self._lock:
            del self._jobs[number]
            self._early.drop(number)

    def stop(self) -> None:
        """Ask all threads to end after the tasks that they have; returns at once.  No thread is started after that."""
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
        """What every thread is doing, as lines of text."""
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
        job = self._jobs.get(coming.plan)
        if job is None:
            what = f"a token of plan {coming.plan} after its last call"
            raise MessageRefused(RefusalReason.SEQUENCE, what, "none of a plan that all ranks have dropped", peer)
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
