"""A call that no plan is there for goes in; the plan, compiled with all ranks and installed on this one, comes out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from actorflow.control.dropped import dropped
from actorflow.rendezvous.device_assignment import Wishes
from actorflow.rendezvous.settings import threads_of
from actorflow.runtime.measured_costs import Target
from actorflow.script_state.guards import Guards
from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.search import SearchResult
from actorflow.session.adopting import adopt
from actorflow.session.agreement import report
from actorflow.session.body import PreparedCall
from actorflow.session.compiling import Made, Order, hints_of, located, make_everywhere, make_pretended, own_seat
from actorflow.session.context import Context, Running
from actorflow.session.jobs import Compiled, JobLike, bound
from actorflow.session.keys import Keys, fresh, refuse_mixed, spoken
from actorflow.session.letting_go import LettingGo
from actorflow.session.lifecycle import Lifecycle
from actorflow.session.numbers import Reading, fused
from actorflow.session.planes import unshare
from actorflow.session.shared_memory import refuse_shared, refuse_sparse
from actorflow.standins.owned_tensor import OwnedTensor
from actorflow.variables.gradients import made_by_script, standing_before
from actorflow.variables.rebinding import RebindingSite, tensors_in
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.lines import asks_for_types
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.plan.plan import OfInput, OfScalar, Plan, Variable
from actorflow_compiler.values.gradients import NO_GRADIENTS

__all__ = ["CompileClient"]

Unused = dict[int, weakref.ref[Tensor]]  # by id: tensors that a plan does nothing with; any others alike will do


class CompileClient:
    """Makes plans of jobs, and takes them in."""

    def __init__(self, context: Context, letting_go: LettingGo, lifecycle: Lifecycle) -> None:
        self._context, self._letting_go, self._lifecycle = context, letting_go, lifecycle
        self._plans = 0  # installed so far
        self._pretended: dict[str, Variable] = {}  # layouts that plans of a pretended cluster decided

    def compile(self, job: JobLike, asked: PreparedCall, number: int) -> Compiled:
        """The plan for call ``number``, on all ranks together.

        Raises CaptureError, LayoutError, StateError and the like for a step that has no plan.
        """
        context, running = self._context, self._context.running
        found = context.look(job, asked.held(), asked.arguments)
        state = found.state
        refuse_sparse(job, found)
        order = self._order(job, asked, found, {} if running is None else running.variables.layouts)
        unused: Unused = {}
        guards = Guards(found, partial(self._stands_for, unused))
        key = Keys(state).key(asked.arguments, order.fresh)
        if running is not None:
            self._letting_go.park(running, job, state)
        made = self._make(order, number)
        refuse_shared(job, made, found, None if running is None else running.variables, context.names.made_of)
        try:
            refuse_mixed(state, {variable.name for variable in made.plan.variables})
        except StateError as error:
            raise located(error, job.function) from None
        context.jobs[job] = None
        running = running or self._lifecycle.start(made.kinds, made.seed)
        running.worker.wait_all(tell=False)
        self._letting_go.drop_all(running, dropped(*made.gone))
        sites = self._take_in(running, made, found, number)
        used = {variable.name for variable in made.plan.variables}
        used.update(name for one in made.decisions.asked for name in one.program.inputs)
        loose = [h.tensor for h in state.held.values() if h.kind != "parameter" and h.name not in used]
        unused.update({id(tensor): weakref.ref(tensor) for tensor in loose})
        plan_number, plan = self._install(running, made)
        actors = [a for a in plan.actors if a.rank == context.rank]
        reading = _reading(made.reading, actors)
        compiled = Compiled(
            spoken(asked.arguments, key),
            plan_number,
            made.plan,
            made.shape,
            frozenset(o.name for a in actors for o in a.operands if isinstance(o, OfInput)),
            bound(job.type == "train", guards, found, reading, made.changes, made.stops),
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
        self._letting_go.installed(compiled, used)
        return compiled

    def pretend(self, job: JobLike, asked: PreparedCall) -> Plan:
        """The plan of a call for ranks that do not exist; what it decides holds for the plans after it."""
        found = self._context.look(job, asked.held(), asked.arguments)
        order = self._order(job, asked, found, self._pretended)
        with self._context.aside():
            plan = make_pretended(order, self._context.world)
        self._context.jobs[job] = None
        self._pretended.update({v.name: v for v in plan.variables})
        return plan

    def _order(self, job: JobLike, asked: PreparedCall, found: SearchResult, fixed: Mapping[str, Variable]) -> Order:
        context, settings, state = self._context, self._context.settings, found.state
        variables = None if context.running is None else context.running.variables
        kinds = () if context.running is None else context.running.kinds
        target = Target(settings.hardware, settings.measure, threads_of(settings.devices) if settings.pretend else 0)
        job.keys = Keys(state)
        return Order(
            job.name, asked.captured(), asked.arguments, state, hints_of(state), job.type == "train",
            job.micro_batches, job.goal, dict(fixed), fresh(state), job in context.jobs, settings.explain, target,
            job.schedule, job.mode, asked.own, asked.kinds(), asked.placements(), Wishes(settings.device_type, kinds),
            found, job.plans.changed(),
            standing_before(state, NO_GRADIENTS if variables is None else variables.gradients.standing),
            not (job.body.makes_state(state) or asks_for_types(found.codes)),
            None if variables is None else variables.values.of,
        )  # fmt: skip

    def _make(self, order: Order, number: int) -> Made:
        """Have the master compile, with what this rank reports."""
        context, running, state = self._context, self._context.running, order.state
        with context.aside():
            gradients = made_by_script(state, None if running is None else running.variables.gradients)
            mine = report(state, order.hints, context.world > 1, own_seat(order, context.settings), gradients)
            mine = self._letting_go.with_gone(running, mine, state)
            return make_everywhere(context.cluster, str(number), order, mine)

    def _take_in(self, running: Running, made: Made, found: SearchResult, number: int) -> tuple[RebindingSite, ...]:
        """Take over the variables of a plan, and the places that its step gives other tensors."""
        state = found.state
        places = [(found.looked[one.at], decode_key(one.key, found.looked)) for one in made.rebound]
        rebound = {id(leaf) for one, key in places for leaf in tensors_in(one.values().get(key))}
        apart = {id(held.tensor): held for held in state.held.values() if id(held.tensor) in rebound}
        names = {held.name for held in apart.values()}
        running.rebound.forget(made.written - names)
        adopt(self._context, running, made, state, number, names)
        running.variables.adopted()
        apart = {key: held for key, held in apart.items() if id(held.tensor) != key}  # that were taken in now
        sites = running.rebound.adopt(places, apart, [state, *self._context.states()])
        self._letting_go.resume(running, state, [variable.name for variable in made.plan.variables])
        return sites

    def _install(self, running: Running, made: Made) -> tuple[int, Plan]:
        """Give the worker this rank's part of a plan; returns its number there, and that part."""
        context = self._context
        plan = made.plan.for_rank(context.rank) if context.rank == 0 else made.plan
        context.cluster.connect(plan.peers(context.rank))
        plan = unshare(plan, context.rank, context.cluster.near)
        number = self._plans
        self._plans += 1
        for observer in context.observers:
            observer.installed(number, made.plan)
        running.worker.install(number, plan)
        return number, plan

    def _stands_for(self, unused: Unused, old: Tensor, new: Tensor) -> bool:
        """Whether a plan that was made with a tensor works with what is in its place now."""
        names, running = self._context.names, self._context.running
        if names.current(old) is new or (running is not None and running.variables.takes_over(old, new)):
            return True
        if isinstance(old, OwnedTensor) and isinstance(new, OwnedTensor) and old.name_in_plan == new.name_in_plan:
            return old.left is not None and running is not None and running.variables.owns(new)
        known = unused.get(id(old))
        if known is None or known() is not old:
            return False
        if (old.shape, old.dtype, old.requires_grad) != (new.shape, new.dtype, new.requires_grad):
            return False
        unused[id(new)] = weakref.ref(new)
        return True


def _reading(found: Reading, actors: Iterable[Any]) -> Reading:
    """What this rank's actors read of numbers."""
    names = {o.name for a in actors for o in a.operands if isinstance(o, OfScalar)} - {SEED}
    made = {name: expression for name, expression in found.scalars.items() if name in names}
    return replace(found, scalars=made | fused(sorted(names - made.keys())))
