"""The names of the orders in which the stages of a pipeline process micro-batches, as users give them."""

from __future__ import annotations

from enum import StrEnum

from actorflow_compiler.core.errors import CallError

__all__ = ["ScheduleName", "schedule_name"]


class ScheduleName(StrEnum):
    """A published order, or the search for the fastest one."""

    AUTO = "auto"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self in (ScheduleName.ZB_H1, ScheduleName.ZB_H2, ScheduleName.ZB_V)

    @property
    def is_v_shaped(self) -> bool:
        """Whether the stages go over the devices and back."""
        return self is ScheduleName.ZB_V


def schedule_name(given: str) -> ScheduleName:
    """The name in a user's text; raises CallError for any other text."""
    if given not in tuple(ScheduleName):
        known = ", ".join(repr(str(name)) for name in ScheduleName)
        raise CallError(f"schedule={given!r} was found; one of {known} was expected")
    return ScheduleName(given)
