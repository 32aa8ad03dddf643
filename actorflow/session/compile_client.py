"""Compile a plan for a call that has none, together with all ranks, and install it on this one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from actorflow.control.drops import drop_set
from actorflow.rendezvous.device_assignment import DeviceDefaults
from actorflow.rendezvous.settings import threads_of
from actorflow.runtime.measured_costs import Target
from actorflow.script_state.guards import Guards
from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.search_result import SearchResult
from actorflow.session.adopt_variables import adopt_variables
from actorflow.session.agreement import report_state
from actorflow.session.body import PreparedCall
from actorflow.session.compile_request import CompileRequest, LookedAt, located
from actorflow.session.compiling import (
    RankPlan,
    compile_on_all_ranks,
    compile_pretended,
    hints_of,
    own_devices,
)
from actorflow.session.context import PlanRuntime, SessionContext
from actorflow.session.jobs import CompiledPlan, JobLike, JobType, bind_script
from actorflow.session.lifecycle import Lifecycle
from actorflow.session.number_reads import NumberReads, fused
from actorflow.session.plan_keys import PlanKeyMaker, call_text, first_step_differs, refuse_mixed
from actorflow.session.plan_release import PlanRelease
from actorflow.session.planes import meet_groups, unshare
from actorflow.session.pretended import PretendedPlan
from actorflow.session.shared_memory import refuse_shared, refuse_sparse
from actorflow.session.step_effects import StepEffects
from actorflow.standins.owned_tensor import OwnedTensor
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.support.terminal import say
from actorflow.variables.gradients import made_by_script, standing_before
from actorflow.variables.rebinding import RebindingSite, tensors_in
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.runs import Runs
from actorflow_compiler.core.user_code import asks_for_types
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.hints.tags import OUTSIDE_SCOPES
from actorflow_compiler.plan.plan import Actor, OfInput, OfScalar, Plan, Variable, VariableKind
from actorflow_compiler.plan.shown_plan import ShownPlan
from actorflow_compiler.plan.source_rows import argument_rows
from actorflow_compiler.plan.stamping import stamp_peers
from actorflow_compiler.values.gradients import NO_GRADIENTS

__all__ = ["CompileClient"]

Unused = dict[int, weakref.ref[Tensor]]  # id → a tensor that a plan does not use, so that a similar one may replace it


class CompileClient:
    """Compiles plans of jobs together with all ranks, and installs them on this one."""

    def __init__(self, context: SessionContext, release: PlanRelease, lifecycle: Lifecycle) -> None:
        self._context, self._release, self._lifecycle = context, release, lifecycle
        self._plans = 0  # installed so far
        self._pretended: dict[str, Variable] = {}  # layouts that plans of a pretended cluster decided
        self._beside: dict[tuple[Any, ...], PretendedPlan] = {}  # those of jobs that nobody asked for, by job and key

    def compile(self, job: JobLike, prepared: PreparedCall, number: int) -> CompiledPlan:
        """Compile and install the plan for call ``number``, together with all ranks.

        Raises CaptureError, LayoutError, StateError and the like for a step that has no plan.
        """
        context, runtime = self._context, self._context.runtime
        found = context.look(job, prepared.held(), prepared.arguments)
        state = found.state
        refuse_sparse(job, found)
        request = self._request(job, prepared, found, {} if runtime is None else runtime.variables.layouts)
        unused: Unused = {}
        guards = Guards(found, partial(self._stands_for, unused))
        key = PlanKeyMaker(state).key(prepared.arguments, request.fresh)
        if runtime is not None:
            self._release.park(runtime, job, state)
        made = self._make(request, number)
        refuse_shared(job, made, found, None if runtime is None else runtime.variables, context.names.made_of)
        try:
            refuse_mixed(state, {variable.name for variable in made.plan.variables})
        except StateError as error:
            raise located(error, job.function) from None
        _tell(job, made.plan, context)
        context.jobs[job] = None
        runtime = runtime or self._lifecycle.start(made.kinds, made.seed)
        runtime.worker.wait_all(tell=False)
        self._release.drop_all(runtime, drop_set(*made.gone))
        sites = self._take_in(runtime, made, found, number)
        used = {variable.name for variable in made.plan.variables}
        used.update(name for one in made.effects.decisions.asked for name in one.program.inputs)
        loose = [h.tensor for h in state.held.values() if h.kind != VariableKind.PARAMETER and h.name not in used]
        unused.update({id(tensor): weakref.ref(tensor) for tensor in loose})
        plan_number, plan = self._install(runtime, made)
        actors = [a for a in plan.actors if a.rank == context.rank]
        effects = replace(made.effects, reading=_reading(made.effects.reading, actors))
        compiled = CompiledPlan(
            call_text=call_text(prepared.arguments, key),
            number=plan_number,
            plan=made.plan,
            effects=effects,
            rows=_argument_rows(actors, plan, prepared),
            bound=bind_script(job.type == JobType.TRAIN, guards, found, effects),
            staged=None if request.hints.stages else frozenset(place.ranks for place in request.hints.places.values()),
            mirrored=prepared.own is not None,
            begins_freely=made.begins_freely,
            key=key,
            written=made.written,
            made=made.made,
        )
        compiled.take_places(sites)
        self._release.installed(compiled, used)
        return compiled

    def pretend(self, job: JobLike, prepared: PreparedCall) -> ShownPlan:
        """The plan of a call in a pretended cluster."""
        found = self._context.look(job, prepared.held(), prepared.arguments)
        return self._pretend(job, self._request(job, prepared, found, self._pretended))[0]

    def pretend_beside(self, job: JobLike, prepared: PreparedCall) -> tuple[PretendedPlan, SearchResult]:
        """The plan of a call of a job that nobody asked for, as its variables are laid out by it, and its state.

        It is made once for calls that are alike.
        """
        found = self._context.look(job, prepared.held(), prepared.arguments)
        request = self._request(job, prepared, found, self._pretended)
        key = (job, PlanKeyMaker(found.state).key(prepared.arguments, request.fresh))
        if key not in self._beside:
            of_classes = request.looked_at in (LookedAt.FORECAST, LookedAt.CLASSES)
            unseen = replace(request, looked_at=LookedAt.FORECAST if of_classes else None, explain=None)
            made, effects = self._pretend(job, unseen)
            self._beside[key] = PretendedPlan.of(made.plan, effects)
        return self._beside[key], found

    def _pretend(self, job: JobLike, request: CompileRequest) -> tuple[ShownPlan, StepEffects]:
        """Compile for a pretended cluster; later plans keep the layouts that this one decides."""
        with self._context.aside():
            made, effects = compile_pretended(request, self._context.world)
        self._context.jobs[job] = None
        self._pretended.update({v.name: v for v in made.plan.variables})
        return made, effects

    def _request(
        self, job: JobLike, prepared: PreparedCall, found: SearchResult, fixed: Mapping[str, Variable]
    ) -> CompileRequest:
        context, settings, state = self._context, self._context.settings, found.state
        variables = None if context.runtime is None else context.runtime.variables
        kinds = () if context.runtime is None else context.runtime.kinds
        target = Target(
            settings.hardware,
            settings.measure,
            threads_of(settings.devices) if settings.pretend else 0,
            settings.sharing,
        )
        job.keys = PlanKeyMaker(state)
        options = job.options(settings.auto)
        return CompileRequest(
            name=job.name,
            function=prepared.captured(),
            arguments=prepared.arguments,
            state=state,
            hints=hints_of(state).with_stages(options.goal, context.world),
            train=job.type == JobType.TRAIN,
            micro_batches=options.micro_batches or (None if job.last is None else job.last.plan.pieces),
            goal=options.goal,
            fixed=dict(fixed),
            fresh=first_step_differs(state),
            later=job in context.jobs,
            explain=settings.explain,
            looked_at=LookedAt(settings.looked_at or LookedAt.PLAN) if settings.pretend else None,
            target=target,
            schedule=job.schedule,
            mode=job.mode,
            own=prepared.own,
            kinds=prepared.kinds(),
            places=prepared.placements(),
            defaults=DeviceDefaults(str(settings.device_type), kinds),
            found=found,
            changed=job.plans.changed(),
            standing=standing_before(state, NO_GRADIENTS if variables is None else variables.gradients.standing),
            opens=not (job.body.makes_state(state) or asks_for_types(found.codes)),
            value=None if variables is None else variables.values.of,
        )

    def _make(self, request: CompileRequest, number: int) -> RankPlan:
        """Have the master compile, with this rank's report of its state."""
        context, runtime, state = self._context, self._context.runtime, request.state
        with context.aside():
            gradients = made_by_script(state, None if runtime is None else runtime.variables.gradients)
            mine = report_state(
                state, request.hints, context.world > 1, own_devices(request, context.settings), gradients
            )
            mine = self._release.with_gone(runtime, mine, state)
            made = compile_on_all_ranks(context.cluster, str(number), request, mine)
        if not (mine.plans.issuperset(made.gone[0]) and mine.variables.issuperset(made.gone[1])):
            what = f"a plan with which {drop_set(*made.gone) - drop_set(mine.plans, mine.variables)} is dropped"
            raise MessageRefused(RefusalReason.NUMBER, what, "what this rank's script has released", 0)
        return made

    def _take_in(
        self, runtime: PlanRuntime, made: RankPlan, found: SearchResult, number: int
    ) -> tuple[RebindingSite, ...]:
        """Take over the variables of a plan, and the rebinding sites to which its step assigns other tensors."""
        state = found.state
        places = [(found.sources[one.at], decode_key(one.key, found.sources)) for one in made.effects.rebound]
        rebound = {id(leaf) for one, key in places for leaf in tensors_in(one.values().get(key))}
        apart = {id(held.tensor): held for held in state.held.values() if id(held.tensor) in rebound}
        names = {held.name for held in apart.values()}
        runtime.rebound.forget(made.written - names)
        adopt_variables(self._context, runtime, made, state, number, names)
        runtime.variables.adopted()
        apart = {key: held for key, held in apart.items() if id(held.tensor) != key}  # except those taken over just now
        sites = runtime.rebound.adopt(places, apart, [state, *self._context.states()])
        self._release.resume(runtime, state, [variable.name for variable in made.plan.variables])
        return sites

    def _install(self, runtime: PlanRuntime, made: RankPlan) -> tuple[int, Plan]:
        """Give the worker this rank's part of a plan; returns its number there, and that part."""
        context = self._context
        plan = made.plan.for_rank(context.rank) if context.rank == 0 else made.plan
        context.cluster.connect(sorted({*plan.peers(context.rank), *stamp_peers(plan, context.rank)}))
        near = context.cluster.local_peers
        plan = unshare(plan, context.rank, near, meet_groups(plan, context.rank, near, context.cluster.store))
        number = self._plans
        self._plans += 1
        for observer in context.observers:
            observer.installed(number, made.plan)
        runtime.worker.install(number, plan)
        return number, plan

    def _stands_for(self, unused: Unused, old: Tensor, new: Tensor) -> bool:
        """Whether a plan that was made with tensor ``old`` also works with ``new`` in its place."""
        names, runtime = self._context.names, self._context.runtime
        if names.current(old) is new or (runtime is not None and runtime.variables.takes_over(old, new)):
            return True
        if isinstance(old, OwnedTensor) and isinstance(new, OwnedTensor) and old.name_in_plan == new.name_in_plan:
            return old.left is not None and runtime is not None and runtime.variables.owns(new)
        known = unused.get(id(old))
        if known is None or known() is not old:
            return False
        if (old.shape, old.dtype, old.requires_grad) != (new.shape, new.dtype, new.requires_grad):
            return False
        unused[id(new)] = weakref.ref(new)
        return True


def _tell(job: JobLike, plan: Plan, context: SessionContext) -> None:
    """Say on rank 0, with the first plan of a job, where ops of no scope are: scripts may expect them elsewhere."""
    if context.rank == 0 and job not in context.jobs:
        for note in plan.notes:
            if note.startswith(OUTSIDE_SCOPES):
                say(f"{job.name}: {note}")


def _argument_rows(actors: Sequence[Actor], plan: Plan, prepared: PreparedCall) -> dict[str, Runs]:
    """The arguments that actors of this rank take, and which rows of them."""
    shapes = {spec.name: spec.shape for spec in prepared.arguments.specs}
    taken = {o.name: () for a in actors for o in a.operands if isinstance(o, OfInput)}
    return taken | argument_rows(actors, plan.bodies, {name: shapes[name] for name in taken})


def _reading(found: NumberReads, actors: Iterable[Any]) -> NumberReads:
    """The part of the number reads that this rank's actors need."""
    names = {o.name for a in actors for o in a.operands if isinstance(o, OfScalar)} - {SEED}
    made = {name: expression for name, expression in found.scalars.items() if name in names}
    return replace(found, scalars=made | fused(sorted(names - made.keys())))
