"""Search for all state that a job's function can reach: modules, optimizers, tensors, and Python values.

The search follows the function's closure, the globals that it names, its defaults, ``self``, and the functions and
methods of the user's own code that it calls.  It finds the same state on every rank.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from actorflow.script_state.bytecode import ANNOTATIONS, CodeNames, code_names, format_names, texts_in
from actorflow.script_state.imports import is_loaded
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.object_search import (
    CACHE,
    LOGGING_LIBRARIES,
    PLAIN,
    nowhere,
    search_entries,
    search_frozen_set,
    search_global_hooks,
    search_object,
    search_tensor,
    search_tuple,
    search_value_attributes,
    wraps_function,
)
from actorflow.script_state.reachability import ROOT, UNREAD
from actorflow.script_state.search_result import Findings, SearchResult
from actorflow.script_state.sources import (
    AttributesSource,
    ClassSource,
    ClosureSource,
    DecimalSource,
    DefaultsSource,
    EnvironmentSource,
    GlobalsSource,
    LibrarySource,
    SlotsSource,
    SubclassesSource,
    WholeEnvironmentSource,
)
from actorflow.script_state.user_code import HEAP_TYPE, has_user_class, is_installed, is_user_class, is_user_file
from actorflow.standins.lazy_tensor import LazyTensor, wait_for_values
from actorflow.standins.locations import (
    AttributeLocation,
    CellLocation,
    ClassAttributeLocation,
    ImmutableItemLocation,
    ItemLocation,
    PartialArgsLocation,
    ReferentLocation,
    TensorLocation,
)
from actorflow.standins.owned_tensor import DetachedTensor
from actorflow_compiler.values.variables import ScriptState

__all__ = ["find_state", "search_script"]

VALUES = (*PLAIN, LazyTensor)  # they hold no others
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
FOLLOWED = (*CALLABLES, staticmethod, classmethod)  # functions whose code is followed wherever they are found
METHODS = (
    types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools.partialmethod,
    functools.singledispatchmethod,
)  # fmt: skip
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)  # methods of C types, such as ``table.get``
MANY = 1000  # lists and dictionaries in libraries with more items in all are not followed
CONSTRUCTORS = ("__init__", "__new__")  # not called on objects that already exist
ALWAYS_CALLED = ("forward", "__call__", *CONSTRUCTORS)  # besides the methods behind Python's operators
OF_CLASSES = ("__name__", "__qualname__")  # attributes that are not in its ``__dict__``
OF_FUNCTIONS = (ANNOTATIONS, "__doc__", *OF_CLASSES)
NOT_CALLED = frozenset((*vars(nn.Module), *vars(Optimizer)))  # methods that no library calls in a step by itself
TRAINERS = ("lightning", "lightning_fabric", "pytorch_lightning")  # their hooks are called outside of steps
NEVER_CALLED = (  # special methods for printing, copying and the like
    "__repr__", "__str__", "__format__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__copy__", "__deepcopy__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__getnewargs__",
)  # fmt: skip
TENSOR_OPERATORS = sorted(  # special methods of tensors, which a script may replace
    {
        name
        for base in Tensor.__mro__[:-1]
        for name, method in vars(base).items()
        if name.startswith("__") and callable(method) and name not in (*CONSTRUCTORS, *NEVER_CALLED)
    }
)


def find_state(
    function: Callable[..., Any],
    model: Any = None,
    optimizer: Any = None,
    names: NameRegistry | None = None,
    more: Mapping[str, Any] = {},
) -> ScriptState:
    """The state of the script that ``function`` can reach.

    ``model`` and ``optimizer`` (one, a list or a dictionary of them) are included and named ``model``, ``model.0`` and
    so on.  Parameters and buffers are named by the variable of their root module and their qualified name, other
    tensors by their variable.  ``names`` holds the names that earlier searches gave.  ``more`` is the state that the
    job itself holds, by preferred name.
    """
    return search_script(function, model, optimizer, names, more).state


def search_script(
    function: Callable[..., Any],
    model: Any = None,
    optimizer: Any = None,
    names: NameRegistry | None = None,
    more: Mapping[str, Any] = {},
    passed: Mapping[str, Any] = {},
) -> SearchResult:
    """The state as in ``find_state``, and all sources of values that the function can reach.

    ``passed`` are arguments of a call, by name.
    """
    search = _Search(Findings(names if names is not None else NameRegistry()))
    for name, given in (("model", model), ("optimizer", optimizer)):
        if given is not None:
            search.value(name, given, ItemLocation({name: given}, name))
    for name, argument in passed.items():
        search.value(name, argument, ItemLocation(passed, name))
    with search.found.within(UNREAD):  # it may grow while other jobs add to it
        for name, held in more.items():
            search.value(name, held, nowhere())
    search_global_hooks(search)
    search.function(function, "self")
    search.settle()
    return search.found.result()


class _Search:
    """Follows values, functions and methods; what it finds is in ``found``.

    A function's code is followed later, by ``settle``, so that a chain of calls may be of any length.
    """

    def __init__(self, found: Findings) -> None:
        self.found = found
        self.pending: deque[Callable[[], None]] = deque()  # functions whose code is to be followed
        self.owners: dict[types.FunctionType, dict[type | None, None]] = {}  # method → the classes that it belongs to
        self.counted: dict[types.FunctionType, CodeNames] = {}  # function whose reads count → the names in it
        self.texts: dict[str, None] = {}  # texts that may be formats
        self.formats = False  # whether code formats texts that are no constants in place
        self.made: dict[tuple[str, ...], None] = {}  # constant parts of names of attributes that code makes
        self.described: dict[types.FunctionType, str] = {}  # function of the user → its path
        self.followed: set[tuple[int, str]] = (
            set()
        )  # id of a class or module, and the name of its attribute; or a path of it
        self.constructors: dict[type, bool] = {}  # class of objects → whether ``__init__`` was followed

    # -- values ------------------------------------------------------------------------------------

    def value(self, path: str, value: Any, place: TensorLocation, attribute: str | None = None) -> None:
        """Search a value that was reached by ``path`` and is held at ``place``, as an ``attribute`` if it is one."""
        if type(value) in weakref.ProxyTypes:
            value = value.__init__.__self__  # the referent
        if isinstance(value, LazyTensor) and value.kept:
            value = wait_for_values(value).clone()
            place(value)
        if isinstance(value, DetachedTensor) and value.is_released:
            value = value.plain
            place(value)
        if isinstance(value, VALUES):
            if isinstance(value, str) and "{" in value:
                self.texts[value] = None
            made: Any = type(value)
            if made not in PLAIN and made is not LazyTensor and is_user_class(made):
                self.found.classes.append(made)
                search_value_attributes(self, path, value, attribute)
            return
        if isinstance(value, Tensor):
            self.found.tensors.append((path, value, place))
            search_tensor(self, path, value)
            self.found.add_reference(value, attribute)
            return
        if isinstance(value, tuple):
            search_tuple(self, path, value, place, attribute)
            return
        if isinstance(value, frozenset):
            search_frozen_set(self, path, value, place)
        if type(value) is weakref.ref and isinstance(value(), Tensor):
            self.value(path, value(), ReferentLocation(place, value))
            return
        if isinstance(value, FOLLOWED):
            self.function(value, path)
            return
        if isinstance(value, BUILTIN_METHODS):
            if not isinstance(value.__self__, type | types.ModuleType | None):
                self.value(path, value.__self__, nowhere())
            return
        self.found.add_reference(value, attribute)
        if self.found.first_visit(value):
            with self.found.within(id(value)):
                search_object(self, path, value)

    # -- functions ---------------------------------------------------------------------------------

    def function(self, function: Any, self_name: str = "self", owner: type | None = None, root: int = ROOT) -> None:
        """Follow a callable.

        ``owner`` is the class whose method it is.  ``root`` is ``UNREAD`` if its reads do not count.
        """
        if isinstance(function, types.MethodType):
            self.value(self_name, function.__self__, nowhere())
            made = function.__self__ if isinstance(function.__self__, type) else type(function.__self__)
            self.function(function.__func__, owner=made, root=root)
        elif isinstance(function, functools.partial):
            self.partial(self_name, function)
        elif isinstance(function, types.FunctionType):
            first = self.found.first_visit(function)
            self.owned(function, owner)
            if first:
                self.python_function(function, self_name, owner, root)
        elif isinstance(function, classmethod):
            self.function(function.__func__, owner=owner, root=root)
        elif isinstance(function, staticmethod):
            self.function(function.__func__, root=root)
        elif isinstance(function, property):
            self.function(function.fget, owner=owner, root=root)
        elif isinstance(function, functools.cached_property | functools.partialmethod):
            self.function(function.func, owner=owner, root=root)
        elif isinstance(function, functools.singledispatchmethod):
            self.value("registry", function.dispatcher.registry, nowhere())
        elif isinstance(function, CACHE):
            self.value(self_name, function, nowhere())
        elif wraps_function(function):
            self.function(function.__wrapped__)
        elif function is not None and not isinstance(function, types.BuiltinFunctionType):
            self.value(self_name, function, nowhere())

    def owned(self, function: types.FunctionType, owner: type | None) -> None:
        """Note that a function is a method of this class, or called with any object as its first argument."""
        owners = self.owners.setdefault(function, {})
        if owner not in owners:
            owners[owner] = None
            if function in self.counted:
                self.found.attribute_reads.add(self.counted[function], owner)

    def partial(self, path: str, function: functools.partial[Any]) -> None:
        """Follow the function of a ``functools.partial``, and search the arguments that it keeps."""
        if self.found.first_visit(function):
            if vars(function):
                self.function_attributes(path, function)
            self.function(function.func)
            search_tuple(self, "args", function.args, PartialArgsLocation(function), None)
            self.found.add_reference(function.keywords, None)
            search_entries(self, "", function.keywords)

    def python_function(self, function: types.FunctionType, self_name: str, owner: type | None, root: int) -> None:
        """Search what a function holds besides its code, which is followed later."""
        own = is_user_file(function.__code__.co_filename)
        if str(function.__module__).startswith("actorflow."):  # under any name that the script has for it
            self.found.globals.update((f"{function.__module__}.{function.__name__}", function.__name__))
        if isinstance(registry := vars(function).get("registry"), types.MappingProxyType):  # singledispatch
            self.value(f"{function.__name__}.registry", registry, nowhere())
        path = self_name if owner is None else function.__qualname__
        if own:
            self.described[function] = path
            self.function_attributes(path, function)
        elif wraps_function(function):
            self.function_attributes(path, function, but="__wrapped__")  # which is followed where it is called
        self.pending.append(functools.partial(self.follow, function, own, root))

    def function_attributes(
        self, path: str, function: types.FunctionType | functools.partial[Any], but: str = ""
    ) -> None:
        """Search the attributes that were set on a function, ``but`` for one."""
        given = vars(function)
        self.found.add_reference(given, None)
        with self.found.within(id(given)):
            self.found.add_sources(given, AttributesSource(path, given, whole=False))
            for name, item in list(given.items()):
                if name != but:
                    self.value(f"{path}.{name}", item, ItemLocation(given, name), name)

    # -- code --------------------------------------------------------------------------------------

    def follow(self, function: types.FunctionType, own: bool, root: int) -> None:
        """Follow the code of a function of the user's ``own``, or the functions that a library's function wraps."""
        with self.found.within(root):
            if own:
                self.code(function)
            else:
                self.wrapped_by(function)

    def wrapped_by(self, function: types.FunctionType) -> None:
        """Follow the functions that a library's function wraps, as ``torch.no_grad()`` and others do."""
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, CALLABLES):
                    self.function(cell.cell_contents)

    def code(self, function: types.FunctionType) -> None:
        """Search the values that the code of a function can read: those that it names, its closure and its defaults."""
        found = self.found
        self.closure(function)
        found.codes.append(function.__code__)
        named = code_names(function)
        found.attributes.update(named.attributes)
        if found.is_at_root:
            self.counted[function] = named
            for owner in self.owners.get(function, {None: None}):
                found.attribute_reads.add(named, owner)
        found.stores.update(named.stores)
        found.written_globals[id(function.__globals__)] = function.__globals__
        for name in named.imports:
            self.imported(name)
        found.add_read_source(GlobalsSource("", function.__globals__, named.globals))
        for name in named.globals:
            found.globals.add(name)
            if name in function.__globals__:
                self.value(name, function.__globals__[name], ItemLocation(function.__globals__, name))
        for module, attributes in named.modules.values():
            if not is_user_file(getattr(module, "__file__", None)) and not module.__name__.startswith("actorflow"):
                self.library_module(module, attributes)
        self.surroundings(named)
        self.made.update(named.made)
        self.formats = self.formats or named.formats
        self.texts.update(dict.fromkeys(texts_in(function.__code__)))
        for holder, parts in named.made_of:
            self.made_names(holder, parts)
        for method in named.unbound:
            self.function(method, method.__name__)
        self.defaults(function)

    def closure(self, function: types.FunctionType) -> None:
        """Search the variables of enclosing functions that a function names."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.found.globals.add(name)
            self.found.add_read_source(ClosureSource(name, cell))
            try:
                self.value(name, cell.cell_contents, CellLocation(cell))
            except ValueError:  # a variable that the enclosing function has not set yet
                continue

    def imported(self, name: str) -> None:
        """Search a module that a function imports, and its parent packages."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            full = ".".join(parts[:count])
            if is_loaded(full):
                self.value(full, sys.modules[full], nowhere())
            else:
                self.found.awaited[full] = None

    def library_module(self, module: types.ModuleType, attributes: Mapping[str, None]) -> None:
        """Search the attributes of a library's module that code names, but for objects of torch, NumPy and Python."""
        known = LibrarySource(module.__name__, module, attributes).values()
        flags = {name: value for name, value in known.items() if isinstance(value, (*PLAIN, *FUNCTIONS))}
        flags |= dict.fromkeys(name for name in attributes if name not in known)  # the module may get it
        for name, value in known.items():
            of = str(type(value).__module__)
            own = is_installed(of) and of.partition(".")[0] not in LOGGING_LIBRARIES and hasattr(value, "__dict__")
            if own or _is_plain_data(value) or isinstance(value, type):  # an object with settings, sys.argv, a class
                self.value(f"{module.__name__}.{name}", value, ItemLocation(vars(module), name))
        if flags:
            self.found.add_read_source(LibrarySource(module.__name__, module, flags))
        for name, value in flags.items():
            if _is_users_function(value):
                self.function(value, f"{module.__name__}.{name}")

    def surroundings(self, named: CodeNames) -> None:
        """Add sources of the context of ``decimal`` and of environment variables, if code names them."""
        if "Decimal" in named.attributes or "Decimal" in named.globals:
            self.found.add_read_source(DecimalSource("the context of decimal", decimal))
        if named.environment:
            self.found.add_read_source(WholeEnvironmentSource("os.environ", os.environ))
        elif named.strings:
            made = [name for name in os.environ if any(word and word in name for word in named.strings)]
            variables = dict.fromkeys([*named.strings, *made])
            self.found.add_read_source(EnvironmentSource("os.environ", os.environ, variables))

    def defaults(self, function: types.FunctionType) -> None:
        """Search the default values of a function's parameters."""
        defaults = function.__defaults__ or ()
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        names = arguments[len(arguments) - len(defaults) :]
        self.found.add_read_source(DefaultsSource(function.__name__, function))
        for index, (name, default) in enumerate(zip(names, defaults, strict=True)):
            self.value(name, default, ImmutableItemLocation(AttributeLocation(function, "__defaults__"), index, tuple))
        if function.__kwdefaults__:
            self.found.add_reference(function.__kwdefaults__, None)
            search_entries(self, "", function.__kwdefaults__)

    # -- methods and module attributes -------------------------------------------------------------

    def settle(self) -> None:
        """Follow functions, and the methods and module attributes that code names, until nothing new is found."""
        while True:
            while self.pending:
                self.pending.popleft()()
            before = len(self.followed)
            self.named_in_formats()
            self.named_methods()
            self.named_of_definitions()
            self.named_in_modules()
            if len(self.followed) == before and not self.pending and not self.remaining_constructors():
                break
        self.later_names()
        for path, scheduler in self.found.schedulers:
            if self.found.first_visit(scheduler.optimizer):
                self.found.optimizers.append((f"{path}.optimizer", scheduler.optimizer))

    def later_names(self) -> None:
        """Add sources of what the user's classes and modules have not, and may get: names of attributes in code."""
        bases = (base for made in self.found.classes for base in made.__mro__)
        for owner in dict.fromkeys(filter(is_user_class, bases)):
            later = [name for name in self.found.attributes if name not in owner.__dict__]
            self.found.add_read_source(ClassSource(owner.__name__, owner, later))
        for path, namespace in self.found.namespaces:
            later = [name for name in self.found.attributes if name not in vars(namespace)]
            self.found.add_read_source(GlobalsSource(path, vars(namespace), later))

    def named_methods(self) -> None:
        """Follow the methods and class attributes that code names, of all classes found so far."""
        for owner in list(self.found.classes):
            for name in [*_called(owner), *_fitting(owner, self.made), *self.found.attributes]:
                if (id(owner), name) in self.followed:
                    continue
                if name in CONSTRUCTORS and owner not in self.found.instantiated:
                    self.constructors.setdefault(owner, False)
                else:
                    self.followed.add((id(owner), name))
                    self.method(owner, name)
                    if name == "__subclasses__":
                        self.subclasses(owner)

    def made_names(self, holder: Any, parts: tuple[str, ...]) -> None:
        """Search the attributes of a user's module or class whose names code makes of these constant parts."""
        if isinstance(holder, type):
            for name in _fitting(holder, [parts]):
                self.method(holder, name)
        elif is_user_file(getattr(holder, "__file__", None)):
            values = vars(holder)
            names = [name for name in values if not name.startswith("__") and all(part in name for part in parts)]
            self.found.add_read_source(GlobalsSource(holder.__name__, values, names))
            for name in names:
                self.value(f"{holder.__name__}.{name}", values[name], ItemLocation(values, name))

    def named_of_definitions(self) -> None:
        """Search what code names of the user's functions and classes that is not in their ``__dict__``."""
        named = [*self.found.classes, *self.found.instantiated]
        classes = {owner: owner.__name__ for owner in named if is_user_class(owner)}
        for names, definitions in ((OF_FUNCTIONS, self.described), (OF_CLASSES, classes)):
            for name in [name for name in names if name in self.found.attributes]:
                for thing, path in list(definitions.items()):
                    if (id(thing), f"{path}.{name}") not in self.followed:
                        self.followed.add((id(thing), f"{path}.{name}"))
                        self.found.add_read_source(SlotsSource(path, thing, [name]))
                        self.value(f"{path}.{name}", getattr(thing, name), AttributeLocation(thing, name))

    def named_in_modules(self) -> None:
        """Search the attributes that code names, of all of the user's modules found so far."""
        for path, namespace in list(self.found.namespaces):
            for name in [*self.found.attributes, "__getattr__"]:
                if (id(namespace), name) in self.followed:
                    continue
                self.followed.add((id(namespace), name))
                values = namespace.__dict__
                if name in values:
                    self.found.add_read_source(GlobalsSource(path, values, [name]))
                    self.value(f"{path}.{name}", values[name], ItemLocation(values, name))

    def named_in_formats(self) -> None:
        """Note the attributes that formats name, in texts that code may format: ``self.text.format(x)``."""
        if self.formats:
            said = dict.fromkeys(name for text in self.texts for name in format_names(text))
            self.found.attributes.update(said)
            self.found.attribute_reads.add_names(said)

    def remaining_constructors(self) -> bool:
        """Follow constructors of classes that code does not name, for state only: their reads do not count.

        Returns whether there were any.
        """
        left = [owner for owner, done in self.constructors.items() if not done]
        for owner in left:
            self.constructors[owner] = True
            for name in CONSTRUCTORS:
                self.method(owner, name, UNREAD)
        return bool(left)

    def method(self, owner: type, name: str, root: int = ROOT) -> None:
        """Follow the attribute of this name in a class and in its bases, which ``super()`` may call."""
        users = [base for base in owner.__mro__ if is_user_class(base)]
        if not any(name in base.__dict__ for base in owner.__mro__):
            return
        for base in owner.__mro__[:-1] if name not in CONSTRUCTORS else ():  # all but ``object``
            changes = base not in users and base.__flags__ & HEAP_TYPE
            if changes and isinstance(found := base.__dict__.get(name), (*PLAIN, types.FunctionType)):
                with self.found.within(root):
                    self.found.add_read_source(ClassSource(base.__name__, base, [name]))
                if _is_users_function(found):
                    self.function(found, owner=base, root=root)
        for base in users:  # also classes without the name: they may get it later
            with self.found.within(root):
                self.found.add_read_source(ClassSource(base.__name__, base, [name]))
            if name in base.__dict__:
                found = base.__dict__[name]
                described = isinstance(found, METHODS) or hasattr(type(found), "__get__")  # a slot, for example
                own = has_user_class(found)  # a user's descriptor: its methods compute what is read
                if (own or not described) and (not name.startswith("__") or name == ANNOTATIONS):
                    with self.found.within(root):
                        self.value(f"{base.__name__}.{name}", found, ClassAttributeLocation(base, name))
                if isinstance(found, METHODS) or wraps_function(found):
                    self.function(found, owner=base, root=root)

    def subclasses(self, owner: type) -> None:
        """Follow the subclasses of a class and of its bases."""
        for base in filter(is_user_class, owner.__mro__):
            made: list[type] = type.__subclasses__(base)  # a metaclass does not have it as a method
            with self.found.within(ROOT):
                self.found.add_read_source(SubclassesSource(base.__name__, base))
                for one in made:
                    self.value(one.__name__, one, nowhere())


def _is_plain_data(value: Any) -> bool:
    """Whether a value is a list or a dictionary, not too large, of plain values, or of such lists and dictionaries."""
    pending, seen, count = [value], {id(value)}, 0
    for one in pending:
        items = list(one.values()) if isinstance(one, dict) else one
        if not isinstance(items, list) or (count := count + len(items)) > MANY:
            return False
        for item in items:
            if not isinstance(item, PLAIN) and id(item) not in seen:
                seen.add(id(item))
                pending.append(item)
    return True


def _called(owner: type) -> Iterator[str]:
    """The methods that are called whether code names them or not."""
    yield from ALWAYS_CALLED
    yield from _operator_methods(owner)
    if users := _users_attributes(owner):
        libraries = [base for base in owner.__mro__[:-1] if not is_user_class(base) and _package(base) not in TRAINERS]
        known = {name for base in libraries for name in vars(base)}.difference(NOT_CALLED)
        yield from (name for name, value in users.items() if name in known and isinstance(value, METHODS))


def _fitting(owner: type, made: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """The attributes of a user's class whose names code may make: those that have all constant parts of a made name.

    Where none is known, a method counts only if its name does not begin with an underscore.
    """
    for parts in made:
        for name, value in _users_attributes(owner).items():
            public = not (isinstance(value, METHODS) and (name.startswith("_") or name in vars(nn.Module)))
            if all(part in name for part in parts) and (parts or public):
                yield name


def _users_attributes(owner: type) -> dict[str, Any]:
    """The attributes of a class and its bases that the user has written, but for special ones."""
    bases = [base for base in owner.__mro__ if is_user_class(base)]
    return {name: value for base in bases[::-1] for name, value in vars(base).items() if not name.startswith("__")}


def _package(owner: type) -> str:
    return str(owner.__module__).partition(".")[0]


def _operator_methods(owner: type) -> Iterable[str]:
    """The special methods that Python's operators and statements call: a user's class's own, and all of ``Tensor``."""
    return TENSOR_OPERATORS if owner is Tensor else _users_operator_methods(owner)


def _users_operator_methods(owner: type) -> Iterator[str]:
    for base in owner.__mro__:
        if is_user_class(base):
            for name, method in base.__dict__.items():
                special = name.startswith("__") and name.endswith("__") and name not in (*CONSTRUCTORS, *NEVER_CALLED)
                if not special or not isinstance(method, types.FunctionType):
                    continue
                if method.__code__.co_filename != "<string>":  # generated by dataclasses
                    yield name


def _is_users_function(value: Any) -> bool:
    """Whether a value in a library is a function of the user, which the script has put there."""
    return isinstance(value, types.FunctionType) and is_user_file(value.__code__.co_filename)
