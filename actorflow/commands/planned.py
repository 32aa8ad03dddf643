"""A plan that was made to be looked at, and for what hardware, goes in; what ``actorflow plan`` shows comes out."""

from __future__ import annotations

from actorflow.rendezvous.settings import Settings, threads_of
from actorflow.runtime.measured_costs import Target
from actorflow.show import formats
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan import text as plan_text
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler import forecast_text
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.replicas import replicated

__all__ = ["show", "write"]


def show(plan: Plan, settings: Settings, full: bool, replicas: int) -> str:
    """The plan with a short forecast, or the full forecast and the plan's notes alone.

    Raises LayoutError for a plan whose replicas cannot be multiplied.
    """
    hardware = _hardware(settings, _device(plan))
    found = forecast(plan if replicas == 1 else replicated(plan, replicas), hardware)
    if full:
        notes = plan_text.notes_text(plan)
        return forecast_text.to_text(found, full=True) + (f"\n{notes}" if notes else "")
    return f"{plan_text.to_text(plan)}\n{forecast_text.to_text(found)}"


def write(plan: Plan, settings: Settings, path: str) -> None:
    """Write the plan to a file, in the format that its name ends in.  Raises ShowError."""
    formats.write(plan, _hardware(settings, _device(plan)), path)


def _hardware(settings: Settings, device: str) -> Hardware:
    """What the plan was made for: the file's hardware, or what is kept of this machine."""
    return Target(settings.hardware, threads=threads_of(settings.devices)).hardware(device)


def _device(plan: Plan) -> str:
    """The kind of devices of a plan."""
    places = [*(v.placement for v in plan.variables), *(r.placement for r in plan.results)]
    return places[0].type if places else "cpu"
