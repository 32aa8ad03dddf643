"""Schedule plans: slot counts, frozen orders, the liveness proof, the forecast, and the actor state machine."""

from actorflow_compiler.core.hardware import Hardware
from actorflow_scheduler.schedule import schedule

__all__ = ["Hardware", "schedule"]
