"""Plans without orders enter; plans with slot counts, frozen orders and a proof leave; and the actor machine."""

from actorflow_compiler.core.hardware import Hardware
from actorflow_scheduler.schedule import schedule

__all__ = ["Hardware", "schedule"]
