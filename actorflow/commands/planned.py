"""What ``actorflow plan`` prints and writes, once the plan is compiled."""

from __future__ import annotations

from pathlib import Path

from actorflow.rendezvous.settings import Settings, threads_of
from actorflow.runtime.measured_costs import Target
from actorflow.show import formats
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan import text as plan_text
from actorflow_compiler.plan.shown_plan import ShownPlan
from actorflow_compiler.plan.summary import device_type
from actorflow_scheduler import forecast_text
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.replicas import replicated

__all__ = ["show", "write"]


def show(made: ShownPlan, settings: Settings, full: bool, replicas: int) -> str:
    """The plan with a short forecast, or (``full``) only the full forecast and the plan's notes.

    Raises LayoutError for a plan whose replicas cannot be multiplied.
    """
    plan, hardware = made.plan, _hardware(made, settings)
    found = forecast(made.forecast_of if replicas == 1 else replicated(plan, replicas), hardware)
    if full:
        notes = plan_text.notes_text(plan)
        return forecast_text.to_text(found, full=True) + (f"\n{notes}" if notes else "")
    return f"{plan_text.to_text(plan)}\n{forecast_text.to_text(found)}"


def write(made: ShownPlan, settings: Settings, path: str) -> list[Path]:
    """Write the plan to a file in the format of its ending; returns the files, that one first.  Raises ShowError.

    A page has those of the others that it was chosen among; that of very many ranks shows one of each class.
    """
    if made.rank_classes is not None and path.endswith(".html"):
        return [formats.write_folded(made.folded, _hardware(made, settings), path)]
    return formats.write_compared(made.plan, made.others, _hardware(made, settings), path)


def _hardware(made: ShownPlan, settings: Settings) -> Hardware:
    """The hardware that a plan was made for: that of the hardware file, or this machine's, as measured."""
    if made.hardware is not None:
        return made.hardware
    target = Target(settings.hardware, threads=threads_of(settings.devices), ranks=settings.devices)
    return target.hardware(device_type(made.plan))
