"""Observe the calls of a process's jobs and feed its one progress view; ``flow.progress``."""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
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
from actorflow.support.exit_hooks import when_failed
from actorflow_compiler.core.sbp import Broadcast
from actorflow_compiler.plan.plan import Plan

if TYPE_CHECKING:
    from actorflow.live.view import LiveView

__all__ = ["LiveObserver", "close", "progress"]

T = TypeVar("T")

_OWN_BARS = ("tqdm", "rich.progress", "alive_progress", "progressbar")  # who loads one of them draws bars of its own

_meter = StepMeter(time.monotonic)
_view: LiveView | None = None
_closed = False


def progress(steps: Iterable[T], total: int | None = None) -> Iterator[T]:
    """The same items, one for each training step, and on the master a bar: steps, speed, loss and time left.

    ``total`` is how many there are; ``len(steps)`` by default, if it has a length.  Where standard
    error is no terminal, a line now and then takes the bar's place.

    >>> for tokens, targets in flow.progress(loader):
    ...     loss = train_step(tokens, targets)
    """
    settings = clusters.process_settings()
    count = total if total is not None else len(steps) if isinstance(steps, Sized) else None
    if settings.rank == 0 and not settings.pretend and settings.live != LiveMode.NONE:
        _meter.total = None if count is None else _meter.issued + count
        _show(settings)
    yield from steps


class LiveObserver(Observer):
    """Shows the training steps of this process's run, on the master; the other ranks say what they are doing."""

    def __init__(self, run: Alone | Cluster) -> None:
        self._run = run
        self._worker: Worker | None = None
        run.serve(PulseRequest, lambda _: [json.dumps(asdict(take_pulse(run.rank, self._worker))).encode()])

    def recorder(self) -> Recorder | None:
        """A recorder of how long queues work, where that is shown; it keeps no firings."""
        return Recorder(0) if self._run.settings.live == LiveMode.RANKS else None

    def started(self, worker: Worker) -> None:
        """Take the worker's samples from now on."""
        self._worker = worker

    def issued(self, call: Call, plan: Plan, rows: int, trains: bool) -> None:
        """Count a training step."""
        if trains and self._run.rank == 0:
            _stepped(self._run.settings, call, plan, rows)

    def finish(self) -> None:
        """Show the last state, and nothing more."""
        close()


def _stepped(settings: Settings, call: Call, plan: Plan, rows: int) -> None:
    """A train job was called on the master: count it, and show a bar if people want one."""
    if _view is None and not _closed and _wanted(settings):
        _show(settings)
    if _view is not None:  # else nobody looks, and calls would be kept for nothing
        index = _loss(plan)
        _meter.step(call, rows, lambda: None if index is None else _value(call, index))


def close() -> None:
    """Show the last state, and nothing more: the script has ended."""
    global _view, _closed
    _closed = True
    if _view is not None:
        _view.close()
        _view = None


when_failed(close)  # so that nothing is drawn over the error


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
    atexit.register(close)  # a script that has raised may leave it


def _wanted(settings: Settings) -> bool:
    """Whether there is to be a bar that the script has not asked for."""
    if settings.live in (LiveMode.RANKS, LiveMode.BAR):
        return True
    mine = settings.live == LiveMode.AUTO and bool(settings.launcher)
    return mine and sys.stderr.isatty() and not any(name in sys.modules for name in _OWN_BARS)


def _loss(plan: Plan) -> int | None:
    """The first result that is one number, whole on the master."""
    for result in plan.results:
        whole = 0 in result.placement and all(isinstance(entry, Broadcast) for entry in result.sbp)
        if whole and not result.shape and "float" in result.dtype:
            return result.index
    return None


def _value(call: Call, index: int) -> float | None:
    found: Any = call.results[index] if index < len(call.results) else None
    return float(found) if isinstance(found, torch.Tensor) else None
