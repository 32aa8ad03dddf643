"""Read from a function's bytecode which globals and attributes it names.

Attributes of ``self`` are recorded separately from those of other objects.  Attributes of Python modules, whose values
are known, are recorded only with their module, so that ``self.count`` and ``itertools.count`` are not confused.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import operator
import os
import re
import string
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actorflow.script_state.call_arguments import Argument, call_arguments
from actorflow.script_state.imports import member_of, read_imports, rebound
from actorflow.script_state.user_code import is_user_class

__all__ = ["ANNOTATIONS", "CodeNames", "code_names", "format_names", "texts_in"]

ANY = (  # they read attributes that the code need not name
    "getattr", "hasattr", "vars", "__dict__", "attrgetter", "methodcaller", "__getattribute__",
)  # fmt: skip
BY_VALUE = {  # … under any name
    id(one): one.__name__ for one in (getattr, hasattr, vars, operator.attrgetter, operator.methodcaller)
}
FALLBACKS = ("__getattr__", "__getattribute__")  # methods that get the name of an attribute which code names elsewhere
BY_TEXT = ("globals", "eval", "exec")  # they look up names that a string contains
WHOLE = ("copy", "dataclasses", "inspect", "json", "pickle", "pprint")  # modules whose functions read all attributes
ANNOTATIONS = "__annotations__"
HINTS = ("get_type_hints", "get_annotations", "signature")  # functions that read the annotations of their argument
SETTERS = ("setattr", "__setattr__", "delattr", "__delattr__")  # they set attributes that string constants name
LOOKUPS = ("get", "pop", "setdefault", "__getitem__", "__contains__")  # methods of it that are given a name
IMPORTERS = frozenset(("import_module", "__import__"))  # they find modules by a text, as ``sys.modules`` does
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
    environment: bool = False  # whether it may read any environment variable
    strings: dict[str, None] = field(default_factory=dict)  # constants of code that reads the environment
    formats: bool = False  # whether it formats texts that are no constants in place: ``self.text.format(x)``
    any: bool = False  # whether it may read attributes that it does not name
    made: dict[tuple[str, ...], None] = field(
        default_factory=dict
    )  # constant parts of names of attributes that it makes
    made_of: list[tuple[Any, tuple[str, ...]]] = field(default_factory=list)  # … of this module or class
    unbound: dict[types.FunctionType, None] = field(default_factory=dict)  # methods that it calls with another ``self``
    imports: dict[str, None] = field(default_factory=dict)  # modules that it imports in its body, or may import
    stores: dict[str, None] = field(default_factory=dict)  # globals and attributes that it sets or deletes


def code_names(function: types.FunctionType) -> CodeNames:
    """The names in a function and its nested functions; the first parameter is assumed to be ``self``."""
    found = CodeNames()
    code = function.__code__
    own = code.co_varnames[0] if code.co_argcount else ""
    _CodeReader(code, own, function.__globals__, _modules_around(function), found).read()
    return found


def _modules_around(function: types.FunctionType) -> dict[str, types.ModuleType]:
    """The Python modules that variables of enclosing functions stand for."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that the enclosing function has not set yet
            if isinstance(cell.cell_contents, types.ModuleType):
                found[name] = cell.cell_contents
    return found


class _CodeReader:
    """Adds the names in code and in its nested functions to ``found``.

    ``own`` is the name of the variable that is ``self``, or empty; ``scope`` are the globals of the code, and
    ``around`` the modules that its other variables stand for; those in ``also`` may stand for something else, too.
    """

    def __init__(
        self, code: types.CodeType, own: str, scope: Mapping[str, Any], around: Mapping[str, types.ModuleType],
        found: CodeNames, also: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._code, self._own, self._scope, self._found = code, own, scope, found
        self._instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
        self._imports = read_imports(self._instructions, str(scope.get("__package__") or ""))
        self._around = {**around, **self._imports.variables}
        self._rebound = also | rebound(code, self._imports)
        found.imports |= self._imports.names
        self._before: object = None  # the argument of the previous instruction
        self._base: Any = None  # the module that the previous instruction loaded, if any
        self._unsure = False  # whether the variable that it loaded may be something else
        self._of_own = False  # whether the previous instruction loaded ``self``

    def read(self) -> None:
        """Read all instructions in order, then the constants, which contain the nested functions."""
        found = self._found
        for at, instruction in enumerate(self._instructions):
            kind, name = instruction.opname, instruction.argval
            if kind in ATTRIBUTES:
                self._base = self._imports.bases.get(at, self._base)
                self._formatted(at)
                self._unbound(at)
                self._attribute(name)
            elif kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._global(name)
            elif kind not in ("PUSH_NULL", "COPY", "DUP_TOP"):  # ``self.count += 1`` has these in between
                self._pattern(at)
                self._base, self._of_own, self._unsure = None, False, False
                if kind.startswith(("LOAD_FAST", "LOAD_DEREF")):  # one instruction may load two
                    last = name[-1] if isinstance(name, tuple) else name
                    self._of_own, self._base = last == self._own != "", self._around.get(last)
                    self._unsure = last in self._rebound
            if kind in STORES:
                found.stores[name] = None
            elif kind.startswith("LOAD_") and kind != "LOAD_CONST":
                self._reader_or_setter(at, name)
            self._environment(at)
            self._before = name
        self._constants()

    def _attribute(self, name: str) -> None:
        found = self._found
        found.attributes[name] = None
        if self._before == "layers":
            found.globals[f"layers.{name}"] = None
        if isinstance(self._base, types.ModuleType):
            found.modules.setdefault(id(self._base), (self._base, {}))[1][name] = None
            if self._unsure:
                found.others[name] = None
            self._base = member_of(self._base, name)
            found.any = found.any or _reads_all(self._base)
        else:
            (found.own if self._of_own else found.others)[name] = None
            self._base = None
        self._of_own = False

    def _global(self, name: str) -> None:
        found = self._found
        found.globals[name] = None
        self._base, self._of_own = self._scope.get(name, vars(builtins).get(name)), False
        self._unsure = False
        found.any = found.any or _reads_all(self._base)
        if name in BY_TEXT:  # strings in the code may contain the names
            found.globals.update(dict.fromkeys(word for word in _words(self._code) if word in self._scope))

    def _pattern(self, at: int) -> None:
        """Add the attributes of a class pattern, if a constant at ``at`` names those of one: ``case Point(x=0)``."""
        first, second = (*self._instructions[at : at + 2], None)[:2]
        if first is None or second is None or second.opname != "MATCH_CLASS":
            return
        count, names = second.arg or 0, list(first.argval)
        if count:
            if isinstance(self._base, type):
                places = getattr(self._base, "__match_args__", ())
                names += ["__match_args__", *places[:count]] if is_user_class(self._base) else places[:count]
            else:
                self._found.any = True
        self._read_of_others(names)

    def _environment(self, at: int) -> None:
        """Note that any environment variable may be read, if code asks for one at ``at`` whose name is not constant."""
        name = "getenv" if self._base is os.getenv else self._instructions[at].argval
        if (
            isinstance(name, str)
            and name in ENVIRONMENT
            and self._instructions[at].opname.startswith(("LOAD_", "IMPORT_"))
        ):
            after = self._instructions[at + 1 :]
            called = name == "getenv" or (after and after[0].opname in ATTRIBUTES and after[0].argval in LOOKUPS)
            arguments = call_arguments(after[name != "getenv" :], self._scope) if called else None
            inside = after and after[0].opname == "CONTAINS_OP" and _texts(self._instructions[max(at - 2, 0) : at])
            alias = self._instructions[at].argval != name  # whose constant texts are not collected
            known = (arguments and arguments[0].text is not None) or inside or _texts(after[:1], after[1:2])
            self._found.environment = self._found.environment or alias or not known

    def _unbound(self, at: int) -> None:
        """Note a method that code takes of a class, and does not call with its own ``self``: ``Base.f(other)``."""
        name = self._instructions[at].argval
        if not isinstance(self._base, type) or not is_user_class(self._base):
            return
        method = next((vars(base)[name] for base in self._base.__mro__ if name in vars(base)), None)
        if isinstance(method, types.FunctionType):
            arguments = call_arguments(self._instructions[at + 1 :], self._scope)
            if not (arguments and self._own and arguments[0].variable == self._own):
                self._found.unbound[method] = None

    def _formatted(self, at: int) -> None:
        """Add the attributes that a constant format names, if its ``format`` is loaded at ``at``."""
        before = self._instructions[at - 1]
        if self._instructions[at].argval in ("format", "format_map"):
            if before.opname == "LOAD_CONST" and isinstance(before.argval, str):
                self._read_of_others(format_names(before.argval))
            else:
                self._found.formats = True

    def _reader_or_setter(self, at: int, name: Any) -> None:
        """Add attributes that code reads or sets by a function such as ``getattr``, if it loads one at ``at``."""
        reader = name if name in ANY else BY_VALUE.get(id(self._base), "")
        if reader == "__dict__":
            self._read_of_others(names := _subscript(self._instructions[at + 1 :]))
            self._found.any = self._found.any or not names
        elif reader:
            self._reader(reader, call_arguments(self._instructions[at + 1 :], self._scope))
        if name in SETTERS:
            self._found.stores.update(dict.fromkeys(_words(self._code)))
        if name in HINTS:
            self._annotations()

    def _reader(self, reader: str, arguments: Sequence[Argument] | None) -> None:
        """Add the attributes that a function reads which is called with these arguments."""
        said = None if arguments is None else _naming(reader, arguments)
        fallback = self._code.co_name in FALLBACKS and self._code.co_varnames[1:2]
        passed = fallback and said is not None and [one.variable for one in said] == [*fallback]
        if passed and reader == "__getattribute__":
            return
        self._found.any = self._found.any or not said or any(one.text is None for one in said)
        self._read_of_others(part for one in said or () if one.text is not None for part in one.text.split("."))
        first = arguments[0].value if arguments and reader in ("getattr", "hasattr") else None
        first = self._around.get(arguments[0].variable) if arguments and first is None else first
        if isinstance(first, types.ModuleType):
            named = [one.text.partition(".")[0] for one in said or () if one.text is not None]
            self._found.modules.setdefault(id(first), (first, {}))[1].update(dict.fromkeys(named))
        if reader != "hasattr" and not passed:
            holder = arguments[0].value if arguments and reader in ("getattr", "vars") else None
            self._made(reader, holder, [one.parts for one in said or [Argument()] if one.text is None])

    def _made(self, reader: str, holder: Any, names: Iterable[tuple[str, ...]]) -> None:
        """Note which names are made: those of what a global stands for, or of any object."""
        for parts in names:
            if isinstance(holder, types.ModuleType | type):
                self._found.made_of.append((holder, parts))
            elif reader != "vars":
                self._found.made[parts] = None

    def _read_of_others(self, names: Iterable[str]) -> None:
        for name in names:
            self._found.attributes[name] = None
            self._found.others[name] = None

    def _annotations(self) -> None:
        self._read_of_others([ANNOTATIONS])

    def _constants(self) -> None:
        asks = not ENVIRONMENT.isdisjoint(self._code.co_names)
        names = frozenset(self._code.co_names)
        if not IMPORTERS.isdisjoint(names) or names.issuperset(("sys", "modules")):
            self._found.imports |= dict.fromkeys(filter(_is_module_name, self._code.co_consts))
        for constant in self._code.co_consts:
            if constant == ANNOTATIONS:
                self._annotations()
            if asks and isinstance(constant, str):
                self._found.strings[constant] = None
            if isinstance(constant, types.CodeType):
                parameters = constant.co_varnames[: constant.co_argcount]
                own = "" if self._own in parameters else self._own
                around = {name: one for name, one in self._around.items() if name in constant.co_freevars}
                also = frozenset(name for name in self._rebound if name in around)
                _CodeReader(constant, own, self._scope, around, self._found, also).read()


def _words(code: types.CodeType) -> Iterator[str]:
    """The words in all string constants of code, which may be names of attributes."""
    for text in texts_in(code):
        yield from re.findall(r"[^\W\d]\w*", text)


def texts_in(code: types.CodeType) -> Iterator[str]:
    """The string constants of code, also those in constant tuples."""
    pending = [*code.co_consts]
    for constant in pending:
        if isinstance(constant, tuple | frozenset):
            pending += constant
        elif isinstance(constant, str):
            yield constant


def _is_module_name(constant: Any) -> bool:
    return isinstance(constant, str) and all(part.isidentifier() for part in constant.split("."))


def _reads_all(function: Any) -> bool:
    """Whether a standard library function reads attributes of its argument that the code does not name."""
    return isinstance(function, types.FunctionType) and function.__module__ in WHOLE


def _texts(loads: Sequence[dis.Instruction], then: Sequence[dis.Instruction] = ()) -> bool:
    """Whether instructions load a constant text, and ``then`` use it as a subscript, if there are any of these."""
    text = any(one.opname == "LOAD_CONST" and isinstance(one.argval, str) for one in loads)
    return text and all("SUBSCR" in one.opname for one in then)


def _subscript(after: Sequence[dis.Instruction]) -> Sequence[str]:
    """The constant that instructions take as an item, as in ``x.__dict__["name"]``; nothing if they do not."""
    first, second = (*after, None, None)[:2]
    subscript = first and second and first.opname == "LOAD_CONST" and second.opname.startswith("BINARY_SUBSCR")
    return [first.argval] if first and subscript and isinstance(first.argval, str) else []


def _naming(reader: str, arguments: Sequence[Argument]) -> Sequence[Argument]:
    """The arguments that name the attributes; nothing if there are none."""
    if reader == "attrgetter":
        return arguments
    if reader == "__getattribute__":  # of ``object``, with the object as first argument, or of ``super()``
        return arguments[-1:]
    first = {"getattr": 1, "hasattr": 1, "methodcaller": 0}.get(reader, len(arguments))
    return arguments[first : first + 1]


def format_names(text: str) -> Iterator[str]:
    """The attributes that ``text.format()`` reads."""
    with contextlib.suppress(ValueError):  # it is no format
        for _, name, inner, _ in string.Formatter().parse(text):
            yield from re.findall(r"\.([^\W\d]\w*)", name or "")
            yield from format_names(inner or "")
