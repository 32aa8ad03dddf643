"""A plan that was run enters; it leaves with what was foretold of it on this machine."""

from __future__ import annotations

from actorflow.runtime.measured_costs import HERE
from actorflow.tracing.folder import Ran
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.timeline import nanoseconds

__all__ = ["foretold"]


def foretold(number: int, plan: Plan) -> Ran:
    """The plan and its forecast."""
    places = [*(v.placement for v in plan.variables), *(r.placement for r in plan.results)]
    on = HERE.hardware(places[0].type if places else "cpu")
    return Ran(number, plan, on.name, nanoseconds(plan, on))
