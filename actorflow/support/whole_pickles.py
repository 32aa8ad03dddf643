"""Whether this thread may pickle a part of a global tensor: not while ``flow.save`` writes a file of whole ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["parts_are_refused", "without_parts"]


class _Pickling(threading.local):
    refused = False


_pickling = _Pickling()


def parts_are_refused() -> bool:
    """Whether a part would be pickled in the place of the whole."""
    return _pickling.refused


@contextlib.contextmanager
def without_parts() -> Iterator[None]:
    """A context in which this thread pickles no part of a global tensor: that is a StateError."""
    before, _pickling.refused = _pickling.refused, True
    try:
        yield
    finally:
        _pickling.refused = before
