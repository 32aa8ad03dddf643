"""Read from bytecode which modules a function imports in its body, and which of its variables stand for them."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BodyImports", "is_loaded", "read_imports"]

STORES = ("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME")
BETWEEN = ("SWAP", "POP_TOP", "ROT_TWO")  # between the parts of ``import a.b as c``


@dataclass(slots=True)
class BodyImports:
    """What the imports in a function's body take, as far as it is loaded."""

    names: dict[str, None] = field(default_factory=dict)  # full names of modules, and of what may be one
    variables: dict[str, types.ModuleType] = field(default_factory=dict)  # the modules that variables stand for
    bases: dict[int, types.ModuleType] = field(default_factory=dict)  # position of an ``IMPORT_FROM`` → its module


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
            parts = [f"{full}.{name}" for name in members or () if not hasattr(module, name)]
            found.names |= dict.fromkeys([full, *parts])
        elif one.opname == "IMPORT_FROM":
            if isinstance(module, types.ModuleType):
                found.bases[at] = module
            given = getattr(module, one.argval, None)
            module = module if members else given
        elif one.opname in STORES:
            if isinstance(given, types.ModuleType):
                found.variables[one.argval] = given
            given = None
        elif one.opname not in BETWEEN:
            given = None
    return found


def is_loaded(name: str) -> bool:
    """Whether a module of this full name has been imported."""
    return isinstance(sys.modules.get(name), types.ModuleType)


def _absolute(name: str, level: int, package: str) -> str:
    with contextlib.suppress(ImportError):  # it goes beyond the top, which its import tells
        return importlib.util.resolve_name("." * level + name, package)
    return name
