"""Import modules without running the garbage collector meanwhile, which is faster."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage inside the context, in the whole process.

    Imports make hundreds of thousands of objects, nearly all of which stay; looking through them again and again takes
    a sixth of the time that imports take.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
