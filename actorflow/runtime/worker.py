"""The runtime of one rank, as the script's thread sees it: it installs plans, issues calls, and waits for them.

The compute thread (``compute.py``) decides which actors fire, and when.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actorflow.devices import Device, make_device
from actorflow.runtime.bodies.kernels import Kernels
from actorflow.runtime.bodies.run import BodyCompiler
from actorflow.runtime.call import Behind, Call, TakesBack, fresh
from actorflow.runtime.compute import Compute
from actorflow.runtime.installed_plan import InstalledPlan, open_planes
from actorflow.runtime.recorder import Recorder
from actorflow.runtime.snapshot import Cut, Snapshot
from actorflow.runtime.story import explain_plans
from actorflow.standins.logical_batch import ArrivingInput
from actorflow.transport.abandon import Order, Word
from actorflow.transport.messages import DataPlane, Line, Message, Stamp, Transport
from actorflow_compiler.core.errors import CallError, ClusterError, PlanError
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.machine import CallIssued

_ISSUED = CallIssued()
NOT_MADE = "this was a call before; the one that raises it has not been made"
_JOIN = 5.0  # seconds that close() waits for threads: a peer that hangs may block them for ever
_open: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """The runtime of one rank.

    All plans share the tensors in ``variables``.  At most ``in_flight`` calls are unfinished at a time.  If ``gated``,
    a call that is not issued as ``free`` waits for ``permit``.  ``library`` holds the ops named ``actorflow.NAME``
    (default: the compiler's).  ``record`` records firings and tokens with their times.  The compute thread is pinned to
    ``cores`` (empty: not pinned).
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
        self._in_flight, self._gated = in_flight, gated
        self._kernels = Kernels(self.device, _library() if library is None else library)
        self._runs = BodyCompiler(self.on, self._kernels)
        self._changed = threading.Condition()  # guards the attributes below, up to ``_closed``
        self._jobs: dict[int, InstalledPlan] = {}
        self._changes: dict[str, int] = {}  # variable → the last call of a dropped plan that has changed it
        self._before = 0  # the share of dropped plans in ``moved``
        self._issued = 0  # number of calls
        self._unfinished: deque[Call] = deque()  # calls with actors that have not fired
        self._behind = Behind()  # calls that have fired, but with work left on the device
        self._lost: list[Call] = []  # calls that were given up and that ``check`` has not handled yet
        self._last: Call | None = None  # the last call that was issued
        self._stays_last = -1  # a call that may be given up: no later call is issued until that is decided
        self._known = 0  # calls that were given up and that ``check`` has handled
        self._snapshots: list[Snapshot] = []  # with variables that are still to be copied
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._closed = False
        self._forked: ClusterError | None = None  # set in a process that the script forks
        self.record = record
        self._compute = Compute(
            rank, self.on, transport, record, cores, self.variables, self._fired, self._given_up,
            self._is_last, self.fail,
        )  # fmt: skip
        _open.add(self)

    # --- for users of the worker, on any thread ---

    def install(
        self,
        number: int,
        plan: Plan,
        variables: Mapping[str, Tensor] | None = None,
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Install this rank's part of a plan; every rank installs the same plans in the same order.

        Variables that the worker already has keep their tensors.  Without ``constants``, those of the plan are used.
        Blocks until the communicators of the plan are connected.  Raises PlanError if the plan cannot run here, and the
        worker's failure.
        """
        with self._changed:
            self._raise_failure()
            self._raise_if_forked()
            if number in self._jobs:
                raise PlanError(f"rank {self.rank}: plan number {number} is installed already; expected a new number")
            for name, tensor in (variables or {}).items():
                self.variables.setdefault(name, tensor.detach())
        if plan.mode.replays and self.on.replays:
            self.wait_all(tell=False)  # a CUDA graph can only be captured while nothing else runs
        job = InstalledPlan(
            number, plan, self.rank, self.on, self._kernels, self._runs, self._planes, self.variables, constants
        )
        open_planes(plan, self.rank, self._planes)
        if self.record is not None:
            self.record.install(number, plan)
        for home, region in job.lend():
            self._transport.send(home, region)
        self.on.synchronize()  # any thread may use the new tensors first
        with self._changed:
            self._raise_failure()
            self._jobs[number] = job
            self._compute.install(job)
            self._changed.notify_all()

    def issue(
        self,
        number: int,
        inputs: Mapping[str, Tensor | ArrivingInput] | None = None,
        scalars: Mapping[str, float] | None = None,
        leaves: Sequence[str] = (),
        undo: TakesBack | None = None,
        stamp: Stamp | None = None,
        free: bool = False,
    ) -> Call:
        """Call plan ``number`` once more; calls execute in the order in which they are issued.

        Returns at once, unless ``in_flight`` calls are unfinished; then it waits for the first of them.  ``inputs``
        must not change until the call is done.  ``leaves`` names changes in the script, beside variables, that cannot
        be taken back: with any, the call cannot be given up.  ``undo`` takes back the script's other changes.
        ``stamp`` goes to the ranks that the plan has something to do with; None where no other rank asks.  ``free``:
        the call may begin before all ranks have made it.  Raises CallError for missing arguments, the error of an
        earlier call that was given up (then this call is not issued), and the worker's failure.
        """
        self._raise_if_forked()
        self.check(NOT_MADE)
        inputs, scalars = dict(inputs or {}), dict(scalars or {})
        self._behind.limit_in_flight(self._unfinished, self._in_flight)
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
            lost = self._lost_before()
            call = Call(
                self._issued, number, inputs, scalars, job.results, job.firings, self._changed, lambda: self._failure,
                self.on, leaves, undo, stamp, free or not self._gated,
            )  # fmt: skip
            if lost is None:
                self._last = call
                self._issued += 1
                self._unfinished.append(call)
                self._compute.enqueue(job, call)
        if lost is not None:
            lost.tell(NOT_MADE)
        return call

    def busy(self, numbers: Set[int]) -> bool:
        """Whether a call of one of these plans is not done."""
        with self._changed:
            under_way = any(call.plan in numbers for call in self._unfinished)
        return under_way or self._behind.has(numbers)

    def drop(self, numbers: Set[int]) -> None:
        """Remove plans that no rank calls any more and whose calls here are done.  Their variables stay."""
        with self._changed:
            jobs = [self._jobs[number] for number in sorted(numbers) if number in self._jobs]
            for name, call in (one for job in jobs for one in job.last_changes()):
                self._changes[name] = max(self._changes.get(name, -1), call)
            for job in jobs:  # after their changes are kept, as ``last_change`` may be asked at any moment
                del self._jobs[job.number]
            self._before += sum(job.machine.moved() for job in jobs)
        for job in jobs:
            self._compute.drop(job)

    @property
    def plans(self) -> Set[int]:
        """The numbers of the plans that are installed."""
        return self._jobs.keys()

    def observed(self) -> list[tuple[Plan, tuple[int, ...]]]:
        """Each plan with the actors of its compute queue in the order in which they fired, as far as recorded."""
        if self.record is None:
            return []
        return [(job.plan, self.record.order(number, job.plan)) for number, job in sorted(self._jobs.items())]

    def snapshot(self, cuts: Mapping[str, Sequence[Cut]]) -> Snapshot:
        """Copies of rectangles of variables, as the calls that were issued until now leave them; returns at once.

        Raises the worker's failure.
        """
        snapshot = Snapshot(cuts, self.variables, self.on)
        with self._changed:
            self._raise_failure()
            self._snapshots = [*(one for one in self._snapshots if not one.finished), snapshot]
            self._compute.snapshot(snapshot)
        return snapshot

    def before_write(self, name: str) -> None:
        """Must be called before the script changes a variable, when all calls that it issued are done."""
        for snapshot in self._snapshots:
            snapshot.keep([name])

    def permit(self, number: int) -> None:
        """Let calls up to ``number`` begin, as all ranks count them: every rank has made them alike."""
        self._compute.permit(number)

    def deliver(self, peer: int, message: Message) -> None:
        """Process a message of another rank; messages of one rank must come in order.

        A message for a plan that is not installed yet is kept until it is.
        """
        self._compute.deliver(peer, message)

    def attach(self, line: Line) -> None:
        """Read another rank's messages from this socket from now on."""
        self._compute.attach(line)

    def check(self, more: str = "", *, settled: bool = False) -> None:
        """Raise the error of a call that was given up, unless the script has already got it from the call itself.

        Each error is raised once; ``more`` is one more sentence for its message.  All ranks of a ``gated`` run must
        raise it at the same point of their scripts, so it is raised only after ``in_flight`` further calls were issued,
        or if all calls are ``settled``.
        """
        with self._changed:
            last = self._issued if settled or not self._gated else self._issued - self._in_flight
            untold = None
            for call in sorted(self._lost, key=lambda call: call.number):
                if call.told or call.number < last:
                    self._lost.remove(call)
                    self._known += 1
                    if not call.told:
                        untold = call
                        break
        if untold is not None:
            untold.tell(more)

    @property
    def known_lost(self) -> int:
        """The number of calls that were given up and whose error the script has got."""
        with self._changed:
            return self._known + sum(call.told for call in self._lost)

    def on_lost(self, say: Callable[[Word], object]) -> None:
        """Set how to send words about failed calls to the coordinator, whose orders go to ``obey``.

        Without it, a call that fails on one of several ranks ends the run.
        """
        self._compute.say = say

    def obey(self, order: Order) -> None:
        """Follow the coordinator's order about a call that has failed on some rank."""
        self._compute.obey(order)

    def wait_all(self, timeout: float | None = None, *, tell: bool = True) -> None:
        """Return when every issued call is done.

        Raises the worker's failure, TimeoutError after ``timeout`` seconds, or, if ``tell``, what ``check`` raises.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unfinished or self._failure is not None, timeout):
                raise TimeoutError(
                    f"rank {self.rank}: {len(self._unfinished)} calls were not done in {timeout} s\n{self.explain()}"
                )
            self._raise_failure()
        try:
            self._behind.wait(end)
        except TimeoutError as error:
            raise TimeoutError(f"rank {self.rank}: {error}\n{self.explain()}") from None
        if tell:
            self.check(settled=True)

    def fail(self, failure: BaseException) -> None:
        """End the worker: all methods that wait, now or later, raise ``failure``.  Only the first failure counts."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
            self._halt()
        with ExitStack() as stack:  # call all callbacks, even if one raises
            for callback in callbacks:
                stack.callback(callback, failure)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Call ``callback`` once when the worker fails, on the thread that fails; at once if it has failed already."""
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
        self._compute.join(time.monotonic() + _JOIN)

    def standing(self) -> tuple[InstalledPlan | None, bool, str]:
        """The plan of the calls under way, whether the next call waits for other ranks, and the firing in progress."""
        call = next((c for c in tuple(self._unfinished) if not c.begun), None)
        early = call is not None and self._compute.waits_for_peers(call)
        return self._compute.current if self._compute.active else None, early, self._compute.doing

    @property
    def missing_calls(self) -> Mapping[int, int]:
        """Other rank → the first call, as all ranks count them, that this one waits for it to make.  Any thread."""
        return self._compute.missing_calls()

    def last_change(self, variable: str) -> int:
        """The last call, as all ranks count, that has changed a variable or begun to; -1 if none has.  Any thread."""
        found = (call for job in tuple(self._jobs.values()) for name, call in job.last_changes() if name == variable)
        return max([self._changes.get(variable, -1), *found])

    @property
    def awaited(self) -> str:
        """The rows of a data source that a source of this rank waits for, as text; empty if none does."""
        return self._compute.awaited

    def moved(self) -> int:
        """A number that grows with every event of this rank: calls, firings, tokens and credits."""
        return self._issued + self._before + sum(job.machine.moved() for job in tuple(self._jobs.values()))

    def explain(self) -> str:
        """What every queue and thread of the rank is doing and what it waits for, as text."""
        _, early, _ = self.standing()
        call = next((c for c in tuple(self._unfinished) if not c.begun), None)
        return "\n".join([
            f"rank {self.rank}: {len(self._unfinished)} unfinished calls, {self._compute.active} of them begun",
            *explain_plans(self._compute.current, None if call is None else (call, self._jobs[call.plan]), early),
            *self._compute.explain(),
            *filter(None, (plane.explain() for plane in self._planes.values())),
        ])  # fmt: skip

    def at_fork(self) -> None:
        """In a process that was forked while this thread held ``lock``: there, no thread carries out calls.

        What calls that were done have left can be read; all else raises ClusterError, where it would wait for ever.
        """
        pending = len(self._unfinished)
        self._forked = ClusterError(
            f"rank {self.rank}: a process that the script has forked uses a job, or what its calls leave. Only the "
            f"process that it was forked from runs jobs; {pending} calls were under way. Read what it needs before "
            "the fork (a result, a parameter; that waits for the calls), or start it by multiprocessing's 'spawn'"
        )
        if pending and self._failure is None:
            self._failure = self._forked

    @property
    def lock(self) -> threading.Condition:
        """What guards the worker's state; a thread that forks the process holds it."""
        return self._changed

    def _raise_if_forked(self) -> None:
        if self._forked is not None:
            raise fresh(self._forked)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure)

    def _halt(self) -> None:
        """Wake all waiting threads and end the worker's own; the caller holds ``_changed``."""
        self._behind.keep()
        for call in self._unfinished:
            call.keep()
        self._changed.notify_all()
        assert self._failure is not None
        for snapshot in self._snapshots:
            snapshot.fail(self._failure)
        self._compute.stop()
        for plane in self._planes.values():
            with suppress(Exception):  # a failed device may refuse any call; close the other planes none the less
                plane.close()

    def _fired(self, call: Call) -> None:
        with self._changed:
            call.fired = True
            call.inputs = {}
            if call.lost is None:
                call.undo = None
            self._unfinished.remove(call)
            if call.ended:
                self._behind.add(call)
            self._changed.notify_all()

    def _given_up(self, call: Call) -> None:
        with self._changed:
            self._lost.append(call)

    def _is_last(self, number: int) -> bool:
        """Whether no later call was issued; if so, none will be until this one is given up or the run ends."""
        with self._changed:
            if self._issued > number + 1:
                return False
            self._stays_last = max(self._stays_last, number)
            return True

    def _lost_before(self) -> Call | None:
        """The last call, if it was given up and the script has not got its error; waits while that is undecided.

        The script then takes back its changes, on which the new call's arguments depend, so the new call must not be
        issued.  The caller holds ``_changed``.
        """
        last = self._last
        if last is None or last.number != self._stays_last:
            return None
        while last.lost is None:
            self._changed.wait()
            self._raise_failure()
        return None if last.told else last


_forking = threading.local()  # of a thread that is about to fork the process: the workers whose locks it has


def _before_fork() -> None:
    _forking.workers = tuple(_open)
    for worker in _forking.workers:
        worker.lock.acquire()


def _after_fork(*, child: bool) -> None:
    for worker in _forking.workers:
        if child:
            worker.at_fork()
        worker.lock.release()
    _forking.workers = ()
    if child:
        _open.clear()  # nobody closes them here


os.register_at_fork(
    before=_before_fork,
    after_in_parent=partial(_after_fork, child=False),
    after_in_child=partial(_after_fork, child=True),
)


@atexit.register
def _close_all() -> None:
    """Close all workers at exit: a thread inside an op when the interpreter ends would abort the process (SIGABRT)."""
    for worker in tuple(_open):
        worker.close()


def _library() -> Mapping[str, Callable[..., Any]]:
    from actorflow_compiler.library import OPS

    return OPS
