"""A text goes in, and the room that it has when it travels; as much of its beginning as fits comes out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

__all__ = ["shortened"]


def shortened(text: str, room: int, size: Callable[[str], int]) -> str:
    """The text where its ``size`` is at most ``room``, else as much of its beginning as fits with "…" behind it.

    ``size`` is that of a text as it travels; a longer text takes no less of it.

    >>> shortened("actors", 4, len)
    'act…'
    """
    if size(text) <= room:
        return text
    fits = bisect_right(range(1, len(text)), room, key=lambda count: size(f"{text[:count]}…"))
    return f"{text[:fits]}…"
