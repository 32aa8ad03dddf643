"""Which objects that a search has found can be read by the step's code, judged by the attributes that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actorflow.script_state.bytecode import CodeNames

__all__ = ["ROOT", "UNREAD", "AttributeReads", "ReferenceGraph"]

ROOT, UNREAD = 0, -1  # ids that no object has: values that code reads directly, and values that it does not read


class AttributeReads:
    """The attributes that code reads, by the class of the object."""

    def __init__(self) -> None:
        self._of_self: dict[type, dict[str, None]] = {}  # class → attributes that its methods read of ``self``
        self._of_others: dict[str, None] = {"forward": None}  # attributes that code reads of other objects
        self._any = False  # whether code reads attributes that it does not name
        self._by_class: dict[type | None, frozenset[str]] = {}

    def add(self, names: CodeNames, owner: type | None) -> None:
        """Add the names of a function; ``owner`` is the class whose method it is, or None."""
        (self._of_others if owner is None else self._of_self.setdefault(owner, {})).update(names.own)
        self._of_others.update(names.others)
        self._any = self._any or names.any

    def add_names(self, names: Iterable[str]) -> None:
        """Add attributes that code reads of any object."""
        self._of_others.update(dict.fromkeys(names))

    def of_any_object(self, *names: str) -> bool:
        """Whether code reads one of these attributes of an object other than ``self``."""
        return not self._of_others.keys().isdisjoint(names)

    def __contains__(self, name: str) -> bool:
        return name in self._of_others or any(name in names for names in self._of_self.values())

    def of_class(self, owner: type | None) -> frozenset[str] | None:
        """The attributes that code reads of objects of a class (None: an unknown class); the result None means any.

        Call it only after everything has been added, because results are cached.
        """
        if self._any:
            return None
        if owner not in self._by_class:
            own = (self._of_self.get(base, ()) for base in (owner.__mro__ if owner is not None else ()))
            self._by_class[owner] = frozenset(self._of_others).union(*own)
        return self._by_class[owner]


class ReferenceGraph:
    """Which object holds which, by ids, and by which attribute."""

    def __init__(self) -> None:
        self._references: dict[int, dict[tuple[str | None, int], None]] = {}

    def add(self, holder: int, thing: object, attribute: str | None) -> None:
        """Note that a holder has a thing, which code reads by this attribute; None: it is read in any case."""
        self._references.setdefault(holder, {})[attribute, id(thing)] = None

    def reached(self, attributes: Callable[[int], frozenset[str] | None]) -> set[int]:
        """The ids of all objects that are reached from ``ROOT``.

        ``attributes`` returns the attributes that code reads of a holder, given its id; None means any.
        """
        reached, pending = {ROOT}, [ROOT]
        while pending:
            holder = pending.pop()
            names = attributes(holder)
            for attribute, thing in self._references.get(holder, ()):
                if thing not in reached and (attribute is None or names is None or attribute in names):
                    reached.add(thing)
                    pending.append(thing)
        return reached
