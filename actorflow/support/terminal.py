"""What actorflow says on the terminal, in lines that nothing cuts through."""

from __future__ import annotations

import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Print "actorflow: " and a text on standard error.

    It is one write, with its line break: ``print`` makes two, between which other threads, and other processes of the
    same terminal, print theirs.
    """
    if sys.stderr is not None:  # as where it was closed before Python started
        sys.stderr.write(f"actorflow: {text}\n")
        sys.stderr.flush()
