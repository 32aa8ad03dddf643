"""Hooks for the end of the script: rooms register what has to be done, and the process's entry does it.

The entry needs to know none of the rooms, and what a script never used is not imported at its end.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import partial

__all__ = ["after_error", "after_script", "at_exit", "when_failed", "when_finished"]

Step = Callable[[], None]

_finished: list[Step] = []
_failed: list[Step] = []


def when_finished(step: Step, *, first: bool = False) -> None:
    """Call ``step`` once the script has run to its end, in the order of these calls, or before all others.

    ``first`` is for steps that peers may wait for, while other steps wait for peers.
    """
    _finished.insert(0 if first else len(_finished), step)


def when_failed(step: Step) -> None:
    """Call ``step`` where the script has raised, before anything is printed about it."""
    _failed.append(step)


def at_exit(step: Callable[..., object], *args: object) -> None:
    """Call ``step`` when this process ends; not in processes that the script forks, which have none of its threads."""
    atexit.register(step, *args)
    os.register_at_fork(after_in_child=partial(atexit.unregister, step))


def after_script() -> None:
    """The script has run to its end; raises what a step raises."""
    for step in tuple(_finished):
        step()


def after_error() -> None:
    """The script has raised."""
    for step in tuple(_failed):
        step()
