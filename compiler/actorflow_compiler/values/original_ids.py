"""Let ``id(p)`` in a traced step be that of the script's tensor, and not of the stand-in that is in its place."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from actorflow_compiler.core.user_code import is_users

__all__ = ["original_ids"]


@contextmanager
def original_ids(originals: Mapping[str, Tensor], stand_ins: Mapping[str, Tensor]) -> Iterator[None]:
    """While this is open, ``id`` of a stand-in that the script's own code calls is that of the original of its name.

    A script may have collected ids before: ``no_decay = {id(p) for p in …}``.  Libraries see the stand-ins' own.
    """
    plain = builtins.id
    of = {plain(stand_in): plain(originals[name]) for name, stand_in in stand_ins.items()}

    def of_original(thing: object, /) -> int:
        found = plain(thing)
        return of[found] if found in of and is_users(sys._getframe(1).f_code.co_filename) else found

    builtins.id = of_original
    try:
        yield
    finally:
        builtins.id = plain
