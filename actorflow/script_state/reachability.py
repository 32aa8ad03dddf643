"""Which of the objects that a search has found the step's code can read, by the attributes that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actorflow.script_state.bytecode import CodeNames

__all__ = ["ROOT", "UNREAD", "AttributeReads", "ReferenceGraph"]

ROOT, UNREAD = 0, -1  # in place of a holder's id: what code reads itself, and what it does not read; no object has them


class AttributeReads:
    """The attributes that code reads, by the class of the object that it reads them of."""

    def __init__(self) -> None:
        self._of_self: dict[type, dict[str, None]] = {}  # class → what its methods read of ``self``
        self._of_others: dict[str, None] = {"forward": None}  # what code reads of anything else
        self._any = False  # whether code reads attributes that it does not name
        self._by_class: dict[type | None, frozenset[str]] = {}

    def add(self, names: CodeNames, owner: type | None) -> None:
        """Add what a function names, which is a method of the class ``owner`` if there is one."""
        (self._of_others if owner is None else self._of_self.setdefault(owner, {})).update(names.own)
        self._of_others.update(names.others)
        self._any = self._any or names.any

    def add_names(self, names: Iterable[str]) -> None:
        """Add attributes that are read of any object."""
        self._of_others.update(dict.fromkeys(names))

    def of_any_object(self, *names: str) -> bool:
        """Whether code reads one of these attributes of something else than ``self``."""
        return not self._of_others.keys().isdisjoint(names)

    def __contains__(self, name: str) -> bool:
        return name in self._of_others or any(name in names for names in self._of_self.values())

    def of_class(self, owner: type | None) -> frozenset[str] | None:
        """The attributes that code reads of objects of a class (None: of an unknown one); None: any.

        To be asked when everything has been added: answers are kept.
        """
        if self._any:
            return None
        if owner not in self._by_class:
            own = (self._of_self.get(base, ()) for base in (owner.__mro__ if owner is not None else ()))
            self._by_class[owner] = frozenset(self._of_others).union(*own)
        return self._by_class[owner]


class ReferenceGraph:
    """What holds what, by ids, and by which attribute."""

    def __init__(self) -> None:
        self._references: dict[int, dict[tuple[str | None, int], None]] = {}

    def add(self, holder: int, thing: object, attribute: str | None) -> None:
        """Note that a holder has the thing, which code reads by this attribute; None: in any case."""
        self._references.setdefault(holder, {})[attribute, id(thing)] = None

    def reached(self, attributes: Callable[[int], frozenset[str] | None]) -> set[int]:
        """The ids of what is reached from ``ROOT`` where code reads these ``attributes`` of a holder (None: any)."""
        reached, pending = {ROOT}, [ROOT]
        while pending:
            holder = pending.pop()
            names = attributes(holder)
            for attribute, thing in self._references.get(holder, ()):
                if thing not in reached and (attribute is None or names is None or attribute in names):
                    reached.add(thing)
                    pending.append(thing)
        return reached
