"""Functions that are called before the step of every optimizer.

They come and go while torch calls its hooks, as a step outside of jobs is itself the call of a job that is captured
then; torch's own registry may not change in the meantime.  So torch knows of one hook, which knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["watch_steps", "watching_steps"]

Watcher = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
_watchers: list[Watcher] = []


def watch_steps(watcher: Watcher) -> None:
    """Call this before each step from now on, with the optimizer and the arguments of ``step``."""
    _watchers.append(watcher)


@contextmanager
def watching_steps(watcher: Watcher) -> Iterator[None]:
    """A context in which this is called before each step."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for watcher in tuple(_watchers):
        watcher(optimizer, args, kwargs)


register_optimizer_step_pre_hook(_before)
