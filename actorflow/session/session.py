"""Calls of jobs go in, in the order of the script; plans, issued calls and handles on their results come out."""

from __future__ import annotations

import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from actorflow.control.cluster import Alone, Cluster
from actorflow.control.dropped import NOTHING, Dropped, dropped
from actorflow.devices import make_device
from actorflow.rendezvous.device_assignment import Wishes, device_of, idle_oversubscribe
from actorflow.rendezvous.failure import Failure
from actorflow.rendezvous.settings import NCCL_TIMEOUT, threads_of
from actorflow.runtime.collective_order import NCCL
from actorflow.runtime.measured_costs import Target
from actorflow.runtime.memory import out_of_memory, ran_out
from actorflow.runtime.observer import Observer
from actorflow.runtime.results import Results
from actorflow.runtime.story import too_late
from actorflow.runtime.worker import NOT_MADE, Worker
from actorflow.script_state import tree
from actorflow.script_state.arguments import Arguments, checksum, flatten, glance, refuse_modes
from actorflow.script_state.changes import Change, carry_out
from actorflow.script_state.find import Found, Names, look
from actorflow.script_state.guards import Guards
from actorflow.script_state.keyed import key_here
from actorflow.script_state.seeds import seeds
from actorflow.session.agreement import Report, report
from actorflow.session.barrier import Gates
from actorflow.session.body import JobArguments, PreparedCall
from actorflow.session.checked import failure_of, first_failed
from actorflow.session.compiling import Made, Order, hints_of, located, make_everywhere, make_pretended, own_seat
from actorflow.session.fed import Fed
from actorflow.session.gone import Gone
from actorflow.session.jobs import Compiled, JobLike, bound
from actorflow.session.keys import Keys, fresh, refuse_mixed, spoken
from actorflow.session.numbers import Reading, fused, known_to, write
from actorflow.session.planes import unshare
from actorflow.session.pull_server import PullServer
from actorflow.session.shared_memory import refuse_shared, refuse_sparse
from actorflow.session.undo import Undo
from actorflow.standins.owned import Owned
from actorflow.support.script_error import drop_echoes
from actorflow.transport.messages import DataPlane
from actorflow.transport.nccl import NcclPlane
from actorflow.transport.of_rank import planes_of
from actorflow.transport.timeouts import Started
from actorflow.variables.gradients import made_by_script, standing_before
from actorflow.variables.optimizer_state import count_as_stepped
from actorflow.variables.parked import names_in, owned_in
from actorflow.variables.rebound import Rebound, leaves_of
from actorflow.variables.state import Variables
from actorflow_compiler.core.errors import ActorError, CaptureError, StateError
from actorflow_compiler.core.expressions import Known
from actorflow_compiler.core.lines import asks_for_types
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.plan.plan import OfInput, OfScalar, Plan, Variable
from actorflow_compiler.values.checks import Check
from actorflow_compiler.values.gradients import NONE, Standing
from actorflow_compiler.values.variables import WITH_PARAMETERS, State

__all__ = ["Observers", "PlanReady", "Session"]

Observers = Callable[[Alone | Cluster, Gates], Iterable[Observer]]  # made with the session that they look on at

CHECK_CONTENTS = 100  # calls of one plan between two looks at all contents of the arguments
BEHIND = 8  # calls after which ranks let go of what all of them have dropped by then: they are never so far apart


class PlanReady(BaseException):
    """Ends a script whose plan was all that was wanted."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(f"the plan of job {plan.name!r} is ready")
        self.plan = plan


class Session:
    """One process's part of a run: one cluster, one worker, one set of variables, shared by all jobs.

    ``observers`` are told of its calls, plan by plan and call by call.
    """

    def __init__(self, cluster: Cluster | Alone, observers: Observers = lambda *_: ()) -> None:
        self.cluster = cluster
        self.rank, self.world = cluster.rank, cluster.world
        self.names = Names()
        self.calls = 0  # gated so far
        self.worker: Worker | None = None
        self.variables: Variables
        self.results: Results
        self._rebound: Rebound
        self._plans = 0
        self._kinds: tuple[str, ...] = ()  # of each rank's device; the first plan settles them
        self._fed = Fed()
        self._seed = 0  # of random ops, where the script does not set it: the master's, known with the first plan
        self.capturing = False
        self.jobs: weakref.WeakKeyDictionary[JobLike, None]  # that have a plan, in the order of their first ones
        self.jobs = weakref.WeakKeyDictionary()
        self._gone = Gone()
        self._told = NOTHING  # what this rank has told the others of that it could drop
        self._untold = False  # whether there may be more than that
        self._over: StateError | None = None  # why no call can follow
        self._pretended: dict[str, Variable] = {}  # layouts that plans of a pretended cluster decided
        self._gates = Gates(cluster)
        self._observers = tuple(observers(cluster, self._gates))
        drop_echoes()
        cluster.on_go(self._go)
        PullServer(self, cluster, self._gates)
        cluster.on_failure(self._failed)

    # -- a call ------------------------------------------------------------------------------------

    def call(self, job: JobLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a job on this rank; returns at once with what the job's function returns, in handles."""
        if self.capturing:  # a job inside a job is a plain function
            return job.function(*args, **kwargs)
        refuse_modes(job.name, job.type == "train")
        without = job.type != "train" and torch.is_grad_enabled()  # what only predicts has no graph
        if without or torch.is_inference_mode_enabled():  # whose tensors count no changes
            with torch.inference_mode(False), torch.no_grad():
                return self._begin(job, args, kwargs, graph=without)
        return self._begin(job, args, kwargs, graph=torch.is_grad_enabled())

    def _begin(self, job: JobLike, args: tuple[Any, ...], kwargs: dict[str, Any], graph: bool) -> Any:
        """See ``call``; ``graph``: whether PyTorch would make a graph of it."""
        given = job.body.take(args, kwargs, self.world)
        on = None if self.worker is None else self.worker.on
        room = on.staging if on is not None and on.ahead else None  # one copy, into memory that the device reads
        arguments = flatten(job.name, job.signature, given.args, given.kwargs, room, graph)
        asked = self._prepared(job, arguments, given)
        with asked.around():
            return self._call(job, asked, args, kwargs)

    def _call(self, job: JobLike, asked: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.cluster.settings.pretend:
            return self._pretend(job, asked, args, kwargs)
        arguments = asked.arguments
        if self._over is not None:
            raise self._over
        if self.worker is not None:
            self.worker.check(NOT_MADE)
        compiled = self.plan_for(job, arguments)
        if compiled is None and job.plans.aside and self._unpark(job, asked):
            compiled = self._find(job, arguments)
        if compiled is not None:  # it may read parts of other ranks, which change once all have announced the call
            self._rebound.make_way(compiled.sites, self._states)
        number = self._announce(job, arguments, compiled)
        if compiled is None:
            if self.rank == 0 and (note := job.plans.note()):
                print(f"actorflow: {note}", file=sys.stderr, flush=True)
            compiled = self._compile(job, asked, number)
            job.plans.add(arguments, compiled)
        return job.body.give(self._issue(job, compiled, arguments, number))

    def plan_for(self, job: JobLike, arguments: Arguments) -> Compiled | None:
        """Take over what the script has changed, and look up the plan that holds for a call; all that guards cost."""
        if self.worker is not None:
            self._rebound.refresh(self._rebound.among(partial(self._holders, job)), self._states)
            self._let_go()
            self.variables.refresh(job.type == "train")
        return self._find(job, arguments)

    def _find(self, job: JobLike, arguments: Arguments) -> Compiled | None:
        return job.plans.find(arguments, lambda keys: fresh(keys.state), self._misfit)

    def _prepared(self, job: JobLike, arguments: Arguments, given: JobArguments) -> PreparedCall:
        """The call, with what its job's function makes."""

        def search(held: Mapping[str, Any]) -> State:
            state = self._look(job, held, arguments).state
            job.keys = Keys(state)
            return state

        asked = job.body.prepare(arguments, given, search, self._aside)
        if job.keys is None:
            search(asked.held())
        return asked

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Jobs that are called inside of this are plain functions."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def _look(self, job: JobLike, held: Mapping[str, Any], arguments: Arguments) -> Found:
        try:
            return look(job.function, job.model, job.optimizer, self.names, held, arguments.objects)
        except CaptureError as error:
            raise located(error, job.function) from error.__cause__

    def _issue(self, job: JobLike, compiled: Compiled, arguments: Arguments, number: int) -> Any:
        worker = self.worker
        assert worker is not None
        try:
            self.variables.check(self._gone.uses(compiled.number), job.type == "train")
        except StateError as error:
            raise located(error, job.function) from None
        self._fed.look(job.name, arguments, compiled.inputs, worker.device)
        inputs = {
            spec.name: tensor if worker.on.ahead else tensor.to(worker.device)  # a plan's sources move it themselves
            for spec, tensor in zip(arguments.specs, arguments.tensors, strict=True)
            if spec.name in compiled.inputs
        }
        found = compiled.bound.found
        known = known_to(arguments, found.state, found.looked)
        scalars = compiled.reading.values(known)
        scalars[SEED] = seeds.next(self._seed, self.rank if compiled.mirrored else 0)
        variables = self.variables
        moved = (*variables.values.moved_by(compiled.decisions), *variables.gradients.moved_by(compiled.gradients))
        leaves = (*compiled.leaves, *moved)
        undo = Undo.of(compiled.changes, compiled.stops, found.looked, known) if compiled.changes else None
        call = worker.issue(compiled.number, inputs, scalars, leaves, undo)
        if self._gates.issue(number, call):
            worker.permit(call.number)
        handles = self.results.handles(number, call, compiled.plan.results)
        compiled.calls += 1
        job.last = compiled
        lost: ActorError | None = None
        if compiled.checks:
            try:
                failed = first_failed(compiled.checks, handles)
            except ActorError as error:  # the call was given up: its results say that, too
                failed, lost = None, error
            if failed is not None:
                self._fail(job, compiled, failed, known)
        self.variables.gradients.called(compiled.gradients)
        self.variables.values.called(compiled.decisions)
        for optimizer in compiled.bound.optimizers:
            count_as_stepped(optimizer)
        self.variables.states.stepped(self._gone.uses(compiled.number))
        rows = arguments.tensors[0].shape[:1] if arguments.tensors else ()
        for observer in self._observers:
            observer.issued(call, compiled.plan, rows[0] if rows else 0, job.type == "train")
        returned = tree.rebuild(compiled.shape, handles, getattr(job.function, "__globals__", {}), known)
        if lost is None:  # else what it would leave has been taken back
            carry_out(compiled.changes, found.looked, handles, known)
        if compiled.seeding is not None:
            compiled.seeding.carry_out()
        write(compiled.reading, found.state, known)
        compiled.leave(handles)
        for site in self._rebound.among(partial(self._holders, job)):
            site.settle()
        if lost is not None:
            raise lost
        return returned

    def _fail(self, job: JobLike, compiled: Compiled, check: Check, known: Known) -> NoReturn:
        """Raise what a check of a call has found; all is as it was where that stands in the step."""
        carry_out([Change(**one) for one in check.left], compiled.bound.found.looked, (), known)
        variables, optimizers = self.variables, compiled.bound.optimizers
        variables.gradients.called(check.gradients)
        for name in variables.values.moved_by(compiled.decisions):
            variables.values.forget(name)
        if check.stepped:
            for optimizer in optimizers:
                count_as_stepped(optimizer)
            variables.states.stepped(self._gone.uses(compiled.number))
        if check.lost:
            self._over = StateError(
                f"a call of {job.name} has raised {check.raised.text} ({check.where}); its step had changed "
                f"{check.lost} before, which a call does when it is done, so that no call can follow: load a "
                f"checkpoint, or have the step check before it changes anything"
            )
        if self.world > 1:  # else the first one that ends is what others are told of
            self._together(f"check {self.calls}")
        raise failure_of(check, job.name)

    def _announce(self, job: JobLike, arguments: Arguments, compiled: Compiled | None) -> int:
        """Tell the other ranks of the call, and what must be equal on all of them; returns its number."""
        number = self.calls
        self.calls += 1
        text = ""
        if self.world > 1:
            known = "" if compiled is None else f"{compiled.spoken}, plan {compiled.number}"
            text = known or f"{arguments.spoken} [a new plan"
            if seeds.seed is not None:
                text += f", seed {seeds.seed}"
            if arguments.numbers:
                text += f", {arguments.spoken_numbers}"
            if job.keys is not None and job.keys.state.optimizers:
                text += f", {job.keys.rates()}"
            if self.worker is not None and (lost := self.worker.known_lost):
                text += f", {lost} failed calls"
            if seen := glance(arguments):
                text += f", contents of {seen}"
            if compiled is None or compiled.calls % CHECK_CONTENTS == 0:
                text += f", all contents {checksum(arguments.tensors):08x}"
            text += "]"
        digest = hashlib.sha256(f"{job.type} {text}".encode()).hexdigest()[:16]
        if text and compiled is None and job.plans.why:
            text += f" ({job.plans.why})"
        self.cluster.gate(number, digest, text, self._to_tell())
        return number

    # -- compiling ---------------------------------------------------------------------------------

    def _order(self, job: JobLike, asked: PreparedCall, found: Found, fixed: dict[str, Any]) -> Order:
        state = found.state
        job.keys = Keys(state)
        train, hints, first = job.type == "train", hints_of(state), fresh(state)
        later, explain = job in self.jobs, self.cluster.settings.explain
        return Order(
            job.name, asked.captured(), asked.arguments, state, hints, train, job.micro_batches,
            job.goal, fixed, first, later, explain, self._target(), job.schedule, job.mode, asked.own, asked.kinds(),
            asked.placements(), Wishes(self.cluster.settings.device_type, self._kinds), found, job.plans.changed(),
            self._standing(state),
            not (job.body.makes_state(state) or asks_for_types(found.codes)),
            None if self.worker is None else self.variables.values.of,
        )  # fmt: skip

    def _states(self) -> Iterator[State]:
        """What the plans that are ready were made with."""
        return (plan.bound.found.state for job in self.jobs for plan in job.plans if plan.parked is None)

    @staticmethod
    def _holders(job: JobLike) -> set[int]:
        """By id, what a job's plans look at."""
        return set().union(*(plan.holders for plan in job.plans if plan.parked is None))

    def _standing(self, state: State) -> Standing:
        """How gradients stand as a call begins."""
        return standing_before(state, NONE if self.worker is None else self.variables.gradients.standing)

    def _misfit(self, compiled: Compiled) -> str:
        """What a plan takes for granted of gradients and values that is not so, for people; nothing where it holds."""
        if not self.variables.gradients.fit(compiled.gradients):
            return "gradients that calls have left changed"
        for site in compiled.sites:
            if misfit := site.misfit():
                return misfit
        return self.variables.values.changed(compiled.decisions, compiled.bound.found.state)

    def _target(self) -> Target:
        settings = self.cluster.settings
        return Target(settings.hardware, settings.measure, threads_of(settings.devices) if settings.pretend else 0)

    def _stands_for(self, unused: dict[int, weakref.ref[Tensor]], old: Tensor, new: Tensor) -> bool:
        """Whether a plan that was made with a tensor works with what is in its place now.

        ``unused`` are tensors that the plan does nothing with, by id: any others alike will do.
        """
        if self.names.current(old) is new or (self.worker is not None and self.variables.takes_over(old, new)):
            return True
        if isinstance(old, Owned) and isinstance(new, Owned) and old.name_in_plan == new.name_in_plan:
            return old.left is not None and self.variables.owns(new)
        known = unused.get(id(old))
        if known is None or known() is not old:
            return False
        if (old.shape, old.dtype, old.requires_grad) != (new.shape, new.dtype, new.requires_grad):
            return False
        unused[id(new)] = weakref.ref(new)
        return True

    def _compile(self, job: JobLike, asked: PreparedCall, number: int) -> Compiled:
        fixed = dict(self.variables.layouts) if self.worker is not None else {}
        found = self._look(job, asked.held(), asked.arguments)
        state = found.state
        refuse_sparse(job, found)
        order = self._order(job, asked, found, fixed)
        unused: dict[int, weakref.ref[Tensor]] = {}
        guards = Guards(found, partial(self._stands_for, unused))
        key = Keys(state).key(asked.arguments, order.fresh)
        if self.worker is not None:
            self._park(job, state)
        with self._aside():
            kept = None if self.worker is None else self.variables.gradients
            gradients, seat = made_by_script(state, kept), own_seat(order, self.cluster.settings)
            mine = self._with_gone(report(state, order.hints, self.world > 1, seat, gradients), state)
            made = make_everywhere(self.cluster, str(number), order, mine)
        owns = self.variables if self.worker is not None else None
        refuse_shared(job, made, found, owns, self.names.made_of)
        try:
            refuse_mixed(state, {variable.name for variable in made.plan.variables})
        except StateError as error:
            raise located(error, job.function) from None
        self.jobs[job] = None
        if self.worker is None:
            self._seed, self._kinds = made.seed, made.kinds
            self._start()
        worker = self.worker
        assert worker is not None
        worker.wait_all(tell=False)
        gone = dropped(*made.gone)
        self._drop(gone)
        self._told, self._untold = self._told - gone, True
        self.cluster.forget(gone)
        places = [(found.looked[one.at], key_here(one.key, found.looked)) for one in made.rebound]
        rebound = {id(leaf) for one, key in places for leaf in leaves_of(one.values().get(key))}
        apart = {id(held.tensor): held for held in state.held.values() if id(held.tensor) in rebound}
        names = {held.name for held in apart.values()}
        self._rebound.forget(made.written - names)
        self._adopt(made, state, number, names)
        self.variables.adopted()
        apart = {key: held for key, held in apart.items() if id(held.tensor) != key}  # that were taken in now
        sites = self._rebound.adopt(places, apart, [state, *self._states()])
        self._resume(state, [variable.name for variable in made.plan.variables])
        used = {variable.name for variable in made.plan.variables}
        used.update(name for asked in made.decisions.asked for name in asked.program.inputs)
        loose = [h.tensor for h in state.held.values() if h.kind != "parameter" and h.name not in used]
        unused.update({id(tensor): weakref.ref(tensor) for tensor in loose})
        plan = made.plan.for_rank(self.rank) if self.rank == 0 else made.plan
        self.cluster.connect(plan.peers(self.rank))
        plan = unshare(plan, self.rank, self.cluster.near)
        plan_number = self._plans
        self._plans += 1
        for observer in self._observers:
            observer.installed(plan_number, made.plan)
        worker.install(plan_number, plan)
        actors = [a for a in plan.actors if a.rank == self.rank]
        steps = job.type == "train"
        reading = _reading(made.reading, actors)
        compiled = Compiled(
            spoken(asked.arguments, key),
            plan_number,
            made.plan,
            made.shape,
            frozenset(o.name for a in actors for o in a.operands if isinstance(o, OfInput)),
            bound(steps, guards, found, reading, made.changes, made.stops),
            reading,
            made.gradients,
            asked.own is not None,
            key,
            made.changes,
            made.decisions,
            made.rebound,
            made.checks,
            made.seeding,
            made.stops,
        )
        compiled.take_places(sites)
        self._gone.installed(plan_number, used, compiled)
        return compiled

    def _late(self, started: Started) -> None:
        """A transfer has not ended in time: say what everything here waits for."""
        assert self.worker is not None
        self.worker.fail(too_late(self.rank, started, NCCL_TIMEOUT, self.worker.explain()))

    def _start(self) -> None:
        """Make the worker: with the first plan it is known on which devices it runs."""
        device = make_device(device_of(self._kinds[self.rank], self.cluster.settings, self._kinds))
        if self.rank == 0 and (note := idle_oversubscribe(self.cluster.settings, self._kinds)):
            print(f"actorflow: {note}", file=sys.stderr, flush=True)
        planes: dict[str, DataPlane] = {}
        if isinstance(self.cluster, Cluster):
            patience = self.cluster.settings.nccl_timeout
            planes = planes_of(self.rank, self.cluster.store(), device, patience, self._late)
            nccl = planes.get(NCCL)
            if isinstance(nccl, NcclPlane):
                self.cluster.on_end(nccl.finish)
        record = None
        for observer in self._observers:  # one that keeps firings comes after one that only counts
            record = observer.recorder() or record
        worker = Worker(self.rank, self.cluster, planes, device, record=record, cores=self.cluster.settings.cores)
        self.results = Results(self.cluster, device)
        self.variables = Variables(
            self.cluster, self.names, worker.variables, device.where, worker.wait_all, lambda: self._gates.begun,
            self._together, self._gates.moved, lambda: self.capturing,
        )  # fmt: skip
        self._rebound = Rebound(self.variables)
        self.worker = worker
        self._gates.moved()
        for observer in self._observers:
            observer.started(worker)
        self.cluster.on_message(worker.deliver)
        self.cluster.on_line(worker.attach)
        worker.on_failure(self._worker_failed)
        if isinstance(self.cluster, Cluster):
            worker.on_lost(self.cluster.say)
            self.cluster.on_order(worker.obey)
        if self.cluster.failure is not None:
            self._failed(self.cluster.failure)

    def _adopt(self, made: Made, state: State, number: int, apart: Container[str]) -> None:
        """Cut this rank's parts of the new variables, from the master's values where they differ; leave stand-ins.

        Tensors of the script that are ``apart`` stay what they are, and others take their places.
        """
        assert self.worker is not None
        variables = self.variables
        new = [v for v in made.plan.variables if v.name not in variables.layouts]
        for variable in made.plan.variables:  # of which plans have only read, until now
            if variables.borrows(variable.name) and variable.name not in made.lent:
                variables.own(variable, state, variable.name in apart)
        if made.differing:
            variables.offer(number, {v.name: variables.start_of(v, state) for v in new if v.name in made.differing})
        for variable in sorted(new, key=lambda v: v.kind in WITH_PARAMETERS):
            name = variable.name
            differs = self.rank in made.differing.get(name, ())
            value = variables.take(number, variable) if differs else variables.start_of(variable, state)
            try:
                mine = variables.part_of(variable, value)
            except (RuntimeError, MemoryError) as error:
                if ran_out(error):
                    raise out_of_memory(self.rank, made.plan, f"rank {self.rank}, variable {name}", error) from error
                raise
            if mine is not None:
                self.worker.variables[name] = mine.clone() if name in apart else mine
            if name in made.lent:
                variables.lend(variable, state.held[name])
            elif not made.differing or (name not in made.differing and variable.kind not in WITH_PARAMETERS):
                variables.own(variable, state, name in apart)
        if made.differing:
            self._warn(made)
            self.cluster.gather(f"values {number}", b"")  # every rank has taken what it needs
            for variable in sorted(new, key=lambda v: v.kind in WITH_PARAMETERS):
                late = variable.name in made.differing or variable.kind in WITH_PARAMETERS  # after parameters
                if late and variable.name not in made.lent:
                    variables.own(variable, state, variable.name in apart)
            variables.offer(number, {})
        for root in state.modules.values():
            variables.watch(root.modules())
        self._gates.moved()  # another rank may wait to read them

    def _warn(self, made: Made) -> None:
        ranks = sorted({r for rs in made.differing.values() for r in rs})
        names = ", ".join(list(made.differing)[:3]) + (", …" if len(made.differing) > 3 else "")
        if self.rank in (0, *ranks):
            print(
                f"actorflow: {names} of job {made.plan.name!r} differed on rank{'s' * (len(ranks) > 1)} "
                f"{', '.join(map(str, ranks))}, which took the master's values; seed every rank alike, or load the "
                f"same checkpoint on all of them",
                file=sys.stderr,
                flush=True,
            )

    # -- letting go --------------------------------------------------------------------------------

    def _park(self, job: JobLike, state: State) -> None:
        """Put aside plans of a job for things that it does not work on any more: who else holds them decides."""
        there = names_in(state)
        aside = job.plans.park(lambda plan: owned_in(plan.bound.found.state) <= there)
        for plan in aside:
            plan.park(self.names, self._gone.died(plan.number))
            self._gone.park(plan.number)
        if aside:
            job.last = None
            ready = self._gone.ready()
            self.variables.suspend({name for plan in aside for name in self._gone.uses(plan.number)} - ready)

    def _unpark(self, job: JobLike, asked: PreparedCall) -> bool:
        """Take back plans for what a job works on now; whether there were any."""
        found = self._look(job, asked.held(), asked.arguments)
        taken: list[Compiled] = []

        def binds(plan: Compiled) -> bool:
            if plan.unpark(found):
                taken.append(plan)
            return plan.parked is None

        if not job.plans.unpark(binds):
            return False
        job.keys = Keys(found.state)
        for plan in taken:
            self._gone.unpark(plan.number)
            plan.take_places(self._rebound.adopt(plan.places, {}, self._states()))
        self._resume(found.state, sorted(set().union(*(self._gone.uses(plan.number) for plan in taken))))
        return True

    def _resume(self, state: State, names: Iterable[str]) -> None:
        """A plan that is to be called reads these variables: take them over as the script has them now."""
        for name in names:
            if name in state.held:
                self.variables.resume(state.held[name])
        self.variables.refresh(False)

    def _let_go(self) -> None:
        """Before a call: drop what nobody can come to any more, where no call needs it.

        On several ranks that is what all of them had told of some calls ago; it goes with the same call on each.
        """
        assert self.worker is not None
        if self.world == 1:
            plans = self._gone.plans()
            if (plans or self.variables.dying) and not self.worker.busy(plans):
                used = self._gone.used()
                self._drop(dropped(plans, frozenset(self.variables.gone(used)) - used))
            return
        agreed = self._gates.dropped_by(self.calls - BEHIND)
        if agreed:
            self._told -= agreed
            plans = self._gone.among(agreed.plans)
            if self.worker.busy(plans):
                self.worker.wait_all(tell=False)
            # a plan that was made since then may use what only read tensors of the script
            self._drop(dropped(plans, agreed.variables - self._gone.used_by_others(plans)))

    def _to_tell(self) -> Dropped:
        """What this rank could drop, as far as the others do not know it yet."""
        if self.worker is None or not (self._untold or self._gone.news or self.variables.news):
            return NOTHING
        self._untold = False
        plans, used = self._gone.plans(), self._gone.used()
        new = dropped(plans, frozenset(self.variables.gone(used)) - used) - self._told
        self._told |= new
        return new

    def _with_gone(self, mine: Report, state: State) -> Report:
        """This rank's report with what it could drop."""
        if self.worker is None:
            return mine
        parameters = {held.name for held in state.held.values() if held.kind == "parameter"}
        if not parameters <= self.variables.layouts.keys():  # what comes may take another one's place
            gc.collect()  # models and their jobs refer to each other
        plans, used = self._gone.plans(), self._gone.used()
        return replace(mine, plans=frozenset(plans), variables=frozenset(self.variables.gone(used)) - used)

    def _drop(self, gone: Dropped) -> None:
        """Drop plans and variables, once the calls of these plans are done."""
        assert self.worker is not None
        if not any(observer.keeps_plans for observer in self._observers):
            self.worker.drop(gone.plans)
        self._gone.drop(gone.plans)
        self.variables.drop(gone.variables)
        self._rebound.forget(gone.variables)
        self.names.sweep()

    # -- actorflow plan ----------------------------------------------------------------------------

    def _pretend(self, job: JobLike, asked: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile for ranks that do not exist; run the script's own eager step where another job's plan is wanted."""
        wanted = self.cluster.settings.plan_job
        order = self._order(job, asked, self._look(job, asked.held(), asked.arguments), dict(self._pretended))
        with self._aside():
            plan = make_pretended(order, self.world)
        if job.name == wanted or (not wanted and job.type == "train"):
            raise PlanReady(plan)
        self.jobs[job] = None
        self._pretended.update({v.name: v for v in plan.variables})
        with torch.set_grad_enabled(job.type == "train"):
            return job.body.eagerly(asked, args, kwargs, self.world)

    # -- other threads -----------------------------------------------------------------------------

    def _go(self, number: int, dropped: Dropped) -> None:
        """Every rank has made this call, and had let go of this before."""
        mine = self._gates.go(number, dropped)
        if mine is not None and self.worker is not None:
            self.worker.permit(mine)

    def _together(self, what: str) -> None:
        """Block until every rank has come here."""
        here = self.cluster.gather(what, b"")
        self.cluster.scatter(what, here)

    def _failed(self, failure: Failure) -> None:
        """The run is over, here or elsewhere."""
        self._gates.moved()
        if self.worker is not None:
            self.worker.fail(failure.error())

    def _worker_failed(self, error: BaseException) -> None:
        """An actor of this rank failed."""
        if self.cluster.explain(error) is error:  # else a lost peer is the cause, and is reported as such
            self.cluster.abort("raised", f"failed: {error}")

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for every call that was issued, and for those who look on; raises what failed."""
        if self.worker is not None:
            self.worker.wait_all()
        try:
            for observer in self._observers:
                observer.finish()
        finally:
            if self.worker is not None:
                self.results.close()

    def explain(self) -> str:
        """What this rank's queues are at and what they wait for."""
        return "no job has been called yet" if self.worker is None else self.worker.explain()


def _reading(found: Reading, actors: Iterable[Any]) -> Reading:
    """What this rank's actors read of numbers."""
    names = {o.name for a in actors for o in a.operands if isinstance(o, OfScalar)} - {SEED}
    made = {name: expression for name, expression in found.scalars.items() if name in names}
    return replace(found, scalars=made | fused(sorted(names - made.keys())))
