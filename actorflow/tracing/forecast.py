"""Add this machine's forecast to a plan that was traced."""

from __future__ import annotations

from actorflow.runtime.measured_costs import HERE
from actorflow.tracing.folder import TracedPlan
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.timeline import nanoseconds

__all__ = ["with_forecast"]


def with_forecast(number: int, plan: Plan) -> TracedPlan:
    """The plan with its forecast."""
    places = [*(v.placement for v in plan.variables), *(r.placement for r in plan.results)]
    on = HERE.hardware(places[0].type if places else "cpu")
    return TracedPlan(number, plan, on.name, nanoseconds(plan, on))
