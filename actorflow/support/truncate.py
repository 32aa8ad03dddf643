"""Cut a text so that it fits into the room that it has when it travels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

__all__ = ["truncated"]


def truncated(text: str, room: int, size: Callable[[str], int]) -> str:
    """The text where its ``size`` is at most ``room``, else as much of its beginning as fits with "…" behind it.

    ``size`` is that of a text as it travels; a longer text takes no less of it.

    >>> truncated("actors", 4, len)
    'act…'
    """
    if size(text) <= room:
        return text
    fits = bisect_right(range(1, len(text)), room, key=lambda count: size(f"{text[:count]}…"))
    return f"{text[:fits]}…"
