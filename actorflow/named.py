"""The code of a function goes in; the globals and attributes that it reads, by name, come out.

Attributes of the object that a method belongs to are told apart from those of anything else, and those of modules of
Python, whose values are known, are not told at all: ``self.count`` and ``itertools.count`` are two things.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Reads", "named_by"]

ANY = ("getattr", "hasattr", "vars", "__dict__", "attrgetter")  # read attributes that code need not name
ENVIRONMENT = frozenset(("environ", "getenv"))
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")


@dataclass(slots=True)
class Reads:
    """What code names, each in the order of the code."""

    globals: dict[str, None] = field(default_factory=dict)  # and "layers.dense", of anything named ``layers``
    attributes: dict[str, None] = field(default_factory=dict)  # of anything
    own: dict[str, None] = field(default_factory=dict)  # of ``self``
    others: dict[str, None] = field(default_factory=dict)  # of objects that are neither that nor modules
    modules: dict[int, tuple[types.ModuleType, dict[str, None]]] = field(default_factory=dict)  # by id, what of each
    strings: dict[str, None] = field(default_factory=dict)  # constants of code that reads the environment
    any: bool = False  # whether it may read attributes that it does not name


def named_by(function: types.FunctionType) -> Reads:
    """What a function and those inside of it name; the first parameter is taken for ``self``."""
    found = Reads()
    code = function.__code__
    _follow(code, code.co_varnames[0] if code.co_argcount else "", function.__globals__, found)
    return found


def _follow(code: types.CodeType, own: str, scope: Mapping[str, Any], found: Reads) -> None:
    instructions = list(dis.get_instructions(code))
    before: object = None
    base: Any = None  # the module that was read last, if it was one
    of_own = False  # whether what was read last is ``self``
    for at, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        if kind in ATTRIBUTES:
            found.attributes[name] = None
            if before == "layers":
                found.globals[f"layers.{name}"] = None
            if isinstance(base, types.ModuleType):
                found.modules.setdefault(id(base), (base, {}))[1][name] = None
                base = getattr(base, name, None)
            else:
                (found.own if of_own else found.others)[name] = None
                base = None
            of_own = False
        elif kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.globals[name] = None
            base, of_own = scope.get(name), False
        elif kind not in ("PUSH_NULL", "COPY", "DUP_TOP"):  # of ``self.count += 1``, too
            base, of_own = None, False
            if kind.startswith(("LOAD_FAST", "LOAD_DEREF")):
                of_own = (name[-1] if isinstance(name, tuple) else name) == own != ""  # two at a time
        loads = kind.startswith("LOAD_") and kind != "LOAD_CONST"
        if loads and name in ANY:
            said = list(_said(instructions[at + 1 :]))
            found.attributes.update(dict.fromkeys(said))
            found.others.update(dict.fromkeys(said))
            found.any = found.any or not said
        before = name
    asks = not ENVIRONMENT.isdisjoint(code.co_names)
    for constant in code.co_consts:
        if asks and isinstance(constant, str):
            found.strings[constant] = None
        if isinstance(constant, types.CodeType):
            parameters = constant.co_varnames[: constant.co_argcount]
            _follow(constant, "" if own in parameters else own, scope, found)


def _said(instructions: Sequence[dis.Instruction]) -> Iterator[str]:
    """The attributes that the next call names: ``getattr(x, "name")``."""
    for instruction in instructions:
        if instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
            yield instruction.argval
        elif instruction.opname.startswith(("CALL", "PRECALL")):
            return
