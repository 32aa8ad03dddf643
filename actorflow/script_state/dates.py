"""Stand-ins for ``datetime.datetime`` and ``datetime.date`` that refuse to tell what time it is.

Both are classes of C, whose methods cannot be replaced.  A stand-in is a class that makes objects of the real one, and
counts them as its own.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["ASKING_NOW", "DATES", "date_stand_ins"]

ASKING_NOW = ("now", "today", "utcnow")
DATES = (datetime.datetime, datetime.date)


class _StandInClass(type):
    """The class of the stand-ins: what is an object or a subclass of the real class is one of the stand-in."""

    real: type

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, cls.real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.real)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.real

    def __hash__(cls) -> int:
        return hash(cls.real)


def date_stand_ins(refusing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Mapping[type, type]:
    """The stand-ins by the real class; ``refusing`` makes a function that refuses of one that asks for the time."""
    return MappingProxyType({real: _stand_in(real, refusing) for real in DATES})


def _stand_in(real: type, refusing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> type:
    inherited = {name: getattr(real, name) for name, method in _class_methods(real)}
    asking = {name: refusing(method) for name, method in inherited.items() if name in ASKING_NOW}
    own = {name: staticmethod(method) for name, method in (inherited | asking).items()}
    return _StandInClass(real.__name__, (real,), {**own, "real": real, "__module__": real.__module__})


def _class_methods(real: type) -> list[tuple[str, Any]]:
    """The methods of a class and its bases that are called with the class itself."""
    kind = type(vars(datetime.date)["today"])
    return [
        (name, method)
        for base in real.__mro__[::-1]
        for name, method in vars(base).items()
        if type(method) is kind and not name.startswith("__")
    ]
