"""A callback that may be attached late: calls made before are kept, and delivered to it in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, ParamSpec

from actorflow.support.refusals import MessageRefused, RefusalReason

P = ParamSpec("P")
MOST = 1 << 16


class BufferedCallback(Generic[P]):
    """Passes calls on to a callback; keeps calls made before it is attached.  May be used on any thread.

    Raises MessageRefused for a call that would be one more than ``most`` to be kept.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._callback: Callable[P, object] | None = None
        self._kept: list[Callable[[Callable[P, object]], object]] = []
        self._lock = threading.Lock()

    def attach(self, callback: Callable[P, object]) -> None:
        """Set the callback and pass on the calls that were kept."""
        with self._lock:
            for give in self._kept:
                give(callback)
            self._kept.clear()
            self._callback = callback

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Pass a call on, or keep it."""
        callback = self._callback
        if callback is None:
            with self._lock:
                callback = self._callback
                if callback is None:
                    if len(self._kept) >= self._most:
                        what = f"{self._most + 1} messages before this rank takes any"
                        raise MessageRefused(RefusalReason.LIMIT, what, f"at most {self._most}")
                    self._kept.append(lambda give: give(*args, **kwargs))
                    return
        callback(*args, **kwargs)
