"""Read from bytecode which modules a function imports in its body, and which of its variables stand for them."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BodyImports", "is_loaded", "member_of", "read_imports", "rebound"]

STORES = ("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME")
VARIABLES = ("STORE_FAST", "STORE_DEREF")  # the first is the beginning of the names of several
BETWEEN = ("SWAP", "POP_TOP", "ROT_TWO")  # between the parts of ``import a.b as c``


@dataclass(slots=True)
class BodyImports:
    """What the imports in a function's body take, as far as it is loaded."""

    names: dict[str, None] = field(default_factory=dict)  # full names of modules, and of what may be one
    variables: dict[str, types.ModuleType] = field(default_factory=dict)  # the modules that variables stand for
    others: set[str] = field(default_factory=set)  # variables that are also given something else
    bases: dict[int, types.ModuleType] = field(default_factory=dict)  # position of an ``IMPORT_FROM`` → its module

    def store(self, name: str, given: object) -> None:
        """Note that a variable is given this."""
        if not isinstance(given, types.ModuleType) or self.variables.get(name, given) is not given:
            self.others.add(name)
        if isinstance(given, types.ModuleType):
            self.variables[name] = given


def read_imports(instructions: Sequence[dis.Instruction], package: str) -> BodyImports:
    """What these instructions of a function import, which is in a module of this package."""
    found = BodyImports()
    module: Any = None  # of which ``IMPORT_FROM`` takes something
    given: Any = None  # what the next store stores
    members: Sequence[str] | None = None
    for at, one in enumerate(instructions):
        if one.opname == "IMPORT_NAME":
            level, members = (before.argval for before in instructions[at - 2 : at])
            full = _absolute(one.argval, level, package)
            module = given = sys.modules.get(full if members else full.partition(".")[0])
            parts = [f"{full}.{name}" for name in members or () if name not in getattr(module, "__dict__", ())]
            found.names |= dict.fromkeys([full, *parts])
        elif one.opname == "IMPORT_FROM":
            if isinstance(module, types.ModuleType):
                found.bases[at] = module
            given = member_of(module, one.argval)
            module = module if members else given
        elif one.opname in STORES:
            found.store(one.argval, given)
            given = None
        elif one.opname.startswith(VARIABLES):  # of several at once
            for name in one.argval if isinstance(one.argval, tuple) else (one.argval,):
                found.store(name, None)
            given = None
        elif one.opname not in BETWEEN:
            given = None
    return found


def rebound(code: types.CodeType, imports: BodyImports) -> set[str]:
    """The variables that stand for modules, and that may also stand for something else: ``xp = mine``."""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name for name in imports.variables if name in parameters} | imports.others.union(_stored_inside(code))


def _stored_inside(code: types.CodeType) -> Iterator[str]:
    """The variables of a function that those in it set (``nonlocal``)."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            stores = (one.argval for one in dis.get_instructions(constant) if one.opname == "STORE_DEREF")
            yield from (name for name in stores if name in constant.co_freevars)
            yield from _stored_inside(constant)


def member_of(module: object, name: str) -> Any:
    """What a module holds under a name; None if it does not.  A module that imports it when it is asked is not."""
    held = getattr(module, "__dict__", {})
    return held.get(name, sys.modules.get(f"{held.get('__name__')}.{name}"))


def is_loaded(name: str) -> bool:
    """Whether a module of this full name has been imported."""
    return isinstance(sys.modules.get(name), types.ModuleType)


def _absolute(name: str, level: int, package: str) -> str:
    with contextlib.suppress(ImportError):  # it goes beyond the top, which its import tells
        return importlib.util.resolve_name("." * level + name, package)
    return name
