"""Search for all state that a job's function can reach: modules, optimizers, tensors, and Python values.

The search follows the function's closure, the globals that it names, its defaults, ``self``, and the functions and
methods of the user's own code that it calls.  It finds the same state on every rank.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import ctypes
import decimal
import functools
import inspect
import io
import logging
import operator
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from actorflow.script_state.bytecode import code_names
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.reachability import ROOT, UNREAD, AttributeReads, ReferenceGraph
from actorflow.script_state.set_order import stable_order
from actorflow.script_state.sources import (
    OWN_DICTS,
    ArraySource,
    AttributesSource,
    CacheSource,
    ClassSource,
    ClosureSource,
    ContextVarSource,
    DecimalSource,
    DefaultsSource,
    EnvironmentSource,
    GeneratorSource,
    GlobalsSource,
    HooksSource,
    ItemsSource,
    LengthSource,
    LibrarySource,
    LogLevelSource,
    MappingSource,
    MemoryFileSource,
    ModuleSource,
    ParamGroupSource,
    SchedulerSource,
    ScriptSource,
    SlotsSource,
    StateSource,
    StepHooksSource,
    StoredClassSource,
    StoredGlobalsSource,
    SubclassesSource,
    TensorAttributesSource,
    TypeSource,
    cache_table,
)  # fmt: skip
from actorflow.script_state.state_naming import StateNaming
from actorflow.script_state.unsupported import refuse_unsupported, unwrap_prepared
from actorflow.script_state.user_code import is_user_class, is_user_file
from actorflow.standins.beside import BESIDE
from actorflow.standins.lazy_tensor import LazyTensor, wait_for_values
from actorflow.standins.locations import (
    AttributeLocation,
    CellLocation,
    ClassAttributeLocation,
    ImmutableItemLocation,
    ItemLocation,
    KeyLocation,
    PartialArgsLocation,
    ScriptAttributeLocation,
    ScriptListLocation,
    TensorLocation,
)
from actorflow.standins.owned_tensor import DetachedTensor
from actorflow_compiler.capture.optimizer_state import is_fused
from actorflow_compiler.core.expressions import has_numbers
from actorflow_compiler.core.torch_internals import HOOKS, hooks_of, module_hooks, users_step_hooks
from actorflow_compiler.substitutes.observers import give_ranges_sizes
from actorflow_compiler.values.variables import ScriptState, attributes_given

__all__ = ["SearchResult", "find_state", "search_script"]

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
METHODS = (
    types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools.partialmethod,
    functools.singledispatchmethod,
)  # fmt: skip
OPTIMIZER_ATTRIBUTES = ("param_groups", "state", "defaults")  # followed separately
SCHEDULER_METHODS = ("step", "get_lr", "_get_closed_form_lr")  # methods of schedulers that are followed
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
CONTAINERS = (  # library classes whose attributes are all followed
    collections.UserList, collections.UserString, queue.Queue, threading.Event, Distribution, Dataset,
)  # fmt: skip
NUMBER_OF_C: Any = ctypes.c_int.__base__
NATIVE: dict[Any, Callable[[str, Any], StateSource]] = {  # objects with state outside Python attributes
    **dict.fromkeys((random.Random, np.random.Generator, np.random.RandomState, torch.Generator), GeneratorSource),
    **dict.fromkeys((np.ndarray, np.void, bytearray, array.array, memoryview), ArraySource),
    **dict.fromkeys((ctypes.Array, ctypes.Structure, ctypes.Union, NUMBER_OF_C), ArraySource),
    **dict.fromkeys((io.StringIO, io.BytesIO), MemoryFileSource),
}
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)  # methods of C types, such as ``table.get``
LOGGING_LIBRARIES = frozenset(("logging", "mlflow", "rich", "tensorboardX", "tqdm", "unittest", "wandb"))
MANY = 1000  # longer lists in libraries are not followed
CACHE = type(functools.cache(id))
CONSTRUCTORS = ("__init__", "__new__")  # not called on objects that already exist
ALWAYS_CALLED = ("forward", "__call__", *CONSTRUCTORS)  # besides the methods behind Python's operators
NEVER_CALLED = (  # special methods for printing, copying and the like
    "__repr__", "__str__", "__format__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__copy__", "__deepcopy__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__getnewargs__",
)  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    state: ScriptState
    sources: tuple[StateSource, ...]  # all sources of values that the function can reach, in the order of the search
    read_sources: tuple[StateSource, ...]  # the sources that its code can read
    codes: tuple[types.CodeType, ...]  # user code that it can run, in the order of the search
    stores: frozenset[str] = frozenset()  # names of globals and attributes that it sets or deletes

    def stored_only(self) -> Iterator[tuple[StateSource, str]]:
        """The values that code sets but does not read, by source and key."""
        read = {(id(one.holder), key) for one in self.read_sources for key in one.read()}
        for one in self.sources:
            if isinstance(one, AttributesSource | SlotsSource | StoredGlobalsSource | StoredClassSource) and not (
                one.of_library or one.counts
            ):
                for key in one.values():
                    if key in self.stores and (id(one.holder), key) not in read:
                        yield one, key


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
    search = _Search(names if names is not None else NameRegistry())
    for name, given in (("model", model), ("optimizer", optimizer)):
        if given is not None:
            search.value(name, given, ItemLocation({name: given}, name))
    for name, argument in passed.items():
        search.value(name, argument, ItemLocation(passed, name))
    with search.within(UNREAD):  # it may grow while other jobs add to it
        for name, held in more.items():
            search.value(name, held, ItemLocation({}, ""))
    search.global_hooks()
    search.function(function, "self")
    search.settle()
    return search.result()


class _Search:
    def __init__(self, names: NameRegistry) -> None:
        self.names = names
        self.seen: dict[int, Any] = {}  # id → the object, kept alive so that its id stays unique
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.schedulers: list[tuple[str, LRScheduler]] = []
        self.scalers: list[tuple[str, torch.amp.GradScaler]] = []
        self.tensors: list[tuple[str, Tensor, TensorLocation]] = []
        self.attributes: dict[str, None] = {}  # names of attributes that code reads, in order
        self.classes: list[type] = [Tensor]  # classes that may have methods in user code
        self.globals: set[str] = set()  # names of globals and closure variables that code reads
        self.namespaces: list[tuple[str, types.ModuleType]] = []
        self.pending: deque[Callable[[], None]] = deque()
        self.holder_id = ROOT  # the id of the object that is being searched
        self.sources: list[tuple[int, StateSource]] = []  # id of an object, and its source
        self.references = ReferenceGraph()
        self.codes: list[types.CodeType] = []
        self.in_library = (
            False  # whether a library's module is searched, all of whose attributes count as read
        )
        self.instantiated: dict[type, None] = {}  # classes that code names and may instantiate
        self.attribute_reads = AttributeReads()
        self.types: dict[int, type] = {}  # id of an object with attributes → its class
        self.owners: dict[types.FunctionType, type] = {}  # method → the class that it belongs to
        self.stores: dict[str, None] = {}  # names of globals and attributes that code sets
        self.written_globals: dict[int, dict[str, Any]] = {}  # globals of functions, by id
        self.constructors: dict[
            type, bool
        ] = {}  # class of objects → whether ``__init__`` was followed

    @contextlib.contextmanager
    def within(self, holder: int) -> Iterator[None]:
        """A context in which values that are found are held by the object with the id ``holder``."""
        before, self.holder_id = self.holder_id, holder
        try:
            yield
        finally:
            self.holder_id = before

    def add_reference(self, thing: Any, attribute: str | None) -> None:
        """Note that the current object holds a thing, read by this attribute; None: it is read in any case."""
        self.references.add(self.holder_id, thing, attribute)

    def first_visit(self, thing: Any) -> bool:
        if id(thing) in self.seen:
            return False
        self.seen[id(thing)] = thing
        return True

    # -- functions ---------------------------------------------------------------------------------

    def function(self, function: Any, self_name: str = "self", owner: type | None = None, root: int = ROOT) -> None:
        """Follow a callable.

        ``owner`` is the class whose method it is.  ``root`` is ``UNREAD`` if its reads do not count.
        """
        if isinstance(function, types.MethodType):
            self.value(self_name, function.__self__, ItemLocation({}, ""))
            made = function.__self__ if isinstance(function.__self__, type) else type(function.__self__)
            self.function(function.__func__, owner=made, root=root)
        elif isinstance(function, functools.partial):
            if self.first_visit(function):
                self.function(function.func)
                self.tuple("args", function.args, PartialArgsLocation(function), None)
                self.add_reference(function.keywords, None)
                self.mapping("", function.keywords)
        elif isinstance(function, types.FunctionType):
            if self.first_visit(function):
                own = is_user_file(function.__code__.co_filename)
                if str(function.__module__).startswith("actorflow."):  # under any name that the script has for it
                    self.globals.update((f"{function.__module__}.{function.__name__}", function.__name__))
                follow = self.function_code if own else self.wrapped_by
                if owner is not None:
                    self.owners[function] = owner
                if isinstance(registry := vars(function).get("registry"), types.MappingProxyType):  # singledispatch
                    self.value(f"{function.__name__}.registry", registry, ItemLocation({}, ""))
                if own:
                    self.function_attributes(self_name if owner is None else function.__qualname__, function)
                self.pending.append(functools.partial(self.followed, follow, function, root))
        elif isinstance(function, classmethod):
            self.function(function.__func__, owner=owner, root=root)
        elif isinstance(function, staticmethod):
            self.function(function.__func__, root=root)
        elif isinstance(function, property):
            self.function(function.fget, owner=owner, root=root)
        elif isinstance(function, functools.cached_property | functools.partialmethod):
            self.function(function.func, owner=owner, root=root)
        elif isinstance(function, functools.singledispatchmethod):
            self.value("registry", function.dispatcher.registry, ItemLocation({}, ""))
        elif isinstance(function, CACHE):
            self.value(self_name, function, ItemLocation({}, ""))
        elif _wraps(function):
            self.function(function.__wrapped__)
        elif function is not None and not isinstance(function, types.BuiltinFunctionType):
            self.value(self_name, function, ItemLocation({}, ""))

    def function_attributes(self, path: str, function: types.FunctionType) -> None:
        """Search the attributes that were set on a function."""
        given = vars(function)
        self.add_reference(given, None)
        with self.within(id(given)):
            self.sources.append((id(given), AttributesSource(path, given, whole=False)))
            for name, item in list(given.items()):
                self.value(f"{path}.{name}", item, ItemLocation(given, name), name)

    def followed(self, follow: Callable[[types.FunctionType], None], function: types.FunctionType, root: int) -> None:
        with self.within(root):
            follow(function)

    def wrapped_by(self, function: types.FunctionType) -> None:
        """Follow the functions that a library's function wraps, as ``torch.no_grad()`` and others do."""
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, CALLABLES):
                    self.function(cell.cell_contents)

    def function_code(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.globals.add(name)
            self.add_source(ClosureSource(name, cell))
            try:
                self.value(name, cell.cell_contents, CellLocation(cell))
            except ValueError:  # a variable that the enclosing function has not set yet
                continue
        self.codes.append(function.__code__)
        named = code_names(function)
        self.attributes.update(named.attributes)
        if self.holder_id == ROOT:
            self.attribute_reads.add(named, self.owners.get(function))
        self.stores.update(named.stores)
        self.written_globals[id(function.__globals__)] = function.__globals__
        for name in named.imports:
            self.imported(name, function.__globals__.get("__package__"))
        self.add_source(GlobalsSource("", function.__globals__, named.globals))
        for name in named.globals:
            self.globals.add(name)
            if name in function.__globals__:
                self.value(name, function.__globals__[name], ItemLocation(function.__globals__, name))
        for module, attributes in named.modules.values():
            if not is_user_file(getattr(module, "__file__", None)) and not module.__name__.startswith("actorflow"):
                known = LibrarySource(module.__name__, module, attributes).values()
                flags = {name: value for name, value in known.items() if isinstance(value, (*PLAIN, *FUNCTIONS))}
                for name, value in known.items():
                    if _is_list_of_plain(value):  # sys.argv
                        self.value(f"{module.__name__}.{name}", value, ItemLocation(vars(module), name))
                if flags:
                    self.add_source(LibrarySource(module.__name__, module, flags))
                for name, value in flags.items():
                    if _is_users_function(value):
                        self.function(value, f"{module.__name__}.{name}")
        if "Decimal" in named.attributes or "Decimal" in named.globals:
            self.add_source(DecimalSource("the context of decimal", decimal))
        if named.strings:
            made = [name for name in os.environ if any(word and word in name for word in named.strings)]
            self.add_source(EnvironmentSource("os.environ", os.environ, dict.fromkeys([*named.strings, *made])))
        defaults = function.__defaults__ or ()
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        names = arguments[len(arguments) - len(defaults) :]
        self.add_source(DefaultsSource(function.__name__, function))
        for index, (name, default) in enumerate(zip(names, defaults, strict=True)):
            self.value(name, default, ImmutableItemLocation(AttributeLocation(function, "__defaults__"), index, tuple))
        if function.__kwdefaults__:
            self.add_reference(function.__kwdefaults__, None)
            self.mapping("", function.__kwdefaults__)

    def imported(self, name: str, package: str | None) -> None:
        """Search a module that a function imports, and its parent packages."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            inner = ".".join(parts[:count])
            for full in (inner, f"{package}.{inner}"):
                if isinstance(module := sys.modules.get(full), types.ModuleType):
                    self.value(inner, module, ItemLocation({}, ""))

    def add_source(self, source: StateSource) -> None:
        """Add a source to the object that is being searched, which counts as read whatever attributes code names."""
        self.add_reference(source, None)
        self.sources.append((id(source), source))

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
        if isinstance(value, (*PLAIN, LazyTensor)):
            made: Any = type(value)
            if made not in PLAIN and made is not LazyTensor and is_user_class(made):
                self.classes.append(made)
                self.value_attributes(path, value, attribute)
            return
        if isinstance(value, Tensor):
            self.tensors.append((path, value, place))
            self.tensor_extras(path, value)
            self.add_reference(value, attribute)
            return
        if isinstance(value, tuple):
            self.tuple(path, value, place, attribute)
            return
        if isinstance(value, types.MethodType | types.FunctionType | functools.partial | staticmethod | classmethod):
            self.function(value, path)
            return
        if isinstance(value, BUILTIN_METHODS):
            if not isinstance(value.__self__, type | types.ModuleType | None):
                self.value(path, value.__self__, ItemLocation({}, ""))
            return
        self.add_reference(value, attribute)
        if self.first_visit(value):
            with self.within(id(value)):
                self.holder(path, value, place)

    def value_attributes(self, path: str, value: Any, attribute: str | None) -> None:
        """Search the attributes of a number, string or tuple whose class is the user's."""
        if getattr(value, "__dict__", None) is not None:
            self.add_reference(value, attribute)
            if self.first_visit(value):
                with self.within(id(value)):
                    self.object(path, value)

    def holder(self, path: str, value: Any, place: TensorLocation) -> None:
        """Search an object that is reached for the first time."""
        if isinstance(value, nn.Module):
            self.module(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            inner = unwrap_prepared(path, value)
            if inner is not None:
                self.value(f"{path}.optimizer", inner, AttributeLocation(value, "optimizer"))
                self.sources.append((id(value), AttributesSource(path, vars(value), self.in_library, of_library=True)))
                return
            self.optimizers.append((path, value))
            self.hooks(value)
            if is_user_class(type(value)):  # type: ignore[arg-type]  # it may wrap other optimizers, as SAM does
                self.object(path, value, OPTIMIZER_ATTRIBUTES)
            else:
                self.sources.append((id(value), AttributesSource(path, vars(value), False, of_library=True)))
                self.value(f"{path}.defaults", value.defaults, ItemLocation(vars(value), "defaults"), "defaults")
                for name in ("step", "zero_grad"):  # set on the instance, instead of the methods of its class
                    if name in vars(value):
                        self.value(f"{path}.{name}", vars(value)[name], ItemLocation(vars(value), name), name)
        elif isinstance(value, LRScheduler):
            self.scheduler(path, value)
        elif isinstance(value, torch.amp.GradScaler):
            if value.is_enabled():
                self.scalers.append((path, value))
        elif isinstance(value, Mapping):
            self.mapping(path, value)
            self.container_attributes(path, value)
        elif isinstance(value, list | deque):
            self.container_attributes(path, value)
            self.sources.append((id(value), ItemsSource(path, value)))
            for index, item in enumerate(value):
                self.value(f"{path}.{index}", item, ItemLocation(value, index))
        elif isinstance(value, set | frozenset | weakref.WeakSet):
            self.sources.append((id(value), ItemsSource(path, value)))
            for index, item in enumerate(stable_order(value, self.names.known)):
                if not isinstance(item, Tensor):  # a tensor inside a set cannot be replaced
                    self.value(f"{path}.{index}", item, ItemLocation({}, ""))
        elif isinstance(value, types.ModuleType):
            if value.__name__.startswith("actorflow."):
                self.globals.add(value.__name__)
            if is_user_file(getattr(value, "__file__", None)):
                self.namespaces.append((path, value))
        elif isinstance(value, type):
            if is_user_class(value):
                self.classes.append(value)
                self.instantiated[value] = None
            if is_user_class(type(value)):  # a metaclass
                self.classes.append(type(value))
        elif isinstance(value, tuple(NATIVE)):
            self.sources += [(id(value), made(path, value)) for kind, made in NATIVE.items() if isinstance(value, kind)]
            if is_user_class(type(value)):  # type: ignore[arg-type]  # a class is hashable
                self.object(path, value)
        elif isinstance(value, NAMESPACES) or is_user_class(type(value)):  # type: ignore[arg-type]
            self.object(path, value)
        elif isinstance(value, torch.jit.ScriptFunction):
            self.sources.append((id(value), ScriptSource(path, value)))
        elif isinstance(value, logging.Logger):
            self.sources += [
                (id(value), LogLevelSource(path, value)),
                (id(value), AttributesSource(path, vars(value), False, True)),
            ]
        elif isinstance(value, VIEWS):
            self.value(path, value.mapping, ItemLocation({}, ""))
        elif isinstance(value, CONTAINERS):
            self.sources.append((id(value), AttributesSource(path, vars(value), True)))
            for name, item in list(vars(value).items()):
                self.value(f"{path}.{name}", item, ItemLocation(vars(value), name))
        elif isinstance(value, SynchronizedBase):
            self.value(path, value.get_obj(), ItemLocation({}, ""))
        elif isinstance(value, contextvars.ContextVar):
            self.sources.append((id(value), ContextVarSource(path, value)))
            self.value(path, value.get(None), ItemLocation({}, ""))
        elif isinstance(value, weakref.ReferenceType):
            self.value(f"{path}()", value(), ItemLocation({}, ""))
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            said = dict.fromkeys(part for name in value.__reduce__()[1] for part in str(name).split("."))
            self.attributes.update(said)
            self.attribute_reads.add_names(said)
        elif isinstance(value, CACHE):
            self.sources.append((id(value), CacheSource(path, value)))
            if (table := cache_table(value)) is not None:
                self.value(f"the cache of {path}", table, ItemLocation({}, ""))
            self.function(value.__wrapped__, path)
        elif _wraps(value):
            self.function(value.__wrapped__, path)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self.library_object(path, value)

    def library_object(self, path: str, value: Any) -> None:
        """Search an object of a library; of its attributes only native objects, lists and dictionaries are followed.

        Code names the attributes that it reads, unless the class computes attributes or items from others, as a
        configuration does.  Then objects of the same library in its attributes are followed too.
        """
        makes = hasattr(type(value), "__getattr__") or isinstance(value, Sequence)
        makes = makes and _package(value) not in LOGGING_LIBRARIES
        self.sources.append((id(value), AttributesSource(path, vars(value), self.in_library or makes, of_library=True)))
        if hasattr(type(value), "__len__"):
            self.sources.append((id(value), LengthSource(path, value)))
        before = len(self.sources)
        for name, item in list(vars(value).items()):
            kin = makes and _package(item) == _package(value)
            if kin or isinstance(item, (*NATIVE, list, dict)):
                self.value(f"{path}.{name}", item, ItemLocation(vars(value), name), None if makes else name)
        for _, one in self.sources[before:] if not makes else ():
            one.of_library = True

    def tensor_extras(self, path: str, tensor: Tensor) -> None:
        """Follow a tensor's hooks, and the attributes that the script has given it."""
        self.hooks(tensor)
        given = attributes_given(tensor)
        if given and self.first_visit(tensor):
            with self.within(id(tensor)):
                for name, item in given.items():
                    self.value(f"{path}.{name}", item, AttributeLocation(tensor, name))

    def global_hooks(self) -> None:
        """Follow the global hooks of modules and of optimizers."""
        for path, kept in module_hooks().items():
            self.add_source(MappingSource(path, kept))
        self.add_source(StepHooksSource("the hooks of all optimizers", None))
        for kept in (*module_hooks().values(), users_step_hooks()):
            for hook in kept.values():
                self.function(hook)

    def hooks(self, thing: Any) -> None:
        """Follow the hooks of a tensor or an optimizer."""
        for kind in hooks_of(thing).values():
            for hook in kind:
                self.function(hook)

    def tuple(self, path: str, value: tuple[Any, ...], place: TensorLocation, attribute: str | None) -> None:
        if type(value) is not tuple and is_user_class(type(value)):
            self.classes.append(type(value))
            self.value_attributes(path, value, attribute)
        rebuild: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
        for index, item in enumerate(value):
            self.value(f"{path}.{index}", item, ImmutableItemLocation(place, index, rebuild), attribute)

    def mapping(self, path: str, value: Mapping[Any, Any]) -> None:
        self.sources.append((id(value), MappingSource(path, value)))
        if isinstance(value, collections.defaultdict):
            self.sources.append((id(value), SlotsSource(path, value, ["default_factory"])))
            self.function(value.default_factory)
        handles = path.rpartition(".")[2] in HOOKS  # keys are handles, which every rank numbers by itself
        for index, (key, item) in enumerate(value.items()):
            name = key if isinstance(key, str | int) and not handles else index
            self.value(f"{path}.{name}" if path else str(name), item, ItemLocation(value, key))
        for key in [*value]:
            if isinstance(key, Tensor):
                if isinstance(value, dict):
                    self.value(path, key, KeyLocation(value, key))
            elif not isinstance(key, PLAIN):
                self.value(path, key, ItemLocation({}, ""))

    def object(self, path: str, value: Any, but: Container[str] = ()) -> None:
        """Search an object's attributes, except those in ``but``."""
        self.classes.append(type(value))
        self.types[id(value)] = type(value)
        if is_user_class(type(value)):  # type: ignore[arg-type]  # a class is hashable
            self.sources.append((id(value), TypeSource(path, value)))
        own = getattr(value, "__dict__", {})
        bases: tuple[Any, ...] = type(value).__mro__
        whole = is_user_class(bases[0]) and not all(map(_is_readable, bases))
        self.sources.append((id(value), AttributesSource(path, own, whole)))
        for name, item in list(own.items()):
            if name not in but and name != BESIDE:
                self.value(f"{path}.{name}", item, ItemLocation(own, name), None if whole else name)
        slots = [name for base in type(value).__mro__ for name in _slot_names(base)]
        if slots:
            self.sources.append((id(value), SlotsSource(path, value, slots)))
        for name in slots:
            if hasattr(value, name):
                self.value(f"{path}.{name}", getattr(value, name), AttributeLocation(value, name), name)
        if _wraps(value):
            self.function(value.__wrapped__, path)

    def scheduler(self, path: str, value: LRScheduler) -> None:
        """Search a learning-rate scheduler, except for the numbers that it counts."""
        self.schedulers.append((path, value))
        self.classes.append(type(value))
        self.types[id(value)] = type(value)
        for name in SCHEDULER_METHODS:
            self.method(type(value), name, id(value))
        for name, item in list(vars(value).items()):
            if name != "optimizer" and not has_numbers(item):
                self.value(f"{path}.{name}", item, ItemLocation(vars(value), name), None)

    def container_attributes(self, path: str, value: Any) -> None:
        """Search the attributes of a container whose class is the user's."""
        if is_user_class(type(value)):  # type: ignore[arg-type]  # a class is hashable
            self.object(path, value)

    def module(self, path: str, root: nn.Module) -> None:
        refuse_unsupported(path, root)
        self.modules.append((path, root))
        give_ranges_sizes(root.modules())
        for prefix, module in root.named_modules():
            self.first_visit(module)
            self.classes.append(type(module))
            self.types[id(module)] = type(module)
            where = f"{path}.{prefix}" if prefix else path
            whole = any(_is_library_module(owner) for owner in type(module).__mro__)
            self.add_reference(module, None)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.tensor_extras(f"{where}.{name}", tensor)
            script = isinstance(module, torch.jit.ScriptModule)
            own = ScriptSource(where, module) if script else ModuleSource(where, vars(module), whole)
            held: list[StateSource] = [own, HooksSource(where, module)]
            held += [MappingSource(where, getattr(module, name), dots=True) for name in OWN_DICTS]
            self.sources += [(id(module), source) for source in held]
            if isinstance(own, ScriptSource):
                for name, at, tensor in own.tensors():
                    place = ScriptAttributeLocation(own.program, name)
                    inner = f"{where}.{name}" if at < 0 else f"{where}.{name}.{at}"
                    self.value(inner, tensor, place if at < 0 else ScriptListLocation(place, at))
                continue
            before, self.in_library = self.in_library, whole
            with self.within(id(module)):
                for name, item in list(module.__dict__.items()):
                    if name not in OWN_DICTS and name != BESIDE:
                        self.value(
                            f"{where}.{name}", item, ItemLocation(module.__dict__, name), None if whole else name
                        )
            self.in_library = before

    # -- the end -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Follow functions, and the methods and module attributes that code names, until nothing new is found."""
        followed: set[tuple[int, str]] = set()
        while True:
            while self.pending:
                self.pending.popleft()()
            before = len(followed)
            for owner in list(self.classes):
                for name in [*ALWAYS_CALLED, *_operator_methods(owner), *self.attributes]:
                    if (id(owner), name) not in followed:
                        if name in CONSTRUCTORS and owner not in self.instantiated:
                            self.constructors.setdefault(owner, False)
                            continue
                        followed.add((id(owner), name))
                        self.method(owner, name)
                        if name == "__subclasses__":
                            self.subclasses(owner)
            for path, namespace in list(self.namespaces):
                for name in [*self.attributes, "__getattr__"]:
                    if (id(namespace), name) not in followed:
                        followed.add((id(namespace), name))
                        if name in namespace.__dict__:
                            self.add_source(GlobalsSource(path, namespace.__dict__, [name]))
                            self.value(
                                f"{path}.{name}", namespace.__dict__[name], ItemLocation(namespace.__dict__, name)
                            )
            if len(followed) == before and not self.pending:
                left = [owner for owner, done in self.constructors.items() if not done]
                if not left:
                    break
                for owner in left:  # searched for state only: their reads do not count
                    self.constructors[owner] = True
                    for name in CONSTRUCTORS:
                        self.method(owner, name, UNREAD)
        for path, scheduler in self.schedulers:
            if self.first_visit(scheduler.optimizer):
                self.optimizers.append((f"{path}.optimizer", scheduler.optimizer))

    def method(self, owner: type, name: str, root: int = ROOT) -> None:
        """Follow the attribute of this name in a class and in its bases, which ``super()`` may call."""
        users = [base for base in owner.__mro__ if is_user_class(base)]
        if not any(name in base.__dict__ for base in owner.__mro__):
            return
        for base in owner.__mro__[:-1] if name not in CONSTRUCTORS else ():  # all but ``object``
            if base not in users and isinstance(found := base.__dict__.get(name), (*PLAIN, types.FunctionType)):
                with self.within(root):
                    self.add_source(ClassSource(base.__name__, base, [name]))
                if _is_users_function(found):
                    self.function(found, owner=base, root=root)
        for base in users:  # also classes without the name: they may get it later
            with self.within(root):
                self.add_source(ClassSource(base.__name__, base, [name]))
            if name in base.__dict__:
                found = base.__dict__[name]
                described = isinstance(found, METHODS) or hasattr(type(found), "__get__")  # a slot, for example
                own = is_user_class(type(found))  # type: ignore[arg-type]  # a user's descriptor: its methods compute what is read
                if (own or not described) and not name.startswith("__"):
                    with self.within(root):
                        self.value(f"{base.__name__}.{name}", found, ClassAttributeLocation(base, name))
                if isinstance(found, METHODS) or _wraps(found):
                    self.function(found, owner=base, root=root)

    def subclasses(self, owner: type) -> None:
        """Follow the subclasses of a class and of its bases."""
        for base in filter(is_user_class, owner.__mro__):
            made: list[type] = type.__subclasses__(base)  # a metaclass does not have it as a method
            with self.within(ROOT):
                self.add_source(SubclassesSource(base.__name__, base))
                for one in made:
                    self.value(one.__name__, one, ItemLocation({}, ""))

    def result(self) -> SearchResult:
        """The state that was found, and its sources."""
        state = self.state()
        reached = self.references.reached(lambda holder: self.attribute_reads.of_class(self.types.get(holder)))
        for name, optimizer in state.optimizers.items():
            self.sources.append((ROOT, HooksSource(name, optimizer)))
            for g, group in enumerate(optimizer.param_groups):
                self.sources.append((ROOT, ItemsSource(f"{name}.param_groups[{g}]['params']", group["params"])))
                by_code = (
                    ROOT if "param_groups" in self.attribute_reads else UNREAD
                )  # otherwise its values are inputs of each call
                self.sources.append(
                    (by_code, ParamGroupSource(f"{name}.param_groups[{g}]", group, is_fused(optimizer)))
                )
        for path, scheduler in self.schedulers:
            self.sources.append((id(scheduler), SchedulerSource(path, vars(scheduler))))
        for held in state.held.values():
            by = id(held.tensor) if id(held.tensor) in reached else ROOT
            self.sources += [
                (by, HooksSource(held.name, held.tensor)),
                (by, TensorAttributesSource(held.name, held.tensor)),
            ]
        for namespace in self.written_globals.values():
            self.sources.append((UNREAD, StoredGlobalsSource("", namespace, self.stores)))
        for path, module in self.namespaces:
            self.sources.append((UNREAD, StoredGlobalsSource(path, module.__dict__, self.stores)))
        for owner in dict.fromkeys(base for made in self.classes for base in made.__mro__ if is_user_class(base)):
            self.sources.append((UNREAD, StoredClassSource(owner.__name__, owner, self.stores)))
        apart = {(type(one), id(one.holder), one.names): (thing, one) for thing, one in self.sources[::-1]}
        sources = [*apart.values()][::-1]
        for thing, one in sources:
            one.reads = self.attribute_reads.of_class(self.types.get(thing))
        read = tuple(_merge_named([one for thing, one in sources if thing in reached]))
        return SearchResult(state, tuple(one for _, one in sources), read, tuple(self.codes), frozenset(self.stores))

    def state(self) -> ScriptState:
        """The state that was found, by name."""
        looks_at_steps = self.attribute_reads.of_any_object("state", "state_dict")
        named = frozenset(self.globals.union(self.attributes))
        naming = StateNaming(self.names, ScriptState(named=named, looks_at_steps=looks_at_steps))
        naming.modules(self.modules)
        naming.tensors(self.tensors)
        naming.scalers(self.scalers)
        naming.optimizers(self.optimizers)
        return naming.state


def _merge_named(sources: Sequence[StateSource]) -> Iterator[StateSource]:
    """The sources, merging those of the same holder that differ only in names."""
    names: dict[tuple[str, int], dict[str, None]] = {}
    for one in sources:
        if isinstance(one, GlobalsSource | ClassSource | LibrarySource):
            names.setdefault((one.path, id(one.holder)), {}).update(dict.fromkeys(one.names))
    for one in sources:
        if not isinstance(one, GlobalsSource | ClassSource | LibrarySource):
            yield one
        elif found := names.pop((one.path, id(one.holder)), None):
            yield type(one)(one.path, one.holder, found)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _is_list_of_plain(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MANY and all(isinstance(item, PLAIN) for item in value)


def _wraps(value: Any) -> bool:
    """Whether a function is wrapped; looked up statically, because some objects create any attribute on access."""
    return inspect.getattr_static(value, "__wrapped__", None) is not None


def _operator_methods(owner: type) -> Iterator[str]:
    """The special methods of a class in user code that Python's operators and statements call."""
    for base in owner.__mro__:
        if is_user_class(base):
            for name, method in base.__dict__.items():
                special = name.startswith("__") and name.endswith("__") and name not in (*CONSTRUCTORS, *NEVER_CALLED)
                if not special or not isinstance(method, types.FunctionType):
                    continue
                if method.__code__.co_filename != "<string>":  # generated by dataclasses
                    yield name


def _slot_names(owner: type) -> Iterator[str]:
    """The names in a class's ``__slots__``, mangled as Python mangles private names."""
    slots = owner.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if name.startswith("__") and not name.endswith("__"):
            yield f"_{owner.__name__.lstrip('_')}{name}"  # a private name, which Python mangles
        elif name not in ("__dict__", "__weakref__"):
            yield name


def _is_readable(owner: Any) -> bool:
    """Whether the search sees everything that the methods of a class read of its objects."""
    return is_user_class(owner) or owner.__module__ in ("builtins", "abc", "typing", "collections.abc", "enum")


def _is_library_module(owner: Any) -> bool:
    """Whether a module's class is a library's, whose methods read attributes that the user's code need not name."""
    return issubclass(owner, nn.Module) and owner is not nn.Module and not is_user_class(owner)


def _is_users_function(value: Any) -> bool:
    """Whether a value in a library is a function of the user, which the script has put there."""
    return isinstance(value, types.FunctionType) and is_user_file(value.__code__.co_filename)
