"""Answer a name that a public module does not have with the nearest one, and with the page that lists the names.

``answer_with_nearest(__name__)`` at the end of a module is all that it takes.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from actorflow_compiler.core.errors import ActorflowError

__all__ = [
    "NAMES_PAGE", "UnknownName", "answer_with_nearest", "misspelled", "nearest", "unknown_attribute", "unknown_name",
]  # fmt: skip

NAMES_PAGE = "docs/oneflow.md"  # where all names of both generations are listed
# the least share of two names' letters that are the same, from 0 to 1, for a guess, and for one that is nearly certain
_ALIKE, _NEARLY = 0.6, 0.9
_CLOSE = 0.65  # the same for an argument; of three letters, one may differ
_FEW = 12  # names of a module that are listed where none of them is near
_pages: dict[str, str] = {}  # the page of each module that answers so


class UnknownName(ActorflowError, AttributeError):
    """A module or an object has no such name; ``instead`` makes the part of the message that says what there is.

    The message is made when it is read, as ``hasattr`` asks and does not read.
    """

    def __init__(self, thing: str, name: str, instead: Callable[[], str], page: str = NAMES_PAGE) -> None:
        # with a name and no object, a traceback adds no guess of its own to the message
        super().__init__(f"{thing} has no attribute {name!r}", name=name, obj=None)
        self._instead, self._page = instead, page

    def __str__(self) -> str:
        instead = self._instead()
        return f"{self.args[0]}{f': {instead}' if instead else ''} ({self._page} says what there is)"

    def __reduce__(self) -> tuple[Any, ...]:
        return AttributeError, (str(self),)


def unknown_name(module: str, name: str, instead: str = "") -> AttributeError:
    """The error of a module that has no such name; ``instead`` says what to use where that is known."""
    if name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    page = _pages.get(module, NAMES_PAGE)
    return UnknownName(f"module {module!r}", name, lambda: instead or _instead(module, name), page)


def unknown_attribute(thing: object, spelled: str, name: str) -> AttributeError:
    """The error of an object, as scripts spell it (``graph.config``), whose class has no such attribute."""
    kind = type(thing)
    if name.startswith("__"):
        return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def instead() -> str:
        found = nearest(name, (each for each in dir(kind) if not each.startswith("_")))
        return f"the nearest is {spelled}.{found}" if found else ""

    return UnknownName(spelled, name, instead)


def answer_with_nearest(module: str, page: str = NAMES_PAGE, instead: Mapping[str, str] | None = None) -> None:
    """Make a module raise UnknownName for names that it does not have; it may have a ``__getattr__`` that does.

    ``instead`` says of names that OneFlow has what to use.
    """
    _pages[module] = page

    def missing(name: str) -> object:
        raise unknown_name(module, name, (instead or {}).get(name, ""))

    vars(sys.modules[module]).setdefault("__getattr__", missing)


def nearest(name: str, names: Iterable[str], alike: float = _ALIKE) -> str:
    """The name that is most like another one, upper case or not; empty where none is much like it."""
    lower = {each.lower(): each for each in sorted(names, reverse=True)}  # of two, the first in the alphabet
    found = difflib.get_close_matches(name.lower(), lower, 1, alike)
    return lower[found[0]] if found else ""


def misspelled(given: Iterable[str], names: Iterable[str]) -> tuple[str, str] | None:
    """The first given argument that is none of some names, but much like one of them, and that one; None: none is."""
    known = list(names)
    return next(((one, found) for one in given if one not in known and (found := nearest(one, known, _CLOSE))), None)


def _instead(module: str, name: str) -> str:
    """What there is in place of a name: itself in another module, the nearest in this one, or torch's."""
    root, _, inside = module.partition(".")
    own = _names(sys.modules[module])
    imported = [m for m in _modules(sys.modules[root]) if m.__name__ != module and name in _names(m)]
    theirs = sys.modules.get(f"torch.{inside}" if inside else "torch")
    if imported:
        return f"it is {_spelled(imported[0].__name__, name)}"
    if theirs is not None and hasattr(theirs, name):
        return f"it is among the names of {theirs.__name__} that are not here: {theirs.__name__}.{name}"
    if found := nearest(name, own, _NEARLY):
        return f"the nearest is {_spelled(module, found)}"
    for room in getattr(sys.modules[root], "__all__", ()):  # takes seconds, so nobody waits for it before a good guess
        if find_spec(f"{root}.{room}") and name in _names(getattr(sys.modules[root], room)):
            return f"it is {_spelled(f'{root}.{room}', name)}"
    if found := nearest(name, own):
        return f"the nearest is {_spelled(module, found)}"
    return f"it has {', '.join(own)}" if len(own) <= _FEW else ""


def _modules(module: ModuleType) -> Iterator[ModuleType]:
    """A module and those in it that have been imported, where they answer for their names."""
    if module.__name__ in _pages:
        yield module
        for _, thing in sorted(vars(module).items()):
            if isinstance(thing, ModuleType) and thing.__name__.startswith(f"{module.__name__}."):
                yield from _modules(thing)


def _names(module: ModuleType) -> list[str]:
    """The public names of a module."""
    stated = getattr(module, "__all__", None)
    return [name for name in stated or dir(module) if not name.startswith("_") and name != "annotations"]


def _spelled(module: str, name: str) -> str:
    _, _, inside = module.partition(".")
    return ".".join(filter(None, ("flow", inside, name)))
