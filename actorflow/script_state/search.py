"""Search for all state that a job's function can reach: modules, optimizers, tensors, and Python values.

The search follows what the function closes over, the globals it names, its defaults, ``self``, and the
functions and methods of the user's own code that it calls.  It finds the same on every rank.
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
    ScriptTensorLocation,
    TensorLocation,
)
from actorflow.standins.owned_tensor import DetachedTensor, OwnedTensor
from actorflow_compiler.capture.optimizer_state import is_fused
from actorflow_compiler.core.expressions import has_numbers
from actorflow_compiler.core.torch_internals import HOOKS, hooks_of, module_hooks, scaler_state, users_step_hooks
from actorflow_compiler.substitutes.observers import give_ranges_sizes
from actorflow_compiler.values.variables import ScriptState, StateTensor, attributes_given

__all__ = ["SearchResult", "find_state", "search_script"]

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
METHODS = (
    types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools.partialmethod,
    functools.singledispatchmethod,
)  # fmt: skip
OF_OPTIMIZERS = ("param_groups", "state", "defaults")  # attributes that are followed otherwise
STEPPING = ("step", "get_lr", "_get_closed_form_lr")  # methods of schedulers
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
CONTAINERS = (  # of libraries: all that they have is looked at
    collections.UserList, collections.UserString, queue.Queue, threading.Event, Distribution, Dataset,
)  # fmt: skip
NUMBER_OF_C: Any = ctypes.c_int.__base__
NATIVE: dict[Any, Callable[[str, Any], StateSource]] = {  # what has more than Python's attributes
    **dict.fromkeys((random.Random, np.random.Generator, np.random.RandomState, torch.Generator), GeneratorSource),
    **dict.fromkeys((np.ndarray, np.void, bytearray, array.array, memoryview), ArraySource),
    **dict.fromkeys((ctypes.Array, ctypes.Structure, ctypes.Union, NUMBER_OF_C), ArraySource),
    **dict.fromkeys((io.StringIO, io.BytesIO), MemoryFileSource),
}
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
BOUND = (types.BuiltinMethodType, types.MethodWrapperType)  # methods of what is written in C: ``table.get``
WRITE_DOWN = frozenset(("logging", "mlflow", "rich", "tensorboardX", "tqdm", "unittest", "wandb"))  # what happens, only
MANY = 1000  # items of a list of a library, of which more are let alone
CACHE = type(functools.cache(id))
ROOT, UNREAD = 0, -1  # what code reads, and what it does not, as holders; ids of things are others
MAKING = ("__init__", "__new__")  # of objects that are there they are not called
ALWAYS_CALLED = ("forward", "__call__", *MAKING)  # and methods by which Python's operators work
UNCALLED = (  # of those: by which it prints, copies and ends things
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
    """Everything of the script's state that ``function`` can reach.

    ``model`` and ``optimizer`` (one, a list or a dictionary of them) are taken as well and named
    ``model``, ``model.0`` and so on.  Parameters and buffers are named by their root module's variable
    and their qualified name, other tensors by their variable.  ``names`` carries the names that
    earlier searches gave, and ``more`` what the job holds besides, by the names that are wanted for it.
    """
    return search_script(function, model, optimizer, names, more).state


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found."""

    state: ScriptState
    looked: tuple[StateSource, ...]  # what holds the values that the function can reach, in the order of the search
    read: tuple[StateSource, ...]  # those of them that it can read
    codes: tuple[types.CodeType, ...]  # the user's own that it can run, in the order of the search
    stores: frozenset[str] = frozenset()  # globals and attributes that it sets or deletes, by name

    def only_set(self) -> Iterator[tuple[StateSource, str]]:
        """What code sets and does not read: what holds it, by key."""
        read = {(id(one.holder), key) for one in self.read for key in one.read()}
        for one in self.looked:
            if isinstance(one, AttributesSource | SlotsSource | StoredGlobalsSource | StoredClassSource) and not (
                one.foreign or one.counts
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
    """As ``find_state``, with all sources of values that the function can reach; ``passed`` are arguments of a call."""
    search = _Search(names if names is not None else NameRegistry())
    for name, given in (("model", model), ("optimizer", optimizer)):
        if given is not None:
            search.value(name, given, ItemLocation({name: given}, name))
    for name, argument in passed.items():
        search.value(name, argument, ItemLocation(passed, name))
    with search.within(UNREAD):  # it may grow as other jobs need more of it
        for name, held in more.items():
            search.value(name, held, ItemLocation({}, ""))
    search.hooks_of_all()
    search.function(function, "self")
    search.settle()
    return search.found()


class _Search:
    def __init__(self, names: NameRegistry) -> None:
        self.names = names
        self.seen: dict[int, Any] = {}  # id → the thing, kept alive so that ids stay its own
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.schedulers: list[tuple[str, LRScheduler]] = []
        self.scalers: list[tuple[str, torch.amp.GradScaler]] = []
        self.tensors: list[tuple[str, Tensor, TensorLocation]] = []
        self.attributes: dict[str, None] = {}  # names that code reads from objects, in order
        self.classes: list[type] = [Tensor]  # which may have methods of the user's
        self.globals: set[str] = set()  # names of globals, and of enclosing functions' variables, that code reads
        self.namespaces: list[tuple[str, types.ModuleType]] = []
        self.pending: deque[Callable[[], None]] = deque()
        self.inside = ROOT  # the holder that is looked into
        self.looked: list[tuple[int, StateSource]] = []  # the id of a thing, and it as a holder
        self.ways: dict[int, dict[tuple[str | None, int], None]] = {}  # a holder → (by which attribute, what it holds)
        self.codes: list[types.CodeType] = []
        self.library = False  # whether what is looked into is a module of a library, all of whose attributes are read
        self.made: dict[type, None] = {}  # classes that code names, and may make objects of
        self.own: dict[type, dict[str, None]] = {}  # class → attributes that its methods read of ``self``
        self.others: dict[str, None] = {"forward": None}  # attributes that code reads of anything else
        self.any = False  # whether code reads attributes that it does not name
        self.types: dict[int, type] = {}  # of objects that hold something
        self.reads: dict[type | None, frozenset[str]] = {}  # class → attributes that code reads of its objects
        self.owners: dict[types.FunctionType, type] = {}  # of methods
        self.stores: dict[str, None] = {}  # globals and attributes that code sets
        self.written: dict[int, dict[str, Any]] = {}  # globals of functions, by their id
        self.objects: dict[type, bool] = {}  # classes of objects that are there → whether their making was followed

    @contextlib.contextmanager
    def within(self, holder: int) -> Iterator[None]:
        """In which what is found is what ``holder`` holds."""
        before, self.inside = self.inside, holder
        try:
            yield
        finally:
            self.inside = before

    def way(self, thing: Any, attribute: str | None) -> None:
        """Note that what is looked into holds the thing, where code reads it by this attribute; None: in any case."""
        self.ways.setdefault(self.inside, {})[attribute, id(thing)] = None

    def once(self, thing: Any) -> bool:
        if id(thing) in self.seen:
            return False
        self.seen[id(thing)] = thing
        return True

    # -- functions ---------------------------------------------------------------------------------

    def function(self, function: Any, self_name: str = "self", owner: type | None = None, root: int = ROOT) -> None:
        """Follow one callable; ``owner`` is the class whose method it is, ``root`` what it is read by."""
        if isinstance(function, types.MethodType):
            self.value(self_name, function.__self__, ItemLocation({}, ""))
            made = function.__self__ if isinstance(function.__self__, type) else type(function.__self__)
            self.function(function.__func__, owner=made, root=root)
        elif isinstance(function, functools.partial):
            if self.once(function):
                self.function(function.func)
                self.tuple("args", function.args, PartialArgsLocation(function), None)
                self.way(function.keywords, None)
                self.mapping("", function.keywords)
        elif isinstance(function, types.FunctionType):
            if self.once(function):
                own = is_user_file(function.__code__.co_filename)
                if str(function.__module__).startswith("actorflow."):  # under whatever name the script has it
                    self.globals.update((f"{function.__module__}.{function.__name__}", function.__name__))
                follow = self.code if own else self.wrapped_by
                if owner is not None:
                    self.owners[function] = owner
                if isinstance(registry := vars(function).get("registry"), types.MappingProxyType):  # singledispatch
                    self.value(f"{function.__name__}.registry", registry, ItemLocation({}, ""))
                if own:
                    self.of_function(self_name if owner is None else function.__qualname__, function)
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

    def of_function(self, path: str, function: types.FunctionType) -> None:
        """Look at the attributes that somebody has given a function."""
        given = vars(function)
        self.way(given, None)
        with self.within(id(given)):
            self.looked.append((id(given), AttributesSource(path, given, whole=False)))
            for name, item in list(given.items()):
                self.value(f"{path}.{name}", item, ItemLocation(given, name), name)

    def followed(self, follow: Callable[[types.FunctionType], None], function: types.FunctionType, root: int) -> None:
        with self.within(root):
            follow(function)

    def wrapped_by(self, function: types.FunctionType) -> None:
        """Follow what a function of a library was made from: ``torch.no_grad()`` and the like wrap functions."""
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, CALLABLES):
                    self.function(cell.cell_contents)

    def code(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.globals.add(name)
            self.looks(ClosureSource(name, cell))
            try:
                self.value(name, cell.cell_contents, CellLocation(cell))
            except ValueError:  # a name that the enclosing function has not set yet
                continue
        self.codes.append(function.__code__)
        named = code_names(function)
        self.attributes.update(named.attributes)
        if self.inside == ROOT:
            owner = self.owners.get(function)
            (self.others if owner is None else self.own.setdefault(owner, {})).update(named.own)
            self.others.update(named.others)
            self.any = self.any or named.any
        self.stores.update(named.stores)
        self.written[id(function.__globals__)] = function.__globals__
        for name in named.imports:
            self.imported(name, function.__globals__.get("__package__"))
        self.looks(GlobalsSource("", function.__globals__, named.globals))
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
                    self.looks(LibrarySource(module.__name__, module, flags))
                for name, value in flags.items():
                    if _put_in(value):
                        self.function(value, f"{module.__name__}.{name}")
        if "Decimal" in named.attributes or "Decimal" in named.globals:
            self.looks(DecimalSource("the context of decimal", decimal))
        if named.strings:
            made = [name for name in os.environ if any(word and word in name for word in named.strings)]
            self.looks(EnvironmentSource("os.environ", os.environ, dict.fromkeys([*named.strings, *made])))
        defaults = function.__defaults__ or ()
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        names = arguments[len(arguments) - len(defaults) :]
        self.looks(DefaultsSource(function.__name__, function))
        for index, (name, default) in enumerate(zip(names, defaults, strict=True)):
            self.value(name, default, ImmutableItemLocation(AttributeLocation(function, "__defaults__"), index, tuple))
        if function.__kwdefaults__:
            self.way(function.__kwdefaults__, None)
            self.mapping("", function.__kwdefaults__)

    def imported(self, name: str, package: str | None) -> None:
        """Look at a module that a function imports, and at those that it is in."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            inner = ".".join(parts[:count])
            for full in (inner, f"{package}.{inner}"):
                if isinstance(module := sys.modules.get(full), types.ModuleType):
                    self.value(inner, module, ItemLocation({}, ""))

    def looks(self, looked: StateSource) -> None:
        """Note a holder that what is looked into has, in any case."""
        self.way(looked, None)
        self.looked.append((id(looked), looked))

    # -- values ------------------------------------------------------------------------------------

    def value(self, path: str, value: Any, place: TensorLocation, attribute: str | None = None) -> None:
        """Look at one value that was reached by ``path`` and is held at ``place``, by ``attribute`` if it is one."""
        if type(value) in weakref.ProxyTypes:
            value = value.__init__.__self__  # what it stands for
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
                self.given(path, value, attribute)
            return
        if isinstance(value, Tensor):
            self.tensors.append((path, value, place))
            self.of_tensor(path, value)
            self.way(value, attribute)
            return
        if isinstance(value, tuple):
            self.tuple(path, value, place, attribute)
            return
        if isinstance(value, types.MethodType | types.FunctionType | functools.partial | staticmethod | classmethod):
            self.function(value, path)
            return
        if isinstance(value, BOUND):
            if not isinstance(value.__self__, type | types.ModuleType | None):
                self.value(path, value.__self__, ItemLocation({}, ""))
            return
        self.way(value, attribute)
        if self.once(value):
            with self.within(id(value)):
                self.holder(path, value, place)

    def given(self, path: str, value: Any, attribute: str | None) -> None:
        """Look at the attributes that a value of a class of the user's has besides: a number, a text, a tuple."""
        if getattr(value, "__dict__", None) is not None:
            self.way(value, attribute)
            if self.once(value):
                with self.within(id(value)):
                    self.object(path, value)

    def holder(self, path: str, value: Any, place: TensorLocation) -> None:
        """Look into what is reached for the first time."""
        if isinstance(value, nn.Module):
            self.module(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            inner = unwrap_prepared(path, value)
            if inner is not None:
                self.value(f"{path}.optimizer", inner, AttributeLocation(value, "optimizer"))
                self.looked.append((id(value), AttributesSource(path, vars(value), self.library, foreign=True)))
                return
            self.optimizers.append((path, value))
            self.hooks(value)
            if is_user_class(type(value)):  # type: ignore[arg-type]  # it may hold others, as SAM does
                self.object(path, value, OF_OPTIMIZERS)
            else:
                self.looked.append((id(value), AttributesSource(path, vars(value), False, foreign=True)))
                self.value(f"{path}.defaults", value.defaults, ItemLocation(vars(value), "defaults"), "defaults")
                for name in ("step", "zero_grad"):  # of its own, in the place of those of its class
                    if name in vars(value):
                        self.value(f"{path}.{name}", vars(value)[name], ItemLocation(vars(value), name), name)
        elif isinstance(value, LRScheduler):
            self.scheduler(path, value)
        elif isinstance(value, torch.amp.GradScaler):
            if value.is_enabled():
                self.scalers.append((path, value))
        elif isinstance(value, Mapping):
            self.mapping(path, value)
            self.attributes_of(path, value)
        elif isinstance(value, list | deque):
            self.attributes_of(path, value)
            self.looked.append((id(value), ItemsSource(path, value)))
            for index, item in enumerate(value):
                self.value(f"{path}.{index}", item, ItemLocation(value, index))
        elif isinstance(value, set | frozenset | weakref.WeakSet):
            self.looked.append((id(value), ItemsSource(path, value)))
            for index, item in enumerate(stable_order(value, self.names.known)):
                if not isinstance(item, Tensor):  # tensors cannot be exchanged inside a set
                    self.value(f"{path}.{index}", item, ItemLocation({}, ""))
        elif isinstance(value, types.ModuleType):
            if value.__name__.startswith("actorflow."):
                self.globals.add(value.__name__)
            if is_user_file(getattr(value, "__file__", None)):
                self.namespaces.append((path, value))
        elif isinstance(value, type):
            if is_user_class(value):
                self.classes.append(value)
                self.made[value] = None
            if is_user_class(type(value)):  # a metaclass
                self.classes.append(type(value))
        elif isinstance(value, tuple(NATIVE)):
            self.looked += [(id(value), made(path, value)) for kind, made in NATIVE.items() if isinstance(value, kind)]
            if is_user_class(type(value)):  # type: ignore[arg-type]  # a class is hashable
                self.object(path, value)
        elif isinstance(value, NAMESPACES) or is_user_class(type(value)):  # type: ignore[arg-type]
            self.object(path, value)
        elif isinstance(value, torch.jit.ScriptFunction):
            self.looked.append((id(value), ScriptSource(path, value)))
        elif isinstance(value, logging.Logger):
            self.looked += [
                (id(value), LogLevelSource(path, value)),
                (id(value), AttributesSource(path, vars(value), False, True)),
            ]
        elif isinstance(value, VIEWS):
            self.value(path, value.mapping, ItemLocation({}, ""))
        elif isinstance(value, CONTAINERS):
            self.looked.append((id(value), AttributesSource(path, vars(value), True)))
            for name, item in list(vars(value).items()):
                self.value(f"{path}.{name}", item, ItemLocation(vars(value), name))
        elif isinstance(value, SynchronizedBase):
            self.value(path, value.get_obj(), ItemLocation({}, ""))
        elif isinstance(value, contextvars.ContextVar):
            self.looked.append((id(value), ContextVarSource(path, value)))
            self.value(path, value.get(None), ItemLocation({}, ""))
        elif isinstance(value, weakref.ReferenceType):
            self.value(f"{path}()", value(), ItemLocation({}, ""))
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            said = dict.fromkeys(part for name in value.__reduce__()[1] for part in str(name).split("."))
            self.attributes.update(said)
            self.others.update(said)
        elif isinstance(value, CACHE):
            self.looked.append((id(value), CacheSource(path, value)))
            if (table := cache_table(value)) is not None:
                self.value(f"the cache of {path}", table, ItemLocation({}, ""))
            self.function(value.__wrapped__, path)
        elif _wraps(value):
            self.function(value.__wrapped__, path)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self.librarys(path, value)

    def librarys(self, path: str, value: Any) -> None:
        """Look at an object of a library: objects that it holds are not followed, but for those of a configuration.

        Code names what it reads of an object, unless that makes attributes or items of what it holds.
        """
        makes = hasattr(type(value), "__getattr__") or isinstance(value, Sequence)
        makes = makes and _package(value) not in WRITE_DOWN
        self.looked.append((id(value), AttributesSource(path, vars(value), self.library or makes, foreign=True)))
        if hasattr(type(value), "__len__"):
            self.looked.append((id(value), LengthSource(path, value)))
        before = len(self.looked)
        for name, item in list(vars(value).items()):
            kin = makes and _package(item) == _package(value)
            if kin or isinstance(item, (*NATIVE, list, dict)):
                self.value(f"{path}.{name}", item, ItemLocation(vars(value), name), None if makes else name)
        for _, one in self.looked[before:] if not makes else ():
            one.foreign = True

    def of_tensor(self, path: str, tensor: Tensor) -> None:
        """Follow a tensor's hooks, and look at the attributes that somebody has given it."""
        self.hooks(tensor)
        given = attributes_given(tensor)
        if given and self.once(tensor):
            with self.within(id(tensor)):
                for name, item in given.items():
                    self.value(f"{path}.{name}", item, AttributeLocation(tensor, name))

    def hooks_of_all(self) -> None:
        """Look at the hooks of all modules and optimizers."""
        for path, kept in module_hooks().items():
            self.looks(MappingSource(path, kept))
        self.looks(StepHooksSource("the hooks of all optimizers", None))
        for kept in (*module_hooks().values(), users_step_hooks()):
            for hook in kept.values():
                self.function(hook)

    def hooks(self, thing: Any) -> None:
        """Follow what runs with a tensor's gradient or an optimizer's step."""
        for kind in hooks_of(thing).values():
            for hook in kind:
                self.function(hook)

    def tuple(self, path: str, value: tuple[Any, ...], place: TensorLocation, attribute: str | None) -> None:
        if type(value) is not tuple and is_user_class(type(value)):
            self.classes.append(type(value))
            self.given(path, value, attribute)
        rebuild: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
        for index, item in enumerate(value):
            self.value(f"{path}.{index}", item, ImmutableItemLocation(place, index, rebuild), attribute)

    def mapping(self, path: str, value: Mapping[Any, Any]) -> None:
        self.looked.append((id(value), MappingSource(path, value)))
        if isinstance(value, collections.defaultdict):
            self.looked.append((id(value), SlotsSource(path, value, ["default_factory"])))
            self.function(value.default_factory)
        handles = path.rpartition(".")[2] in HOOKS  # which ranks count by themselves
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
        """Look into an object, but for some attributes."""
        self.classes.append(type(value))
        self.types[id(value)] = type(value)
        if is_user_class(type(value)):  # type: ignore[arg-type]  # a class is hashable
            self.looked.append((id(value), TypeSource(path, value)))
        own = getattr(value, "__dict__", {})
        bases: tuple[Any, ...] = type(value).__mro__
        whole = is_user_class(bases[0]) and not all(map(_is_known, bases))
        self.looked.append((id(value), AttributesSource(path, own, whole)))
        for name, item in list(own.items()):
            if name not in but and name != BESIDE:
                self.value(f"{path}.{name}", item, ItemLocation(own, name), None if whole else name)
        slots = [name for base in type(value).__mro__ for name in _slots(base)]
        if slots:
            self.looked.append((id(value), SlotsSource(path, value, slots)))
        for name in slots:
            if hasattr(value, name):
                self.value(f"{path}.{name}", getattr(value, name), AttributeLocation(value, name), name)
        if _wraps(value):
            self.function(value.__wrapped__, path)

    def scheduler(self, path: str, value: LRScheduler) -> None:
        """Look into a scheduler of learning rates, but for what it counts itself."""
        self.schedulers.append((path, value))
        self.classes.append(type(value))
        self.types[id(value)] = type(value)
        for name in STEPPING:
            self.method(type(value), name, id(value))
        for name, item in list(vars(value).items()):
            if name != "optimizer" and not has_numbers(item):
                self.value(f"{path}.{name}", item, ItemLocation(vars(value), name), None)

    def attributes_of(self, path: str, value: Any) -> None:
        """Look into a container of a class of the user's, which may have attributes."""
        if is_user_class(type(value)):  # type: ignore[arg-type]  # a class is hashable
            self.object(path, value)

    def module(self, path: str, root: nn.Module) -> None:
        refuse_unsupported(path, root)
        self.modules.append((path, root))
        give_ranges_sizes(root.modules())
        for prefix, module in root.named_modules():
            self.once(module)
            self.classes.append(type(module))
            self.types[id(module)] = type(module)
            where = f"{path}.{prefix}" if prefix else path
            whole = any(_is_librarys(owner) for owner in type(module).__mro__)
            self.way(module, None)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.of_tensor(f"{where}.{name}", tensor)
            script = isinstance(module, torch.jit.ScriptModule)
            own = ScriptSource(where, module) if script else ModuleSource(where, vars(module), whole)
            held: list[StateSource] = [own, HooksSource(where, module)]
            held += [MappingSource(where, getattr(module, name), dots=True) for name in OWN_DICTS]
            self.looked += [(id(module), looked) for looked in held]
            if isinstance(own, ScriptSource):
                for name, at, tensor in own.tensors():
                    place = ScriptAttributeLocation(own.program, name)
                    inner = f"{where}.{name}" if at < 0 else f"{where}.{name}.{at}"
                    self.value(inner, tensor, place if at < 0 else ScriptListLocation(place, at))
                continue
            before, self.library = self.library, whole
            with self.within(id(module)):
                for name, item in list(module.__dict__.items()):
                    if name not in OWN_DICTS and name != BESIDE:
                        self.value(
                            f"{where}.{name}", item, ItemLocation(module.__dict__, name), None if whole else name
                        )
            self.library = before

    # -- the end -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Follow functions, and the methods and module attributes that code names, until nothing new turns up."""
        followed: set[tuple[int, str]] = set()
        while True:
            while self.pending:
                self.pending.popleft()()
            before = len(followed)
            for owner in list(self.classes):
                for name in [*ALWAYS_CALLED, *_operators(owner), *self.attributes]:
                    if (id(owner), name) not in followed:
                        if name in MAKING and owner not in self.made:
                            self.objects.setdefault(owner, False)
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
                            self.looks(GlobalsSource(path, namespace.__dict__, [name]))
                            self.value(
                                f"{path}.{name}", namespace.__dict__[name], ItemLocation(namespace.__dict__, name)
                            )
            if len(followed) == before and not self.pending:
                left = [owner for owner, done in self.objects.items() if not done]
                if not left:
                    break
                for owner in left:  # what made them is looked through for state, and is not read any more
                    self.objects[owner] = True
                    for name in MAKING:
                        self.method(owner, name, UNREAD)
        for path, scheduler in self.schedulers:
            if self.once(scheduler.optimizer):
                self.optimizers.append((f"{path}.optimizer", scheduler.optimizer))

    def method(self, owner: type, name: str, root: int = ROOT) -> None:
        """Follow what a class has by this name, and what its bases have, which ``super()`` may call."""
        users = [base for base in owner.__mro__ if is_user_class(base)]
        if not any(name in base.__dict__ for base in owner.__mro__):
            return
        for base in owner.__mro__[:-1] if name not in MAKING else ():  # but for ``object``
            if base not in users and isinstance(found := base.__dict__.get(name), (*PLAIN, types.FunctionType)):
                with self.within(root):
                    self.looks(ClassSource(base.__name__, base, [name]))
                if _put_in(found):
                    self.function(found, owner=base, root=root)
        for base in users:  # also those that do not have it: they may get it
            with self.within(root):
                self.looks(ClassSource(base.__name__, base, [name]))
            if name in base.__dict__:
                found = base.__dict__[name]
                described = isinstance(found, METHODS) or hasattr(type(found), "__get__")  # a slot, say
                own = is_user_class(type(found))  # type: ignore[arg-type]  # a descriptor of the user's, whose methods give what is read
                if (own or not described) and not name.startswith("__"):
                    with self.within(root):
                        self.value(f"{base.__name__}.{name}", found, ClassAttributeLocation(base, name))
                if isinstance(found, METHODS) or _wraps(found):
                    self.function(found, owner=base, root=root)

    def subclasses(self, owner: type) -> None:
        """Follow the classes that have been made of one, and of its bases."""
        for base in filter(is_user_class, owner.__mro__):
            made: list[type] = type.__subclasses__(base)  # which a metaclass does not have as a method
            with self.within(ROOT):
                self.looks(SubclassesSource(base.__name__, base))
                for one in made:
                    self.value(one.__name__, one, ItemLocation({}, ""))

    def found(self) -> SearchResult:
        """What was found, and what holds it."""
        state = self.state()
        reached, pending = {ROOT}, [ROOT]
        while pending:
            holder = pending.pop()
            names = self.read_of(self.types.get(holder))
            for attribute, thing in self.ways.get(holder, ()):
                if thing not in reached and (attribute is None or names is None or attribute in names):
                    reached.add(thing)
                    pending.append(thing)
        everything = {*self.others}.union(*self.own.values())
        for name, optimizer in state.optimizers.items():
            self.looked.append((ROOT, HooksSource(name, optimizer)))
            for g, group in enumerate(optimizer.param_groups):
                self.looked.append((ROOT, ItemsSource(f"{name}.param_groups[{g}]['params']", group["params"])))
                by_code = ROOT if "param_groups" in everything else UNREAD  # else its values come with each call
                self.looked.append((by_code, ParamGroupSource(f"{name}.param_groups[{g}]", group, is_fused(optimizer))))
        for path, scheduler in self.schedulers:
            self.looked.append((id(scheduler), SchedulerSource(path, vars(scheduler))))
        for held in state.held.values():
            by = id(held.tensor) if id(held.tensor) in reached else ROOT
            self.looked += [
                (by, HooksSource(held.name, held.tensor)),
                (by, TensorAttributesSource(held.name, held.tensor)),
            ]
        for namespace in self.written.values():
            self.looked.append((UNREAD, StoredGlobalsSource("", namespace, self.stores)))
        for path, module in self.namespaces:
            self.looked.append((UNREAD, StoredGlobalsSource(path, module.__dict__, self.stores)))
        for owner in dict.fromkeys(base for made in self.classes for base in made.__mro__ if is_user_class(base)):
            self.looked.append((UNREAD, StoredClassSource(owner.__name__, owner, self.stores)))
        apart = {(type(one), id(one.holder), one.names): (thing, one) for thing, one in self.looked[::-1]}
        looked = [*apart.values()][::-1]
        for thing, one in looked:
            one.reads = self.read_of(self.types.get(thing))
        read = tuple(_merged([one for thing, one in looked if thing in reached]))
        return SearchResult(state, tuple(one for _, one in looked), read, tuple(self.codes), frozenset(self.stores))

    def read_of(self, owner: type | None) -> frozenset[str] | None:
        """The attributes that code reads of objects of a class, or that are of a library; None: any."""
        if self.any:
            return None
        if owner not in self.reads:
            own = (self.own.get(base, ()) for base in (owner.__mro__ if owner is not None else ()))
            self.reads[owner] = frozenset(self.others).union(*own)
        return self.reads[owner]

    def state(self) -> ScriptState:
        """What was found, named: modules first, then loose tensors, then what only optimizers hold."""
        looks_at_steps = not self.others.keys().isdisjoint(("state", "state_dict"))
        state = ScriptState(named=frozenset(self.globals.union(self.attributes)), looks_at_steps=looks_at_steps)
        held: dict[int, StateTensor] = {}

        def hold(tensor: Tensor, wanted: str, kind: str, place: TensorLocation) -> None:
            left = tensor.left if isinstance(tensor, OwnedTensor) else None
            made_of = tensor.made_of if isinstance(tensor, OwnedTensor) else None
            now = self.names.current(tensor) if left is None else left
            if now is not tensor:
                place(now)
                tensor = now
            if id(tensor) not in held:
                name = self.names.give(tensor, wanted)
                held[id(tensor)] = state.held[name] = StateTensor(name, kind, tensor)
                if made_of is not None:
                    self.names.made_of[name] = made_of
            held[id(tensor)].places.append(place)

        inner = {id(child) for _, m in self.modules for child in m.modules() if child is not m}
        for path, root in self.modules:
            if id(root) in inner:
                continue
            root_name = self.names.give(root, path)
            state.modules[root_name] = root
            for prefix, module in root.named_modules():
                where = f"{root_name}.{prefix}" if prefix else root_name
                item = ScriptTensorLocation if isinstance(module, torch.jit.ScriptModule) else ItemLocation
                for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            hold(tensor, f"{where}.{name}", kind, item(tensors, name))
        for path, tensor, place in self.tensors:
            trained = tensor.requires_grad and tensor.is_leaf
            hold(tensor, path, "parameter" if trained else "tensor", place)
        for path, scaler in self.scalers:
            title = self.names.give(scaler, path)
            state.scalers[title] = scaler
            tensors = scaler_state(scaler)
            for name, tensor in tensors:
                hold(tensor, f"{title}.{name}", "tensor", ItemLocation(vars(scaler), name))
            scale, tracker = (held[id(vars(scaler)[name])].name for name, _ in tensors)
            state.beside[tracker] = scale
        for path, optimizer in self.optimizers:
            name = self.names.give(optimizer, path)
            state.optimizers[name] = optimizer
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    hold(parameter, f"{name}.{g}.{i}", "parameter", ItemLocation(group["params"], i))
        return state


def _merged(looked: Sequence[StateSource]) -> Iterator[StateSource]:
    """The holders, those of which names are looked at once each."""
    names: dict[tuple[str, int], dict[str, None]] = {}
    for one in looked:
        if isinstance(one, GlobalsSource | ClassSource | LibrarySource):
            names.setdefault((one.path, id(one.holder)), {}).update(dict.fromkeys(one.names))
    for one in looked:
        if not isinstance(one, GlobalsSource | ClassSource | LibrarySource):
            yield one
        elif found := names.pop((one.path, id(one.holder)), None):
            yield type(one)(one.path, one.holder, found)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _is_list_of_plain(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MANY and all(isinstance(item, PLAIN) for item in value)


def _wraps(value: Any) -> bool:
    """Whether a function is wrapped; some objects make whatever attribute they are asked for."""
    return inspect.getattr_static(value, "__wrapped__", None) is not None


def _operators(owner: type) -> Iterator[str]:
    """The methods of users' by which operators and statements of Python work on objects of a class."""
    for base in owner.__mro__:
        if is_user_class(base):
            for name, method in base.__dict__.items():
                special = name.startswith("__") and name.endswith("__") and name not in (*MAKING, *UNCALLED)
                if not special or not isinstance(method, types.FunctionType):
                    continue
                if method.__code__.co_filename != "<string>":  # which dataclasses make
                    yield name


def _slots(owner: type) -> Iterator[str]:
    """The names of attributes that a class says to have outside of a ``__dict__``."""
    slots = owner.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if name.startswith("__") and not name.endswith("__"):
            yield f"_{owner.__name__.lstrip('_')}{name}"  # as Python calls what is private
        elif name not in ("__dict__", "__weakref__"):
            yield name


def _is_known(owner: Any) -> bool:
    """Whether the search sees all that a class of an object reads of it."""
    return is_user_class(owner) or owner.__module__ in ("builtins", "abc", "typing", "collections.abc", "enum")


def _is_librarys(owner: Any) -> bool:
    """Whether a module's class is made by a library: it reads attributes that the user's code need not name."""
    return issubclass(owner, nn.Module) and owner is not nn.Module and not is_user_class(owner)


def _put_in(value: Any) -> bool:
    """Whether what a library has is a function of the user's, who has put it there."""
    return isinstance(value, types.FunctionType) and is_user_file(value.__code__.co_filename)
