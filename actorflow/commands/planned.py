"""What ``actorflow plan`` prints and writes, once the plan is compiled."""

from __future__ import annotations

from actorflow.rendezvous.settings import Settings, threads_of
from actorflow.runtime.measured_costs import Target
from actorflow.show import formats
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan import text as plan_text
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.summary import device_type
from actorflow_scheduler import forecast_text
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.replicas import replicated

__all__ = ["show", "write"]


def show(plan: Plan, settings: Settings, full: bool, replicas: int) -> str:
    """The plan with a short forecast, or (``full``) only the full forecast and the plan's notes.

    Raises LayoutError for a plan whose replicas cannot be multiplied.
    """
    hardware = _hardware(settings, plan)
    found = forecast(plan if replicas == 1 else replicated(plan, replicas), hardware)
    if full:
        notes = plan_text.notes_text(plan)
        return forecast_text.to_text(found, full=True) + (f"\n{notes}" if notes else "")
    return f"{plan_text.to_text(plan)}\n{forecast_text.to_text(found)}"


def write(plan: Plan, settings: Settings, path: str) -> None:
    """Write the plan to a file in the format of its ending.  Raises ShowError."""
    formats.write(plan, _hardware(settings, plan), path)


def _hardware(settings: Settings, plan: Plan) -> Hardware:
    """The hardware that a plan was made for: that of the hardware file, or this machine's, as measured before."""
    return Target(settings.hardware, threads=threads_of(settings.devices)).hardware(device_type(plan))
