"""What the script has let go of goes in; plans and variables are dropped, on all ranks with the same call."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace

from actorflow.control.dropped import NOTHING, Dropped, dropped
from actorflow.script_state.search import SearchResult
from actorflow.session.agreement import Report
from actorflow.session.context import Context, Running
from actorflow.session.gone import Gone
from actorflow.session.jobs import Compiled, JobLike
from actorflow.session.keys import Keys
from actorflow.variables.weak_guards import names_in, owned_in
from actorflow_compiler.values.variables import ScriptState

__all__ = ["LettingGo"]

BEHIND = 8  # calls after which ranks let go of what all of them have dropped by then: they are never so far apart


class LettingGo:
    """Which plans and variables of a rank somebody needs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gone = Gone()
        self._told = NOTHING  # what this rank has told the others of that it could drop
        self._untold = False  # whether there may be more than that

    def installed(self, compiled: Compiled, uses: Iterable[str]) -> None:
        """A plan can be called as long as its job holds it."""
        self._gone.installed(compiled.number, uses, compiled)

    def uses(self, compiled: Compiled) -> frozenset[str]:
        """The variables of a plan."""
        return self._gone.uses(compiled.number)

    # -- plans that are put aside ------------------------------------------------------------------

    def park(self, running: Running, job: JobLike, state: ScriptState) -> None:
        """Put aside plans of a job for things that it does not work on any more: who else holds them decides."""
        there = names_in(state)
        aside = job.plans.park(lambda plan: owned_in(plan.bound.found.state) <= there)
        for plan in aside:
            plan.park(self._context.names, self._gone.died(plan.number))
            self._gone.park(plan.number)
        if aside:
            job.last = None
            ready = self._gone.ready()
            running.variables.suspend({name for plan in aside for name in self.uses(plan)} - ready)

    def unpark(self, running: Running, job: JobLike, found: SearchResult) -> bool:
        """Take back plans for what a job works on now; whether there were any."""
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
            plan.take_places(running.rebound.adopt(plan.places, {}, self._context.states()))
        self.resume(running, found.state, sorted(set().union(*map(self.uses, taken))))
        return True

    @staticmethod
    def resume(running: Running, state: ScriptState, names: Iterable[str]) -> None:
        """A plan that is to be called reads these variables: take them over as the script has them now."""
        for name in names:
            if name in state.held:
                running.variables.resume(state.held[name])
        running.variables.refresh(False)

    # -- what can be dropped -----------------------------------------------------------------------

    def let_go(self, running: Running, calls: int) -> None:
        """Before a call: drop what nobody can come to any more, where no call needs it.

        On several ranks that is what all of them had told of some calls ago; it goes with the same call on each.
        ``calls`` is how many this rank has announced.
        """
        worker, variables = running.worker, running.variables
        if self._context.world == 1:
            plans = self._gone.plans()
            if (plans or variables.dying) and not worker.busy(plans):
                used = self._gone.used()
                self.drop(running, dropped(plans, frozenset(variables.gone(used)) - used))
            return
        agreed = self._context.gates.dropped_by(calls - BEHIND)
        if agreed:
            self._told -= agreed
            plans = self._gone.among(agreed.plans)
            if worker.busy(plans):
                worker.wait_all(tell=False)
            # a plan that was made since then may use what only read tensors of the script
            self.drop(running, dropped(plans, agreed.variables - self._gone.used_by_others(plans)))

    def to_tell(self, running: Running | None) -> Dropped:
        """What this rank could drop, as far as the others do not know it yet."""
        if running is None or not (self._untold or self._gone.news or running.variables.news):
            return NOTHING
        self._untold = False
        plans, used = self._gone.plans(), self._gone.used()
        new = dropped(plans, frozenset(running.variables.gone(used)) - used) - self._told
        self._told |= new
        return new

    def with_gone(self, running: Running | None, mine: Report, state: ScriptState) -> Report:
        """This rank's report with what it could drop."""
        if running is None:
            return mine
        variables = running.variables
        parameters = {held.name for held in state.held.values() if held.kind == "parameter"}
        if not parameters <= variables.layouts.keys():  # what comes may take another one's place
            gc.collect()  # models and their jobs refer to each other
        plans, used = self._gone.plans(), self._gone.used()
        return replace(mine, plans=frozenset(plans), variables=frozenset(variables.gone(used)) - used)

    def drop_all(self, running: Running, gone: Dropped) -> None:
        """Drop what all ranks have reported that they could."""
        self.drop(running, gone)
        self._told, self._untold = self._told - gone, True
        self._context.cluster.forget(gone)

    def drop(self, running: Running, gone: Dropped) -> None:
        """Drop plans and variables, once the calls of these plans are done."""
        if not any(observer.keeps_plans for observer in self._context.observers):
            running.worker.drop(gone.plans)
        self._gone.drop(gone.plans)
        running.variables.drop(gone.variables)
        running.rebound.forget(gone.variables)
        self._context.names.sweep()
