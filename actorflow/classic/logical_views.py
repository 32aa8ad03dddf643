"""The two views that a job function may have of its devices: consistent and mirrored.

In the consistent view there is one logical program, whose tensors are distributed over the devices.  In the mirrored
view every device runs the same program on its own batch, with equal parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType

from actorflow_compiler.core.errors import CallError

__all__ = ["CONSISTENT", "MIRRORED", "LogicalView", "within_view"]

_now: ContextVar[LogicalView | None] = ContextVar("view", default=None)  # view of the job function that runs


class LogicalView:
    """``flow.scope.consistent_view()`` or ``flow.scope.mirrored_view()``.

    Entered as a context manager inside a job, it states the view that the job has; it raises CallError in a job of the
    other view, because a job has one view as a whole.  Outside a job it does nothing.
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
    """A context for running a job function that has this view."""
    token = _now.set(view)
    try:
        yield
    finally:
        _now.reset(token)
