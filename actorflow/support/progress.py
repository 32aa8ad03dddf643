"""Show on standard error what a long piece of work is doing, if it takes more than a second."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

__all__ = ["Progress", "listen", "show_progress"]

PATIENCE = 1.0  # seconds of silence

_listener: Callable[[str], None] | None = None  # who has the terminal


def listen(listener: Callable[[str], None] | None) -> None:
    """Tell ``listener``, not the terminal, what is being done, and an empty text when it is done; None: no more."""
    global _listener
    _listener = listener


class Progress:
    """How long work reports its progress: ``work("infer")`` begins a part, ``work.sum_up(lines)`` ends it well.

    ``parts`` are those that are known beforehand, in order, each with what people call it; of others the name is said.
    """

    def __init__(self, what: str, done: str, parts: Sequence[tuple[str, str]]) -> None:
        self._what, self._done = what, done
        self._known = {name: f"{text} ({i} of {len(parts)})" for i, (name, text) in enumerate(parts, 1)}
        self._console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        self._status = self._console.status(f"actorflow: {what}")
        self._part = ""
        self._lines: Callable[[], Sequence[str]] = tuple
        self.shown = threading.Event()

    def __call__(self, part: str) -> None:
        """Begin a part of the work."""
        self._part = self._known.get(part, part)
        if self.shown.is_set():
            self._say()

    def sum_up(self, lines: Callable[[], Sequence[str]]) -> None:
        """Set the lines that are printed at the end, if the work took long enough to be shown."""
        self._lines = lines

    def say_at_end(self, done: str) -> None:
        """Set what is said to be done at the end, in place of what ``show_progress`` was given."""
        self._done = done

    def show(self) -> None:
        """Show from now on what is done: the work takes long."""
        self.shown.set()
        if self._console.is_terminal and _listener is None:
            self._status.start()
        self._say()

    def end(self, seconds: float) -> None:
        """Print that the work is done, with its summary."""
        lines = [f"actorflow: {self._done} in {seconds:.1f} s", *(f"  {line}" for line in self._lines())]
        self._console.print("\n".join(lines))

    def stop(self) -> None:
        """Stop showing."""
        self._status.stop()
        if _listener is not None:
            _listener("")

    def _say(self) -> None:
        text = f"actorflow: {self._what}: {self._part}" if self._part else f"actorflow: {self._what}"
        if _listener is not None:
            _listener(text)
        elif self._console.is_terminal:
            self._status.update(text)
        else:
            self._console.print(f"{text} …")


@contextlib.contextmanager
def show_progress(what: str, done: str, parts: Sequence[tuple[str, str]] = ()) -> Iterator[Progress]:
    """Show ``what`` while the body runs, and ``done`` with the time it took; nothing if it is quick.

    Gives what is told the part of the work that begins; see ``Progress``.
    """
    work = Progress(what, done, parts)
    timer = threading.Timer(PATIENCE, work.show)
    timer.daemon = True
    start = time.monotonic()
    timer.start()
    try:
        yield work
    finally:
        timer.cancel()
        timer.join()
        if work.shown.is_set():
            work.stop()
    if work.shown.is_set():
        work.end(time.monotonic() - start)
