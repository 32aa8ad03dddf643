"""Log refused connections and why, but at a limited rate, so that the terminal stays readable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import unquote

__all__ = ["MOST", "Strangers", "host_of"]

MOST, MINUTE = 10, 60.0  # lines in so many seconds


class Strangers:
    """Names the addresses of those that were refused: ten a minute, then how many more there were.

    ``say`` prints a line.  Used on the thread of one event loop; ``close`` it before that ends.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._said = 0  # in this minute
        self._more = 0
        self._timer: asyncio.TimerHandle | None = None  # the end of this minute

    def note(self, peer: str, why: str) -> None:
        """Note that a caller was refused, by its address as gRPC writes it ("ipv4:10.0.0.7:4242"), and why."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MINUTE, self.close)
        if self._said < MOST:
            self._said += 1
            self._say(f"refused a caller from {host_of(peer)}, {why}")
        else:
            self._more += 1

    def close(self) -> None:
        """End the minute: say how many were refused that were not named."""
        if self._timer is not None:
            self._timer.cancel()
        more, self._timer, self._said, self._more = self._more, None, 0, 0
        if more:
            self._say(f"… and {more} more in {MINUTE:g} s")


def host_of(peer: str) -> str:
    """The host of an address as gRPC writes it.

    >>> host_of("ipv4:10.0.0.7:4242"), host_of("ipv6:%5Bfe80::1%5D:4242")
    ('10.0.0.7', 'fe80::1')
    """
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]") or peer
