"""Calls of jobs go in, in the order of the script; plans, issued calls and handles on their results come out."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from actorflow.control.cluster import Alone, Cluster
from actorflow.runtime.worker import NOT_MADE, Worker
from actorflow.script_state import tree
from actorflow.script_state.arguments import CallArguments, checksum, flatten, refuse_modes, sampled_checksums
from actorflow.script_state.seeds import call_seeds
from actorflow.script_state.side_effects import SideEffect, apply_side_effects
from actorflow.session.body import JobArguments, PreparedCall
from actorflow.session.checked import failure_of, first_failed
from actorflow.session.compile_client import CompileClient
from actorflow.session.compiling import located
from actorflow.session.context import Context, Observers, Running
from actorflow.session.fed import Fed
from actorflow.session.jobs import Compiled, JobLike
from actorflow.session.keys import Keys, fresh
from actorflow.session.letting_go import LettingGo
from actorflow.session.lifecycle import Lifecycle
from actorflow.session.numbers import known_to, write
from actorflow.session.pull_server import PullServer
from actorflow.session.undo import Undo
from actorflow.support.script_error import drop_echoes
from actorflow.variables.optimizer_state import count_as_stepped
from actorflow_compiler.core.errors import ActorError, StateError
from actorflow_compiler.core.expressions import Known
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.values.checks import Check
from actorflow_compiler.values.variables import ScriptState

__all__ = ["PlanReady", "Session"]

CHECK_CONTENTS = 100  # calls of one plan between two looks at all contents of the arguments


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
        self.context = Context(cluster, observers)
        self.calls = 0  # announced so far
        self._fed = Fed()
        self._over: StateError | None = None  # why no call can follow
        self._lifecycle = Lifecycle(self.context)
        self._letting_go = LettingGo(self.context)
        self._client = CompileClient(self.context, self._letting_go, self._lifecycle)
        drop_echoes()
        PullServer(self.context)

    @property
    def running(self) -> Running | None:
        """What the first plan has brought; None before it."""
        return self.context.running

    @property
    def worker(self) -> Worker | None:
        """What executes calls; None before the first plan."""
        return None if self.context.running is None else self.context.running.worker

    # -- a call ------------------------------------------------------------------------------------

    def call(self, job: JobLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a job on this rank; returns at once with what the job's function returns, in handles."""
        if self.context.capturing:  # a job inside a job is a plain function
            return job.function(*args, **kwargs)
        refuse_modes(job.name, job.type == "train")
        without = job.type != "train" and torch.is_grad_enabled()  # what only predicts has no graph
        if without or torch.is_inference_mode_enabled():  # whose tensors count no changes
            with torch.inference_mode(False), torch.no_grad():
                return self._begin(job, args, kwargs, graph=without)
        return self._begin(job, args, kwargs, graph=torch.is_grad_enabled())

    def _begin(self, job: JobLike, args: tuple[Any, ...], kwargs: dict[str, Any], graph: bool) -> Any:
        """See ``call``; ``graph``: whether PyTorch would make a graph of it."""
        given = job.body.take(args, kwargs, self.context.world)
        on = None if self.worker is None else self.worker.on
        room = on.staging if on is not None and on.ahead else None  # one copy, into memory that the device reads
        arguments = flatten(job.name, job.signature, given.args, given.kwargs, room, graph)
        asked = self._prepared(job, arguments, given)
        with asked.around():
            return self._call(job, asked, args, kwargs)

    def _call(self, job: JobLike, asked: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.context.settings.pretend:
            return self._pretend(job, asked, args, kwargs)
        arguments = asked.arguments
        if self._over is not None:
            raise self._over
        if self.worker is not None:
            self.worker.check(NOT_MADE)
        compiled = self.plan_for(job, arguments)
        if self.running is not None:
            if compiled is None and job.plans.aside:
                looked = self.context.look(job, asked.held(), arguments)
                if self._letting_go.unpark(self.running, job, looked):
                    compiled = self._find(job, arguments)
            if compiled is not None:  # it may read parts of other ranks, which change once all have announced the call
                self.running.rebound.make_way(compiled.sites, self.context.states)
        number = self._announce(job, arguments, compiled)
        if compiled is None:
            if self.context.rank == 0 and (note := job.plans.note()):
                print(f"actorflow: {note}", file=sys.stderr, flush=True)
            compiled = self._client.compile(job, asked, number)
            job.plans.add(arguments, compiled)
        return job.body.give(self._issue(job, compiled, arguments, number))

    def plan_for(self, job: JobLike, arguments: CallArguments) -> Compiled | None:
        """Take over what the script has changed, and look up the plan that holds for a call; all that guards cost."""
        if self.running is not None:
            rebound = self.running.rebound
            rebound.refresh(rebound.among(partial(_holders, job)), self.context.states)
            self._letting_go.let_go(self.running, self.calls)
            self.running.variables.refresh(job.type == "train")
        return self._find(job, arguments)

    def _find(self, job: JobLike, arguments: CallArguments) -> Compiled | None:
        return job.plans.find(arguments, lambda keys: fresh(keys.state), self._misfit)

    def _prepared(self, job: JobLike, arguments: CallArguments, given: JobArguments) -> PreparedCall:
        """The call, with what its job's function makes."""

        def search(held: Mapping[str, Any]) -> ScriptState:
            state = self.context.look(job, held, arguments).state
            job.keys = Keys(state)
            return state

        asked = job.body.prepare(arguments, given, search, self.context.aside)
        if job.keys is None:
            search(asked.held())
        return asked

    def _misfit(self, compiled: Compiled) -> str:
        """What a plan takes for granted of gradients and values that is not so, for people; nothing where it holds."""
        assert self.running is not None
        variables = self.running.variables
        if not variables.gradients.fit(compiled.gradients):
            return "gradients that calls have left changed"
        for site in compiled.sites:
            if misfit := site.misfit():
                return misfit
        return variables.values.changed(compiled.decisions, compiled.bound.found.state)

    def _issue(self, job: JobLike, compiled: Compiled, arguments: CallArguments, number: int) -> Any:
        running = self.running
        assert running is not None
        worker, variables = running.worker, running.variables
        try:
            variables.check(self._letting_go.uses(compiled), job.type == "train")
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
        scalars[SEED] = call_seeds.next(running.seed, self.context.rank if compiled.mirrored else 0)
        moved = (*variables.values.moved_by(compiled.decisions), *variables.gradients.moved_by(compiled.gradients))
        leaves = (*compiled.leaves, *moved)
        undo = Undo.of(compiled.changes, compiled.stops, found.looked, known) if compiled.changes else None
        call = worker.issue(compiled.number, inputs, scalars, leaves, undo)
        if self.context.gates.issue(number, call):
            worker.permit(call.number)
        handles = running.results.handles(number, call, compiled.plan.results)
        compiled.calls += 1
        job.last = compiled
        lost: ActorError | None = None
        if compiled.checks:
            try:
                failed = first_failed(compiled.checks, handles)
            except ActorError as error:  # the call was given up: its results say that, too
                failed, lost = None, error
            if failed is not None:
                self._fail(running, job, compiled, failed, known)
        variables.gradients.called(compiled.gradients)
        variables.values.called(compiled.decisions)
        for optimizer in compiled.bound.optimizers:
            count_as_stepped(optimizer)
        variables.states.stepped(self._letting_go.uses(compiled))
        rows = arguments.tensors[0].shape[:1] if arguments.tensors else ()
        for observer in self.context.observers:
            observer.issued(call, compiled.plan, rows[0] if rows else 0, job.type == "train")
        returned = tree.rebuild(compiled.shape, handles, getattr(job.function, "__globals__", {}), known)
        if lost is None:  # else what it would leave has been taken back
            apply_side_effects(compiled.changes, found.looked, handles, known)
        if compiled.seeding is not None:
            compiled.seeding.carry_out()
        write(compiled.reading, found.state, known)
        compiled.leave(handles)
        for site in running.rebound.among(partial(_holders, job)):
            site.settle()
        if lost is not None:
            raise lost
        return returned

    def _fail(self, running: Running, job: JobLike, compiled: Compiled, check: Check, known: Known) -> NoReturn:
        """Raise what a check of a call has found; all is as it was where that stands in the step."""
        apply_side_effects([SideEffect(**one) for one in check.left], compiled.bound.found.looked, (), known)
        variables, optimizers = running.variables, compiled.bound.optimizers
        variables.gradients.called(check.gradients)
        for name in variables.values.moved_by(compiled.decisions):
            variables.values.forget(name)
        if check.stepped:
            for optimizer in optimizers:
                count_as_stepped(optimizer)
            variables.states.stepped(self._letting_go.uses(compiled))
        if check.lost:
            self._over = StateError(
                f"a call of {job.name} has raised {check.raised.text} ({check.where}); its step had changed "
                f"{check.lost} before, which a call does when it is done, so that no call can follow: load a "
                f"checkpoint, or have the step check before it changes anything"
            )
        if self.context.world > 1:  # else the first one that ends is what others are told of
            self.context.together(f"check {self.calls}")
        raise failure_of(check, job.name)

    def _announce(self, job: JobLike, arguments: CallArguments, compiled: Compiled | None) -> int:
        """Tell the other ranks of the call, and what must be equal on all of them; returns its number."""
        number = self.calls
        self.calls += 1
        text = ""
        if self.context.world > 1:
            known = "" if compiled is None else f"{compiled.spoken}, plan {compiled.number}"
            text = known or f"{arguments.spoken} [a new plan"
            if call_seeds.seed is not None:
                text += f", seed {call_seeds.seed}"
            if arguments.numbers:
                text += f", {arguments.spoken_numbers}"
            if job.keys is not None and job.keys.state.optimizers:
                text += f", {job.keys.rates()}"
            if self.worker is not None and (lost := self.worker.known_lost):
                text += f", {lost} failed calls"
            if seen := sampled_checksums(arguments):
                text += f", contents of {seen}"
            if compiled is None or compiled.calls % CHECK_CONTENTS == 0:
                text += f", all contents {checksum(arguments.tensors):08x}"
            text += "]"
        digest = hashlib.sha256(f"{job.type} {text}".encode()).hexdigest()[:16]
        if text and compiled is None and job.plans.why:
            text += f" ({job.plans.why})"
        self.context.cluster.gate(number, digest, text, self._letting_go.to_tell(self.running))
        return number

    # -- actorflow plan ----------------------------------------------------------------------------

    def _pretend(self, job: JobLike, asked: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile for ranks that do not exist; run the script's own eager step where another job's plan is wanted."""
        wanted = self.context.settings.plan_job
        plan = self._client.pretend(job, asked)
        if job.name == wanted or (not wanted and job.type == "train"):
            raise PlanReady(plan)
        with torch.set_grad_enabled(job.type == "train"):
            return job.body.eagerly(asked, args, kwargs, self.context.world)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for every call that was issued, and for those who look on; raises what failed."""
        self._lifecycle.finish()

    def explain(self) -> str:
        """What this rank's queues are at and what they wait for."""
        return "no job has been called yet" if self.worker is None else self.worker.explain()


def _holders(job: JobLike) -> set[int]:
    """By id, what a job's plans look at."""
    return set().union(*(plan.holders for plan in job.plans if plan.parked is None))
