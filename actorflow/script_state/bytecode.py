"""Read from a function's bytecode which globals and attributes it names.

Attributes of ``self`` are recorded separately from those of other objects.  Attributes of Python modules, whose values
are known, are recorded only with their module, so that ``self.count`` and ``itertools.count`` are not confused.
"""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ANNOTATIONS", "CodeNames", "code_names"]

ANY = ("getattr", "hasattr", "vars", "__dict__", "attrgetter")  # they read attributes that the code need not name
NAMED = {"getattr": 1, "hasattr": 1, "attrgetter": 0}  # the position of the argument that names the attribute
BY_TEXT = ("globals", "eval", "exec")  # they look up names that a string contains
WHOLE = ("copy", "dataclasses", "inspect", "json", "pickle", "pprint")  # modules whose functions read all attributes
ANNOTATIONS = "__annotations__"
HINTS = ("get_type_hints", "get_annotations", "signature")  # functions that read the annotations of their argument
SETTERS = ("setattr", "__setattr__", "delattr", "__delattr__")  # they set attributes that string constants name
ENVIRONMENT = frozenset(("environ", "getenv"))
STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")


@dataclass(slots=True)
class CodeNames:
    """The names that code uses, in the order of the code."""

    globals: dict[str, None] = field(default_factory=dict)  # also "layers.dense", of anything named ``layers``
    attributes: dict[str, None] = field(default_factory=dict)  # attributes that it reads of any object
    own: dict[str, None] = field(default_factory=dict)  # attributes that it reads of ``self``
    others: dict[str, None] = field(default_factory=dict)  # read of objects other than ``self`` and modules
    modules: dict[int, tuple[types.ModuleType, dict[str, None]]] = field(default_factory=dict)  # by id, its attributes
    strings: dict[str, None] = field(default_factory=dict)  # constants of code that reads the environment
    any: bool = False  # whether it may read attributes that it does not name
    imports: dict[str, None] = field(default_factory=dict)  # modules that it imports in its body
    stores: dict[str, None] = field(default_factory=dict)  # globals and attributes that it sets or deletes


def code_names(function: types.FunctionType) -> CodeNames:
    """The names in a function and its nested functions; the first parameter is assumed to be ``self``."""
    found = CodeNames()
    code = function.__code__
    _CodeReader(code, code.co_varnames[0] if code.co_argcount else "", function.__globals__, found).read()
    return found


class _CodeReader:
    """Adds the names in code and in its nested functions to ``found``.

    ``own`` is the name of the variable that is ``self``, or empty; ``scope`` are the globals of the code.
    """

    def __init__(self, code: types.CodeType, own: str, scope: Mapping[str, Any], found: CodeNames) -> None:
        self._code, self._own, self._scope, self._found = code, own, scope, found
        self._instructions = list(dis.get_instructions(code))
        self._before: object = None  # the argument of the previous instruction
        self._base: Any = None  # the module that the previous instruction loaded, if any
        self._of_own = False  # whether the previous instruction loaded ``self``

    def read(self) -> None:
        """Read all instructions in order, then the constants, which contain the nested functions."""
        found = self._found
        for at, instruction in enumerate(self._instructions):
            kind, name = instruction.opname, instruction.argval
            if kind in ATTRIBUTES:
                self._attribute(name)
            elif kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._global(name)
            elif kind not in ("PUSH_NULL", "COPY", "DUP_TOP"):  # ``self.count += 1`` has these in between
                self._base, self._of_own = None, False
                if kind.startswith(("LOAD_FAST", "LOAD_DEREF")):  # one instruction may load two
                    self._of_own = (name[-1] if isinstance(name, tuple) else name) == self._own != ""
            if kind in STORES:
                found.stores[name] = None
            elif kind == "IMPORT_NAME":
                found.imports[name] = None
            elif kind.startswith("LOAD_") and kind != "LOAD_CONST":
                self._reader_or_setter(at, name)
            self._before = name
        self._constants()

    def _attribute(self, name: str) -> None:
        found = self._found
        found.attributes[name] = None
        if self._before == "layers":
            found.globals[f"layers.{name}"] = None
        if isinstance(self._base, types.ModuleType):
            found.modules.setdefault(id(self._base), (self._base, {}))[1][name] = None
            self._base = getattr(self._base, name, None)
            found.any = found.any or _reads_all(self._base)
        else:
            (found.own if self._of_own else found.others)[name] = None
            self._base = None
        self._of_own = False

    def _global(self, name: str) -> None:
        found = self._found
        found.globals[name] = None
        self._base, self._of_own = self._scope.get(name), False
        found.any = found.any or _reads_all(self._base)
        if name in BY_TEXT:  # strings in the code may contain the names
            found.globals.update(dict.fromkeys(word for word in _words(self._code) if word in self._scope))

    def _reader_or_setter(self, at: int, name: Any) -> None:
        """Add attributes that code reads or sets by a function such as ``getattr``, if it loads one at ``at``."""
        found = self._found
        if name in ANY:
            said = _attribute_read(name, self._instructions[at + 1 :])
            if said:
                found.attributes[said] = None
                found.others[said] = None
            found.any = found.any or not said
        if name in SETTERS:
            found.stores.update(dict.fromkeys(_words(self._code)))
        if name in HINTS:
            self._annotations()

    def _annotations(self) -> None:
        self._found.attributes[ANNOTATIONS] = None
        self._found.others[ANNOTATIONS] = None

    def _constants(self) -> None:
        asks = not ENVIRONMENT.isdisjoint(self._code.co_names)
        for constant in self._code.co_consts:
            if constant == ANNOTATIONS:
                self._annotations()
            if asks and isinstance(constant, str):
                self._found.strings[constant] = None
            if isinstance(constant, types.CodeType):
                parameters = constant.co_varnames[: constant.co_argcount]
                own = "" if self._own in parameters else self._own
                _CodeReader(constant, own, self._scope, self._found).read()


def _words(code: types.CodeType) -> Iterator[str]:
    """The words in all string constants of code, which may be names of attributes."""
    pending = [*code.co_consts]
    for constant in pending:
        if isinstance(constant, tuple | frozenset):
            pending += constant
        elif isinstance(constant, str):
            yield from re.findall(r"[^\W\d]\w*", constant)


def _reads_all(function: Any) -> bool:
    """Whether a standard library function reads attributes of its argument that the code does not name."""
    return isinstance(function, types.FunctionType) and function.__module__ in WHOLE


def _attribute_read(reader: str, instructions: Sequence[dis.Instruction]) -> str:
    """The attribute that is read, such as the name in ``getattr(x, "name")``; empty if the code does not show it."""
    if reader == "__dict__":
        first, second = (*instructions, None, None)[:2]
        subscript = first and second and first.opname == "LOAD_CONST" and second.opname.startswith("BINARY_SUBSCR")
        return first.argval if first and subscript and isinstance(first.argval, str) else ""
    arguments: list[str] = []
    for instruction in instructions:
        kind = instruction.opname
        if kind == "LOAD_CONST":
            arguments.append(instruction.argval if isinstance(instruction.argval, str) else "")
        elif kind in ("LOAD_ATTR", "PUSH_NULL", "PRECALL", "NOP", "KW_NAMES", "RESUME", "EXTENDED_ARG", "CACHE"):
            continue
        elif kind.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")):
            arguments += [""] * (len(instruction.argval) if isinstance(instruction.argval, tuple) else 1)
        elif kind.startswith("CALL"):
            return arguments[NAMED[reader]] if reader in NAMED and len(arguments) > NAMED[reader] else ""
        else:
            return ""
    return ""
