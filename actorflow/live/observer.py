"""Observe the calls of this process's jobs and show their progress; ``flow.progress``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from actorflow.control import cluster as clusters
from actorflow.control.cluster import Alone, Cluster
from actorflow.live.meter import StepMeter
from actorflow.live.pulse import PulseRequest, take_pulse
from actorflow.rendezvous.options import LiveMode
from actorflow.rendezvous.settings import Settings
from actorflow.runtime.call import Call
from actorflow.runtime.observer import Observer
from actorflow.runtime.recorder import Recorder
from actorflow.runtime.worker import Worker
from actorflow.support.exit_hooks import at_exit, when_failed
from actorflow_compiler.core.sbp import Broadcast
from actorflow_compiler.plan.plan import Plan

if TYPE_CHECKING:
    from actorflow.live.view import LiveView

__all__ = ["LiveObserver", "close", "progress"]

T = TypeVar("T")

_OWN_BARS = ("tqdm", "rich.progress", "alive_progress", "progressbar")  # a script that imports one draws its own bars

_meter = StepMeter(time.monotonic)
_view: LiveView | None = None
_closed = False


def progress(steps: Iterable[T], total: int | None = None) -> Iterator[T]:
    """Yield the items of ``steps``, one for each training step, and show a progress bar on the master.

    The bar shows steps, speed, loss and time left.  ``total`` is the number of items; by default ``len(steps)``, if it
    has a length.  If standard error is not a terminal, a line is printed now and then instead.

    >>> for tokens, targets in flow.progress(loader):
    ...     loss = train_step(tokens, targets)
    """
    settings = clusters.process_settings()
    count = total
    if count is None and isinstance(steps, Sized):
        with suppress(TypeError):  # a loader of a stream, whose length is not known
            count = len(steps)
    if settings.rank == 0 and not settings.pretend and settings.live != LiveMode.NONE:
        _meter.total = None if count is None else _meter.issued + count
        _show(settings)
    yield from steps


class LiveObserver(Observer):
    """Shows the training steps of this process's run on the master; every rank answers requests for its pulse."""

    def __init__(self, run: Alone | Cluster) -> None:
        self._run = run
        self._worker: Worker | None = None
        run.serve(PulseRequest, lambda _: [json.dumps(asdict(take_pulse(run.rank, self._worker))).encode()])

    def recorder(self) -> Recorder | None:
        """A recorder of how long queues work, if the ranks are shown; it keeps no firings."""
        return Recorder(0) if self._run.settings.live == LiveMode.RANKS else None

    def started(self, worker: Worker) -> None:
        """Sample this worker from now on."""
        self._worker = worker

    def issued(self, call: Call, plan: Plan, rows: int, trains: bool) -> None:
        """Count a training step."""
        if trains and self._run.rank == 0:
            _stepped(self._run.settings, call, plan, rows)

    def finish(self) -> None:
        """Show the last state and close the view."""
        close()


def _stepped(settings: Settings, call: Call, plan: Plan, rows: int) -> None:
    """Count a call of a train job on the master, and show a bar if one is wanted."""
    if _view is None and not _closed and _wanted(settings):
        _show(settings)
    if _view is not None:  # without a view, the meter would keep the calls for ever
        index = _loss(plan)
        _meter.step(call, rows, lambda: None if index is None else _value(call, index))


def close() -> None:
    """Show the last state and close the view for good: the script has ended."""
    global _view, _closed
    _closed = True
    if _view is not None:
        _view.close()
        _view = None


when_failed(close)  # so that the bar is not drawn over the error


def _show(settings: Settings) -> None:
    global _view
    if _view is not None or _closed:
        return
    from actorflow.live.view import LiveView

    run = clusters.joined()
    pull: Callable[[int], bytes] | None = None
    if settings.live == LiveMode.RANKS and run is not None:
        pull = lambda rank: run.pull(rank, PulseRequest())  # noqa: E731
    _view = LiveView(_meter, settings.world, pull)
    _view.start()
    at_exit(close)  # a script that raises may not close it


def _wanted(settings: Settings) -> bool:
    """Whether to show a bar although the script has not called ``progress``."""
    if settings.live in (LiveMode.RANKS, LiveMode.BAR):
        return True
    mine = settings.live == LiveMode.AUTO and bool(settings.launcher)
    return mine and sys.stderr.isatty() and not any(name in sys.modules for name in _OWN_BARS)


def _loss(plan: Plan) -> int | None:
    """The index of the plan's loss: its first result that is one floating-point number, whole on the master."""
    for result in plan.results:
        whole = 0 in result.placement and all(isinstance(entry, Broadcast) for entry in result.sbp)
        if whole and not result.shape and "float" in result.dtype:
            return result.index
    return None


def _value(call: Call, index: int) -> float | None:
    found: Any = call.results[index] if index < len(call.results) else None
    return float(found) if isinstance(found, torch.Tensor) else None
