"""A long piece of work goes in; a line on standard error while it runs, if it takes more than a second, comes out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

__all__ = ["working"]

PATIENCE = 1.0  # seconds of silence


@contextlib.contextmanager
def working(what: str, done: str) -> Iterator[Callable[[str], None]]:
    """Show ``what`` while the body runs, and ``done`` with the time it took; nothing if it is quick.

    Gives a function that is told the part of the work that begins.
    """
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    status = console.status(f"actorflow: {what}")
    shown = threading.Event()
    part = ""

    def say() -> None:
        text = f"actorflow: {what}: {part}" if part else f"actorflow: {what}"
        if console.is_terminal:
            status.update(text)
        else:
            console.print(f"{text} …")

    def doing(now: str) -> None:
        nonlocal part
        part = now
        if shown.is_set():
            say()

    def show() -> None:
        shown.set()
        if console.is_terminal:
            status.start()
        say()

    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    start = time.monotonic()
    timer.start()
    try:
        yield doing
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            status.stop()
    if shown.is_set():
        console.print(f"actorflow: {done} in {time.monotonic() - start:.1f} s")
