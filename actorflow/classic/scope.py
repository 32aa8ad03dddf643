"""Scopes for ops inside a job: ``with scope.placement("cpu", [0, 1]): …``, and the views of a whole job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType

from actorflow.classic.devices import device_kind, device_texts, ranks_of
from actorflow.classic.logical_views import CONSISTENT, MIRRORED, LogicalView
from actorflow_compiler.core.placement import Placement, Ranks
from actorflow_compiler.core.placement import placement as make
from actorflow_compiler.hints.tags import placement_scope

__all__ = ["PlacementScope", "consistent_view", "mirrored_view", "placement", "record_placements"]

_entered: ContextVar[set[Placement] | None] = ContextVar("entered", default=None)  # collects the placements


class PlacementScope:
    """A placement scope: ops inside its ``with`` run on its devices; it may be entered any number of times.

    Devices named by strings are looked up only when needed, because the run may not be known earlier.
    """

    def __init__(self, kind: str | Placement, devices: Ranks | tuple[str, ...]) -> None:
        self._kind, self._devices = kind, devices
        self._open: list[contextlib.AbstractContextManager[None]] = []

    @property
    def placement(self) -> Placement:
        """The devices.  Raises LayoutError for devices that are not in the run."""
        if isinstance(self._kind, Placement):
            return self._kind
        texts = device_texts(self._devices)
        return make(device_kind(self._kind), ranks_of(texts) if texts else self._devices)  # type: ignore[arg-type]

    def __enter__(self) -> PlacementScope:
        where = self.placement
        entered = _entered.get()
        if entered is not None:
            entered.add(where)
        scope = placement_scope(where)
        scope.__enter__()
        self._open.append(scope)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"scope.placement({self._kind!r}, {self._devices!r})"


def placement(type: str | Placement, ranks: Ranks | str | Sequence[str] | None = None) -> PlacementScope:
    """Place the ops inside on devices: ``placement(p)``, ``placement("cuda", [0, 1])``, ``placement("gpu", "0:0-1")``.

    A string names devices of one node, ``"node:first-last"``; a list of strings names devices of several nodes.  "gpu"
    means "cuda" if there is a CUDA device; otherwise it means "cpu", and the master reports that once.  Outside a job
    the scope does nothing.  Raises LayoutError for ranks that do not form a placement and, when the scope is entered,
    for devices that are not in the run.
    """
    if isinstance(type, Placement):
        return PlacementScope(type, ())
    texts = device_texts(ranks)
    if texts is not None:
        return PlacementScope(type, texts)
    made = PlacementScope(type, () if ranks is None else ranks)  # type: ignore[arg-type]  # no strings here
    if type != "gpu":
        made.placement  # noqa: B018 (raises for wrong ranks now)
    return made


@contextlib.contextmanager
def record_placements(into: set[Placement]) -> Iterator[None]:
    """While a job is rehearsed: add the placements of all scopes that are entered to ``into``."""
    token = _entered.set(into)
    try:
        yield
    finally:
        _entered.reset(token)


def consistent_view() -> LogicalView:
    """The default view: a job computes with logical tensors, which are distributed over the devices."""
    return CONSISTENT


def mirrored_view() -> LogicalView:
    """The view in which every device runs the job on its own batch, with equal parameters: data parallelism only.

    Arguments are ``tp.ListNumpy.Placeholder``: lists with one item for each device.  So are results.
    """
    return MIRRORED
