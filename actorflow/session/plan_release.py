"""Drop plans and variables that the script has released, on all ranks with the same call."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import replace

from actorflow.control.drops import NO_DROPS, DropSet, drop_set
from actorflow.script_state.search_result import SearchResult
from actorflow.session.agreement import StateReport
from actorflow.session.context import PlanRuntime, SessionContext
from actorflow.session.jobs import CompiledPlan, JobLike
from actorflow.session.plan_cache import MOST_VARIABLE
from actorflow.session.plan_keys import PlanKeyMaker
from actorflow.session.plan_uses import PlanUses
from actorflow.variables.weak_guards import names_in, owned_in
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.plan.plan import VariableKind
from actorflow_compiler.values.variables import ScriptState

__all__ = ["PlanRelease"]

MOST = 128  # plans that are kept ready, where the environment says nothing
TOLD_AT_ONCE = 1 << 14  # most variables that other ranks are told of with one call
BEHIND = 8  # calls after which all ranks drop at the same call; one with something to drop is no further ahead


class PlanRelease:
    """Decides which plans and variables of a rank are no longer needed, and drops them."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._gone = PlanUses()
        self._told = NO_DROPS  # the drops that this rank has reported to the others
        self._untold = False  # whether there may be further drops to report

    def installed(self, compiled: CompiledPlan, uses: Iterable[str]) -> None:
        """Record an installed plan, which can be called as long as its job holds it."""
        self._gone.installed(compiled.number, uses, compiled)

    def called(self, compiled: CompiledPlan) -> None:
        """Note that a plan is called, as all ranks do."""
        self._gone.called(compiled.number)

    def uses(self, compiled: CompiledPlan) -> frozenset[str]:
        """The variables of a plan."""
        return self._gone.uses(compiled.number)

    # -- plans that are put aside ------------------------------------------------------------------

    def park(self, runtime: PlanRuntime, job: JobLike, state: ScriptState) -> None:
        """Put aside plans of state that the job no longer uses; they are dropped when the script frees that state."""
        there = names_in(state)
        aside = job.plans.park(lambda plan: owned_in(plan.bound.found.state) <= there)
        for plan in aside:
            plan.park(self._context.names, self._gone.died(plan.number))
            self._gone.park(plan.number)
        if aside:
            job.last = None
            ready = self._gone.ready()
            runtime.variables.suspend({name for plan in aside for name in self.uses(plan)} - ready)

    def unpark(self, runtime: PlanRuntime, job: JobLike, found: SearchResult) -> bool:
        """Take back parked plans that were made with the job's present state; returns whether there were any."""
        taken: list[CompiledPlan] = []

        def binds(plan: CompiledPlan) -> bool:
            if plan.unpark(found):
                taken.append(plan)
            return plan.parked is None

        if not job.plans.unpark(binds):
            return False
        job.keys = PlanKeyMaker(found.state)
        for plan in taken:
            self._gone.unpark(plan.number)
            plan.take_places(runtime.rebound.adopt(plan.places, {}, self._context.states()))
        self.resume(runtime, found.state, sorted(set().union(*map(self.uses, taken))))
        return True

    @staticmethod
    def resume(runtime: PlanRuntime, state: ScriptState, names: Iterable[str]) -> None:
        """Update these variables, which the next call reads, from the script's present tensors."""
        for name in names:
            if name in state.held:
                runtime.variables.resume(state.held[name])
        runtime.variables.refresh(False)

    # -- what can be dropped -----------------------------------------------------------------------

    def let_go(self, runtime: PlanRuntime, calls: int) -> None:
        """Before a call: drop what the script can no longer reach and no running call needs.

        On several ranks it drops what all of them had reported ``BEHIND`` calls ago, so that each drops it at the
        same call.  ``calls`` is the number of calls that this rank has announced.
        """
        worker, variables = runtime.worker, runtime.variables
        if self._context.world == 1:
            plans = self._gone.plans()
            if (plans or variables.dying) and not worker.busy(plans):
                used = self._gone.used()
                self.drop(runtime, drop_set(plans, frozenset(variables.gone(used)) - used))
            return
        # all ranks agree only on what this one has told them, too
        agreed = self._context.barrier.drops_by(calls - BEHIND) if self._told else NO_DROPS
        if agreed:
            self._told -= agreed
            plans = self._gone.among(agreed.plans)
            if worker.busy(plans):
                worker.wait_all(tell=False)
            # a plan that was made since then may use what only read tensors of the script
            self.drop(runtime, drop_set(plans, agreed.variables - self._gone.used_by_others(plans)))

    @property
    def waits(self) -> bool:
        """Whether this rank has reported plans or variables that not all ranks have dropped yet."""
        return bool(self._told)

    def to_tell(self, runtime: PlanRuntime | None) -> DropSet:
        """The plans and variables that this rank could drop and has not reported yet."""
        if runtime is None or not (self._untold or self._gone.news or runtime.variables.news):
            return NO_DROPS
        self._untold = False
        plans, used = self._gone.plans(), self._gone.used()
        new = drop_set(plans, frozenset(runtime.variables.gone(used)) - used) - self._told
        if len(new.variables) > TOLD_AT_ONCE:  # the rest comes with later calls
            new = drop_set(new.plans, sorted(new.variables)[:TOLD_AT_ONCE])
            self._untold = True
        self._told |= new
        return new

    def with_gone(self, runtime: PlanRuntime | None, mine: StateReport, state: ScriptState) -> StateReport:
        """This rank's report, with the plans and variables that it could drop added, as a plan is about to be made.

        That includes the plans that were called least recently, where there are more than are kept ready.  Calls are
        the same on all ranks, and so are these plans, if ranks keep the same number.
        """
        most = _most_plans()
        if runtime is None:
            return mine
        variables = runtime.variables
        parameters = {held.name for held in state.held.values() if held.kind == VariableKind.PARAMETER}
        if not parameters <= variables.layouts.keys():  # new parameters may replace those of a dropped model
            gc.collect()  # models and their jobs refer to each other
        plans, used = self._gone.plans(), self._gone.used()
        plans |= self._gone.unused(most - 1)
        return replace(mine, plans=frozenset(plans), variables=frozenset(variables.gone(used)) - used)

    def drop_all(self, runtime: PlanRuntime, gone: DropSet) -> None:
        """Drop plans and variables that all ranks have reported as droppable, also plans that the script may call."""
        for job in [*self._context.jobs]:
            job.body.forget(job.plans.forget(gone.plans))
            if job.last is not None and job.last.number in gone.plans:
                job.last = None
        self.drop(runtime, gone)
        self._told, self._untold = self._told - gone, True
        self._context.barrier.forget(gone)
        self._context.cluster.forget(gone)

    def drop(self, runtime: PlanRuntime, gone: DropSet) -> None:
        """Drop plans and variables, once the calls of these plans are done."""
        if not any(observer.keeps_plans for observer in self._context.observers):
            runtime.worker.drop(gone.plans)
        self._gone.drop(gone.plans)
        runtime.variables.drop(gone.variables)
        runtime.rebound.forget(gone.variables)
        self._context.names.sweep()


def _most_plans() -> int:
    """How many plans are kept ready.  Raises StateError where the environment variable is no number from 1 on."""
    text = os.environ.get(MOST_VARIABLE, "").strip()
    if text and not (text.isdecimal() and int(text)):
        raise StateError(
            f"{MOST_VARIABLE}={text} was found; expected the number of plans to keep ready, from 1 on. Set it so, or "
            f"unset it for {MOST}"
        )
    return int(text) if text else MOST
