"""Call jobs in the order of the script: find or compile the plan, issue the call, return handles on its results."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from actorflow.control.cluster import Alone, Cluster
from actorflow.runtime.worker import NOT_MADE, Worker
from actorflow.script_state import tree
from actorflow.script_state.arguments import CallArguments, checksum, flatten, refuse_modes, sampled_checksums
from actorflow.script_state.seeds import call_seeds
from actorflow.script_state.side_effects import SideEffect, apply_side_effects
from actorflow.session.body import JobArguments, PreparedCall
from actorflow.session.call_inputs import inputs_of_call
from actorflow.session.compile_client import CompileClient
from actorflow.session.compile_request import located
from actorflow.session.context import Observers, PlanRuntime, SessionContext
from actorflow.session.input_devices import InputDevices
from actorflow.session.jobs import CompiledPlan, JobLike, JobType
from actorflow.session.lifecycle import Lifecycle
from actorflow.session.number_reads import numbers_now, write
from actorflow.session.plan_keys import PlanKeyMaker, first_step_differs
from actorflow.session.plan_release import PlanRelease
from actorflow.session.pull_server import PullServer
from actorflow.session.undo import Undo
from actorflow.standins.logical_batch import RowsRead
from actorflow.support.script_error import mute_repeated_tracebacks
from actorflow.support.terminal import say
from actorflow.transport.messages import Stamp
from actorflow.variables.optimizer_state import count_as_stepped
from actorflow_compiler.core.errors import ActorError, StateError
from actorflow_compiler.core.expressions import Known
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.plan.shown_plan import ShownPlan
from actorflow_compiler.values.checks import Check
from actorflow_compiler.values.variables import ScriptState

__all__ = ["PlanReady", "Session"]

CHECK_CONTENTS = 100  # calls of one plan between comparisons of the arguments' contents across ranks


class PlanReady(BaseException):
    """Raised to end a script that is run only to get a plan, and the plans that it was chosen among."""

    def __init__(self, made: ShownPlan) -> None:
        super().__init__(f"the plan of job {made.plan.name!r} is ready")
        self.made = made


class Session:
    """One process's part of a run: one cluster, one worker, one set of variables, shared by all jobs.

    ``observers`` are notified of each plan and each call.
    """

    def __init__(self, cluster: Cluster | Alone, observers: Observers = lambda *_: ()) -> None:
        self.context = SessionContext(cluster, observers)
        self.calls = 0  # announced so far
        self.shown: ShownPlan | None = None  # the plan that the script is run for, once it is ready
        self._silent: set[JobLike] = set()  # jobs whose results are zeros while another one's plan is looked for
        self.reads: RowsRead | None = None  # rows that the script's thread reads now, or waits for
        self._fed = InputDevices(cluster.rank, cluster.world)
        self._over: StateError | None = None  # the reason why no further call is possible
        self._lifecycle = Lifecycle(self.context)
        self._release = PlanRelease(self.context)
        self._client = CompileClient(self.context, self._release, self._lifecycle)
        mute_repeated_tracebacks()
        PullServer(self.context)

    @property
    def runtime(self) -> PlanRuntime | None:
        """The runtime, made with the first plan; None before."""
        return self.context.runtime

    @property
    def worker(self) -> Worker | None:
        """The worker that executes calls; None before the first plan."""
        return None if self.context.runtime is None else self.context.runtime.worker

    # -- a call ------------------------------------------------------------------------------------

    def call(self, job: JobLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a job on this rank; returns at once, with handles in place of the tensors of the function's result."""
        if self.context.capturing:  # a job inside a job is a plain function
            return job.function(*args, **kwargs)
        refuse_modes(job.name, job.type == JobType.TRAIN)
        without = job.type != JobType.TRAIN and torch.is_grad_enabled()  # jobs that only predict make no graph
        if without or torch.is_inference_mode_enabled():  # inference tensors have no version counter
            with torch.inference_mode(False), torch.no_grad():
                return self._begin(job, args, kwargs, graph=without)
        return self._begin(job, args, kwargs, graph=torch.is_grad_enabled())

    def _begin(self, job: JobLike, args: tuple[Any, ...], kwargs: dict[str, Any], graph: bool) -> Any:
        """See ``call``; ``graph``: whether PyTorch would record an autograd graph of it."""
        given = job.body.take(args, kwargs, self.context.world)
        on = None if self.worker is None else self.worker.on
        room = on.staging if on is not None and on.ahead else None  # copy once, into memory that the device can read
        arguments = flatten(job.name, job.signature, given.args, given.kwargs, room, graph)
        prepared = self._prepared(job, arguments, given)
        with prepared.around():
            return self._call(job, prepared, args, kwargs)

    def _call(self, job: JobLike, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.context.settings.pretend:
            return self._pretend(job, prepared, args, kwargs)
        arguments = prepared.arguments
        if self._over is not None:
            raise self._over
        if self.worker is not None:
            self.worker.check(NOT_MADE)
        compiled = self.plan_for(job, arguments)
        if self.runtime is not None:
            if compiled is None and job.plans.aside:
                searched = self.context.look(job, prepared.held(), arguments)
                if self._release.unpark(self.runtime, job, searched):
                    compiled = self._find(job, arguments)
            if compiled is not None:  # it may pull parts of other ranks, which change once all have announced the call
                self.runtime.rebound.make_way(compiled.sites, self.context.states)
        stamp = self._announce(job, arguments, compiled)
        number = stamp.call
        if compiled is None:
            if self.context.rank == 0 and (note := job.plans.note()):
                say(note)
            compiled = self._client.compile(job, prepared, number)
            job.plans.add(arguments, compiled)
        return job.body.give(self._issue(job, compiled, arguments, stamp))

    def plan_for(self, job: JobLike, arguments: CallArguments) -> CompiledPlan | None:
        """Take over the script's changes of variables, and find the valid plan for a call, by keys and guards."""
        if self.runtime is not None:
            rebound = self.runtime.rebound
            rebound.refresh(rebound.among(partial(_holders, job)), self.context.states)
            self._release.let_go(self.runtime, self.calls)
            self.runtime.variables.refresh(job.type == JobType.TRAIN)
        return self._find(job, arguments)

    def _find(self, job: JobLike, arguments: CallArguments) -> CompiledPlan | None:
        return job.plans.find(arguments, lambda keys: first_step_differs(keys.state), self._misfit)

    def _prepared(self, job: JobLike, arguments: CallArguments, given: JobArguments) -> PreparedCall:
        """The call, prepared by the job's body."""

        def search(held: Mapping[str, Any]) -> ScriptState:
            state = self.context.look(job, held, arguments).state
            job.keys = PlanKeyMaker(state)
            return state

        prepared = job.body.prepare(arguments, given, search, self.context.aside)
        if job.keys is None:
            search(prepared.held())
        return prepared

    def _misfit(self, compiled: CompiledPlan) -> str:
        """Text for people: a plan's assumption about gradients or values that does not hold; empty if all hold."""
        assert self.runtime is not None
        variables = self.runtime.variables
        if not variables.gradients.fit(compiled.effects.gradients):
            return "gradients that calls have left changed"
        for site in compiled.sites:
            if misfit := site.misfit():
                return misfit
        return variables.values.changed(compiled.effects.decisions, compiled.bound.found.state)

    def _issue(self, job: JobLike, compiled: CompiledPlan, arguments: CallArguments, stamp: Stamp) -> Any:
        runtime = self.runtime
        assert runtime is not None
        effects = compiled.effects
        worker, variables = runtime.worker, runtime.variables
        try:
            variables.check(self._release.uses(compiled), job.type == JobType.TRAIN)
        except StateError as error:
            raise located(error, job.function) from None
        self._fed.look(job.name, arguments, compiled.rows, worker.device)
        inputs = inputs_of_call(arguments, compiled.rows, None if worker.on.ahead else worker.device)
        found = compiled.bound.found
        known = numbers_now(arguments, found.state, found.sources)
        scalars = effects.reading.values(known)
        scalars[SEED] = call_seeds.next(runtime.seed, self.context.rank if compiled.mirrored else 0)
        moved = (
            *variables.values.moved_by(effects.decisions),
            *variables.gradients.moved_by(effects.gradients),
        )
        leaves = (*compiled.leaves, *moved)
        undo = Undo.of(effects.changes, effects.stops, found.sources, known) if effects.changes else None
        free = not variables.take_reads() and compiled.begins_freely
        if not free:
            self.context.cluster.want_agreement()
        worker.on.leave_thread()
        call = worker.issue(compiled.number, inputs, scalars, leaves, undo, stamp, free)
        handles = runtime.results.handles(stamp.call, call, compiled.plan.results)
        self.context.barrier.issue(stamp.call, call)  # from now on other ranks may ask for the results
        compiled.calls += 1
        job.last = compiled
        lost: ActorError | None = None
        if effects.checks:
            try:
                failed = _first_failed(effects.checks, handles)
            except ActorError as error:  # the call was given up; its results raise the same error
                failed, lost = None, error
            if failed is not None:
                self._fail(runtime, job, compiled, failed, known)
        variables.gradients.called(effects.gradients)
        variables.values.called(effects.decisions)
        for optimizer in compiled.bound.optimizers:
            count_as_stepped(optimizer)
        variables.states.stepped(self._release.uses(compiled))
        rows = arguments.tensors[0].shape[:1] if arguments.tensors else ()
        for observer in self.context.observers:
            observer.issued(call, compiled.plan, rows[0] if rows else 0, job.type == JobType.TRAIN)
        given: Sequence[Tensor] = handles
        if not compiled.mirrored and (compiled.bound.was_global or arguments.global_ones):
            given = self.context.as_global(handles, compiled.plan.results, compiled.batches(arguments.global_ones))
        returned = tree.rebuild(effects.shape, given, getattr(job.function, "__globals__", {}), known)
        if lost is None:  # else the call's changes have been undone
            apply_side_effects(effects.changes, found.sources, handles, known)
        if effects.seeding is not None:
            effects.seeding.carry_out()
        write(effects.reading, found.state, known)
        compiled.leave(handles)
        for site in runtime.rebound.among(partial(_holders, job)):
            site.settle()
        if lost is not None:
            raise lost
        return returned

    def _fail(self, runtime: PlanRuntime, job: JobLike, compiled: CompiledPlan, check: Check, known: Known) -> NoReturn:
        """Raise the exception of a failed check, with the script's state as it was at that line of the step."""
        apply_side_effects([SideEffect(**one) for one in check.left], compiled.bound.found.sources, (), known)
        variables, optimizers = runtime.variables, compiled.bound.optimizers
        variables.gradients.called(check.gradients)
        for name in variables.values.moved_by(compiled.effects.decisions):
            variables.values.forget(name)
        if check.stepped:
            for optimizer in optimizers:
                count_as_stepped(optimizer)
            variables.states.stepped(self._release.uses(compiled))
        if check.lost:
            self._over = StateError(
                f"a call of {job.name} has raised {check.raised.text} ({check.where}); its step had changed "
                f"{check.lost} before, which a call does when it is done, so that no call can follow: load a "
                f"checkpoint, or have the step check before it changes anything"
            )
        if self.context.world > 1:  # else other ranks would report only that this one ended
            self.context.together(f"check {self.calls}")
        raise _exception_of(check, job.name)

    def _announce(self, job: JobLike, arguments: CallArguments, compiled: CompiledPlan | None) -> Stamp:
        """Announce the call to the other ranks, with a digest of what must be equal on all."""
        number = self.calls
        self.calls += 1
        if compiled is not None:
            self._release.called(compiled)
        text = self._call_text(job, arguments, compiled) if self.context.world > 1 else ""
        digest = hashlib.sha256(f"{job.type} {text}".encode()).hexdigest()[:16]
        if text and compiled is None and job.plans.why:
            text += f" ({job.plans.why})"
        history = self.context.cluster.announce_call(number, digest, text, self._release.to_tell(self.runtime))
        self.context.barrier.announce(number, history)
        if self._release.waits:
            self.context.cluster.want_agreement()
        return Stamp(number, history)

    def _call_text(self, job: JobLike, arguments: CallArguments, compiled: CompiledPlan | None) -> str:
        """The call for people, with all that must be equal on all ranks."""
        parts = [f"{arguments.spoken} [a new plan"]
        if compiled is not None:
            parts = [f"{compiled.call_text}, plan {compiled.number}"]
        if call_seeds.seed is not None:
            parts.append(f"seed {call_seeds.seed}")
        if arguments.numbers:
            parts.append(arguments.spoken_numbers)
        if job.keys is not None and job.keys.state.optimizers:
            parts.append(job.keys.rates())
        if self.worker is not None and (lost := self.worker.known_lost):
            parts.append(f"{lost} failed calls")
        if seen := sampled_checksums(arguments):
            parts.append(f"contents of {seen}")
        parts += [batch.text for batch in arguments.batches]
        if compiled is None or compiled.calls % CHECK_CONTENTS == 0:
            parts.append(f"all contents {checksum(arguments.tensors):08x}")
        return f"{', '.join(parts)}]"

    # -- actorflow plan ----------------------------------------------------------------------------

    def _pretend(self, job: JobLike, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile for a pretended cluster; if another job's plan was asked for, run the step eagerly, where it can."""
        if self.shown is not None:  # the script has caught what was to end it
            raise PlanReady(self.shown)
        wanted = self.context.settings.plan_job
        if job.name == wanted or (not wanted and job.type == JobType.TRAIN):
            self.shown = self._client.pretend(job, prepared)
            raise PlanReady(self.shown)
        plan, found = self._client.pretend_beside(job, prepared)
        if not plan.can_run(found, prepared.arguments):
            if job not in self._silent:
                self._silent.add(job)
                say(f"{job.name} is not run, as its model is deferred and has no values: its results are zeros")
            return job.body.give(plan.zeros(found, prepared.arguments, getattr(job.function, "__globals__", {})))
        with torch.set_grad_enabled(job.type == JobType.TRAIN):
            return job.body.eagerly(prepared, args, kwargs, self.context.world)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for every call that was issued, and for the observers; raises what failed."""
        self._lifecycle.finish()

    def explain(self) -> str:
        """The state of this rank's queues, and what they wait for."""
        return "no job has been called yet" if self.worker is None else self.worker.explain()


def _holders(job: JobLike) -> set[int]:
    """The ids of the objects that the guards of a job's plans check."""
    return set().union(*(plan.holders for plan in job.plans if plan.parked is None))


def _first_failed(checks: Sequence[Check], results: Sequence[Tensor]) -> Check | None:
    """The first failed check of a call; waits for all of them.  Raises the call's error if it was given up."""
    return next((check for check, raises in zip(checks, results[-1].tolist(), strict=True) if raises), None)


def _exception_of(check: Check, job: str) -> BaseException:
    """The exception of a failed check; first prints the output that the step would have printed before it."""
    for stream, text in check.raised.printed:
        print(text, end="", file=getattr(sys, stream), flush=True)
    error = check.raised.error()
    lost = f"it had changed {check.lost} before, and no call can follow it"
    after = lost if check.lost else "other calls are done as ever"
    error.add_note(f"raised by a call of {job} at {check.where}\nwhat the step does behind that was not done; {after}")
    return error
