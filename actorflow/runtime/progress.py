"""A long piece of work goes in; a line on standard error while it runs, if it takes more than a second, comes out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console

__all__ = ["working"]

PATIENCE = 1.0  # seconds of silence


@contextlib.contextmanager
def working(what: str, done: str) -> Iterator[None]:
    """Show ``what`` while the body runs, and ``done`` with the time it took; nothing if it is quick."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    status = console.status(f"actorflow: {what}")
    shown = threading.Event()

    def show() -> None:
        shown.set()
        if console.is_terminal:
            status.start()
        else:
            console.print(f"actorflow: {what} …")

    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    start = time.monotonic()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            status.stop()
    if shown.is_set():
        console.print(f"actorflow: {done} in {time.monotonic() - start:.1f} s")
