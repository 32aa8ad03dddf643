"""The compute thread of one rank: it runs the actor machines and fires what computes.

The thread owns all state of the plans.  Messages, permits and calls come to its inbox; communication, which blocks,
goes to queue threads (``transfers.py``), whose outputs come back to the inbox.  Nothing polls and nothing sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor

from actorflow.devices import Device, Mark
from actorflow.runtime.actor_units import ActorUnit, ComputeUnit
from actorflow.runtime.bodies.kernels import culprit
from actorflow.runtime.call import Call, told
from actorflow.runtime.collective_order import CollectiveOrder
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.installed_plan import InstalledPlan
from actorflow.runtime.lines import PeerSockets
from actorflow.runtime.memory import ran_out
from actorflow.runtime.queue_threads import prepare_thread
from actorflow.runtime.recorder import Recorder, clock
from actorflow.runtime.story import actor_error, again, cause_of, firing, line_of, some, wrapped
from actorflow.runtime.stream_events import NO_MEMORY
from actorflow.runtime.transfers import Task, Transfers
from actorflow.transport.abandon import Decision, Failed, Hold, Order, Vote, Word
from actorflow.transport.messages import Credit, Filled, Line, Message, Ready, Region, Transport
from actorflow.transport.shared import owned
from actorflow.transport.small_tensors import decode
from actorflow_scheduler.machine import CallIssued, CreditReturned, Fire, GiveCredit, Instruction, Release, TokenArrived

__all__ = ["Compute"]

_ISSUED = CallIssued()
OTHERS = "other calls are done as ever"


class Compute:
    """The thread that fires one rank's actors; its public methods are for any thread and return at once.

    ``variables`` is what plans read and write.  Where ``gated``, call n waits for ``permit(n)``.  ``installed`` waits
    for the plan of a number, and gives None where the run ends before.  ``fired`` is told of each call whose
    actors have all fired, ``lost`` of each that is given up, ``fail`` of what ended the thread.
    """

    def __init__(
        self,
        rank: int,
        on: Device,
        transport: Transport,
        record: Recorder | None,
        cores: Set[int],
        variables: dict[str, Tensor],
        gated: bool,
        installed: Callable[[int], InstalledPlan | None],
        fired: Callable[[Call], None],
        lost: Callable[[Call], None],
        is_last: Callable[[int], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._rank, self._on, self._transport, self._record = rank, on, transport, record
        self._variables, self._gated = variables, gated
        self._fired, self._lose, self._is_last, self._fail = fired, lost, is_last, fail
        self.say: Callable[[Word], object] | None = None  # tells the coordinator of calls that fail
        self._jobs: dict[int, InstalledPlan] = {}
        self._pending: deque[tuple[InstalledPlan, ActorUnit, Fire]] = deque()  # fires for this thread
        self._order: CollectiveOrder[Task] = CollectiveOrder()  # of what all ranks launch in one order
        self._waiting: deque[tuple[InstalledPlan, Call]] = deque()  # issued, not begun
        self._permits: set[int] = set()
        self._early: dict[int, list[tuple[int, Message]]] = {}  # messages for plans that are not installed
        self._dropped: set[int] = set()  # numbers of plans
        self._current: InstalledPlan | None = None  # that of the calls which are under way
        self._doing: tuple[ActorUnit, Fire] | None = None
        self._cores = cores
        self._start = 0  # of the firing that the thread is at, in ns, where it is recorded
        self._stopped = False
        self._inbox = Inbox()  # (method, *arguments)
        self._transfers = Transfers(
            rank, on, transport, record, self._inbox, self._finish_transfer,
            self._arrive, installed, fail,
        )  # fmt: skip
        self._lines = PeerSockets(self._inbox, self._deliver_here)
        self.active = 0  # calls that are begun and unfinished
        self._lost = 0  # of these, those that have failed and are given up
        self._enqueued = -1  # the last call that has come
        self._held: dict[int, list[Callable[[], None]]] = {}  # what calls that failed on some rank would do next
        self._raised: dict[int, tuple[BaseException, str]] = {}  # what failed here of these, and why the run has to end
        self._given_up: dict[int, tuple[BaseException, str]] = {}  # calls that have not come yet: why, at which line
        self._thread = threading.Thread(target=self._run, name=f"actorflow rank {rank} compute", daemon=True)
        self._thread.start()

    # --- for any thread ---

    def install(self, job: InstalledPlan) -> None:
        """Take in a plan."""
        self._inbox.put(self._install, job)

    def drop(self, job: InstalledPlan) -> None:
        """Let go of a plan whose calls are done."""
        self._inbox.put(self._drop, job)

    def enqueue(self, job: InstalledPlan, call: Call) -> None:
        """Do a call after those before it."""
        self._inbox.put(self._enqueue, job, call)

    def permit(self, number: int) -> None:
        """Let call ``number`` start."""
        self._inbox.put(self._allow, number)

    def obey(self, order: Order) -> None:
        """Do what the coordinator says of a call that has failed on some rank."""
        self._inbox.put(self._decide if isinstance(order, Decision) else self._vote, order)

    def deliver(self, peer: int, message: Message) -> None:
        """Take a message of another rank, whose messages come in order; early ones are kept for later."""
        if isinstance(message, Ready) and message.payload is None:
            self._transfers.receive(peer, message)
        else:
            self._inbox.put(self._take_in, peer, message)

    def attach(self, line: Line) -> None:
        """Read the messages of another rank from a socket from now on."""
        self._inbox.put(self._lines.watch, line)

    def stop(self) -> None:
        """End all threads when they have done what they have."""
        self._inbox.put(self._stop)
        self._transfers.stop()

    def join(self, end: float) -> None:
        """Wait for the threads to end, until ``time.monotonic()`` is ``end``."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, end - time.monotonic()))
        self._transfers.join(end)

    @property
    def current(self) -> InstalledPlan | None:
        """The job of the calls that are under way, or were last."""
        return self._current

    @property
    def doing(self) -> str:
        """What is fired now, for people; empty: nothing."""
        at = self._doing
        return "" if at is None else firing(*at)

    def waits_for_peers(self, number: int) -> bool:
        """Whether a call that has not begun waits for other ranks to issue it."""
        return self._gated and number not in self._permits

    def explain(self) -> list[str]:
        """What every thread is at."""
        waiting = self._order.waiting()
        return [
            f"thread compute: {self.doing or 'waits for an event'}",
            *self._transfers.explain(),
            *([waiting] if waiting else []),
            *(f"call {number} has failed on some rank: it waits for the votes of all" for number in tuple(self._held)),
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
                        lines.flush()  # what came of short firings leaves together, before a kernel or sleep
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
        inbox.close()

    def _deliver_here(self, peer: int, message: Message) -> None:
        """What a line brings: a transfer that blocks goes to its queue thread, the rest is done here."""
        if type(message) is Ready and message.payload is None:
            self.deliver(peer, message)
        else:
            self._take_in(peer, message)

    def _stop(self) -> None:
        self._stopped = True

    def _install(self, job: InstalledPlan) -> None:
        self._jobs[job.number] = job
        self._order.install(job.number, job.nccl_calls, {r.id: (r.slots, r.initial) for r in job.plan.registers})
        for peer, message in self._early.pop(job.number, ()):
            self._take_in(peer, message)

    def _drop(self, job: InstalledPlan) -> None:
        del self._jobs[job.number]
        self._dropped.add(job.number)
        self._order.drop(job.number)
        if self._current is job:
            self._current = None

    def _allow(self, number: int) -> None:
        self._permits.add(number)
        self._begin()

    def _enqueue(self, job: InstalledPlan, call: Call) -> None:
        self._enqueued = call.number
        self._waiting.append((job, call))
        self._begin()

    def _begin(self) -> None:
        """Begin the calls that may: a call of another plan than the running one waits until that is done."""
        while self._waiting:
            job, call = self._waiting[0]
            if self._gated and call.number not in self._permits:
                return
            if self.active and job is not self._current:
                return
            self._waiting.popleft()
            call.begun = True
            self._permits.discard(call.number)
            job.join(self._current, call)
            if not job.firings:
                if call.number in self._held:
                    self._held[call.number].append(partial(self._end_without_actors, call))
                else:
                    self._end_without_actors(call)
                continue
            if call.number in self._given_up:
                self._give_up(call, *self._given_up.pop(call.number))
            self._current = job  # the last one that had something to do here: the next one's queues wait for its
            self.active += 1
            if self._record is not None:
                self._record.began(job.number, job.begun, call.issued)
            job.calls[job.begun] = call
            job.begun += 1
            self._order.begin(job.number)
            self._apply(job, job.machine.handle(_ISSUED))

    def _take_in(self, peer: int, message: Message) -> None:
        job = self._jobs.get(message.plan)
        if job is None and message.plan in self._dropped:  # a slot is free again that nobody fills any more
            if isinstance(message, Region):
                os.close(message.descriptor)
        elif job is None:
            self._early.setdefault(message.plan, []).append((peer, message))
        elif isinstance(message, Credit):
            if self._record is not None:
                self._record.credited(job.number, message.register)
            if self._order.credited(job.number, message.register):
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
            register, sequence = message.register, message.sequence
            there, mark = job.stream_events.bring(register, sequence, lambda: self._on.to_device(token))
            self._arrive(job, register, sequence, there, mark)

    def _credited(self, job: InstalledPlan, register: int) -> None:
        self._apply(job, job.machine.handle(CreditReturned(register)))

    def _take_filled(self, job: InstalledPlan, peer: int, filled: Filled) -> None:
        """Read a token in shared memory where it lies; a queue thread copies it to a device with memory of its own."""
        if self._on.ahead:
            self._transfers.receive(peer, filled)
        else:
            self._arrive(job, filled.register, filled.sequence, job.token(peer, filled))

    def _arrive(
        self, job: InstalledPlan, register: int, sequence: int, token: Sequence[Tensor], mark: Mark | None = None
    ) -> None:
        if self._record is not None:
            self._record.arrived(job.number, register, sequence)
        job.slots[register].put(sequence, token)
        job.stream_events.received(register, sequence, mark)
        self._apply(job, job.machine.handle(TokenArrived(register)))

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
        if self._held and (held := self._holding(job.calls[fire.firing // unit.rate], unit)) is not None:
            held.append(partial(self._begin_firing, job, unit, fire))
        elif unit.inline:
            if unit.computes:
                self._pending.append((job, unit, fire))
            else:  # it is short, and others may wait for it
                self._pending.appendleft((job, unit, fire))
        elif unit.ordered:
            came = self._order.fired(job.number, fire.actor, self._task(job, unit, fire))
            if came is not None:
                self._inbox.put(self._credited, job, came)
        else:
            self._transfers.fire(self._task(job, unit, fire))

    def _gather(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> list[Any]:
        held = fire.reads
        boxes: list[Any] = [slots.take(held[at][1]) for at, slots in unit.reads]
        if self._lost and job.calls[fire.firing // unit.rate].lost is not None:  # it moves what nobody looks at
            boxes = [token or slots.blank() for token, (_, slots) in zip(boxes, unit.reads, strict=True)]
        if unit.outer:
            iteration, piece = divmod(fire.firing, unit.rate)
            call = job.calls[iteration]
            boxes += (self._variables, job.constants, call.inputs, call.scalars, (piece,))
        return [boxes[box][key] for box, key in unit.operands]

    def _task(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> Task:
        """A firing for another thread."""
        return job, unit, fire, self._gather(job, unit, fire), unit.stream.waits(fire)

    def _fire_in_context(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> None:
        """Fire on a device that runs ahead; elsewhere a context does nothing, and costs a tiny call 1 % of its time."""
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
        values = self._gather(job, unit, fire)
        memory = stream.place(values) if stream.moves else NO_MEMORY
        try:
            if isinstance(unit, ComputeUnit):  # most firings, so without a call between
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

    def _broken(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, error: Exception) -> None:
        """A body has failed: give its call up if it has changed nothing yet, on no rank.

        Buffers may have changed on one device: in PyTorch a forward pass that fails leaves those that it has come to
        changed, too.  On several ranks those are put back that a call has changed: each may be at another point.

        Its other actors fire without computing, so that the calls around it find everything as ever.  Raises what is
        the end of the run.
        """
        raised = actor_error(self._rank, unit, fire, error, job.plan)
        if not isinstance(unit, ComputeUnit) or raised is error or (job.plan.world > 1 and ran_out(error)):
            raise raised
        if self._on.ahead:  # what the device has changed since is not known
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
        buffers = [name for name in changed if (v := job.plan.variable(name)) is not None and v.kind == "buffer"]
        more = [*(name for name in changed if name not in buffers), *call.leaves, *leaves]
        if more or job.carries:
            had = f"the call had changed {some(more)} before, and no call can follow it: load a checkpoint"
            raise told(raised, had)
        what = f"buffers ({some(buffers)}) and nothing else" if buffers else "nothing"
        self._give_up(call, told(raised, f"the call has changed {what}{_but(line)}, and {OTHERS}"), line)
        self._forgo(job, unit, fire)

    def _takes_back(self, call: Call, line: str) -> tuple[str, Sequence[str]]:
        """The line at which the script takes back what a call has changed of it; and what it cannot.

        It can where the step has changed the same whenever it came to that line, and nobody has seen what the call has
        changed: no later call is issued before this one is given up.
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
        """Start nothing more of a call; what it would do next."""
        number = call if isinstance(call, int) else call.number
        held = self._held.setdefault(number, [])
        for entry in [e for e in self._pending if e[0].calls[e[2].firing // e[1].rate].number == number]:
            self._pending.remove(entry)
            held.append(partial(self._begin_firing, *entry))
        return held

    def _holding(self, call: Call, unit: ActorUnit) -> list[Callable[[], None]] | None:
        """Where a firing waits, if its call is held, or changes what one before it may have to put back."""
        first = min(self._held)
        return self._held[first] if unit.undone and call.number > first else self._held.get(call.number)

    def _vote(self, order: Order) -> None:
        """Hold a call, and say whether it can be given up here."""
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
        """Why a call cannot be given up on this rank; empty where it can."""
        call = job.calls[iteration]
        if self._on.ahead:
            return f"{self._on.where} runs ahead of what is known of its calls"
        late = {name for other in job.calls.values() if other.number > call.number for name in other.before}
        more = [*(name for name in changed if name not in call.before or name in late), *call.leaves]
        if more:
            return f"the call had changed {some(more)} before"
        return "registers carry values from call to call" if job.carries else ""

    def _decide(self, decision: Order) -> None:
        """Give a call up that every rank holds, or end the run."""
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
        for go_on in self._held.pop(number):  # what another call holds is held again
            go_on()

    def _keep(self, call: Call, unit: ActorUnit) -> None:
        """Remember the values of variables that a firing is about to change."""
        for name in unit.undone:
            if name not in call.before:
                call.before[name] = self._variables[name].clone()

    def _forgo(self, job: InstalledPlan, unit: ActorUnit, fire: Fire) -> None:
        """Finish a firing of a call that is given up: nothing changes, and its tokens are empty."""
        if self._record is not None:
            self._record.firing(job.number, unit.actor, fire.firing, self._start)
        for store in unit.stores:
            _, sequence, complete = fire.writes[store.at]
            store.slots.forgo(sequence, complete)
        self._end(job, unit, fire, job.calls[fire.firing // unit.rate])

    def _finish(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, outputs: Sequence[Any]) -> None:
        """Put the outputs where they belong and tell the machine."""
        call = job.calls[fire.firing // unit.rate]
        if self._held and call.number in self._held:  # a transfer has ended meanwhile
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
        self._fired(call)

    def _end(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, call: Call) -> None:
        """Tell the machine, and with the last firing of a call whoever waits for its end."""
        self._doing = None
        self._apply(job, job.machine.handle(unit.finished))
        call.left -= 1
        if not call.left:
            self._lost -= call.lost is not None
            call.ended = [mark for queue in job.queues if not (mark := queue.mark()).passed()]
            del job.calls[fire.firing // unit.rate]
            self.active -= 1
            self._fired(call)
            self._begin()

    def _finish_transfer(self, job: InstalledPlan, unit: ActorUnit, fire: Fire, outputs: Sequence[Any]) -> None:
        """Finish a firing of a queue thread."""
        with unit.stream.queue.context():
            self._finish(job, unit, fire, outputs)
        if job.stream_events.leaving:
            job.stream_events.sweep()

    def _give(self, call: Call, unit: ActorUnit, fire: Fire, outputs: Sequence[Any]) -> None:
        found = [(i, outputs[o].clone() if shared else outputs[o]) for o, i, shared in unit.results]
        call.give(found, unit.stream.end(fire, result=True))


def _but(line: str) -> str:
    """What is not taken back of a call that is given up at a line of the user's code, as a clause."""
    return " but what its step does in Python before that line" if line else ""
