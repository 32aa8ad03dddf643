"""The two views that a job function may have of its devices, consistent and mirrored.

Consistent: one logical program, whose tensors are distributed over the devices.  Mirrored: the same program on every
device, each with a batch of its own and equal parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType

from actorflow_compiler.core.errors import CallError

__all__ = ["CONSISTENT", "MIRRORED", "LogicalView", "within_view"]

_now: ContextVar[LogicalView | None] = ContextVar("view", default=None)  # of the job function that runs


class LogicalView:
    """``flow.scope.consistent_view()`` or ``flow.scope.mirrored_view()``: a value.

    As a context manager inside of a job it says which view the job has; CallError is raised in a job that has the
    other one, for a job has one view as a whole.  Outside of a job it does nothing.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name  # "consistent" | "mirrored"

    def __enter__(self) -> LogicalView:
        view = _now.get()
        if view is not None and view is not self:
            raise CallError(
                f"flow.scope.{self.name}_view() was found inside of a job of the {view.name} view; one view for the "
                f"whole job was expected: function_config().default_logical_view(flow.scope.{self.name}_view())"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __repr__(self) -> str:
        return f"flow.scope.{self.name}_view()"


CONSISTENT = LogicalView("consistent")
MIRRORED = LogicalView("mirrored")


@contextlib.contextmanager
def within_view(view: LogicalView) -> Iterator[None]:
    """While a job function of this view runs."""
    token = _now.set(view)
    try:
        yield
    finally:
        _now.reset(token)
