"""Search the objects that a script's values are, each kind in its own way, for the state that they hold.

Objects of the user's classes are searched whole; of a library's objects only what code can read and change.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import ctypes
import functools
import inspect
import io
import logging
import operator
import queue
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from actorflow.script_state.reachability import ROOT
from actorflow.script_state.search_result import Findings
from actorflow.script_state.set_order import stable_order
from actorflow.script_state.sources import (
    OWN_DICTS,
    ArraySource,
    AttributesSource,
    CacheEntriesSource,
    CacheSource,
    ContextVarSource,
    GeneratorSource,
    HooksSource,
    ItemsSource,
    KindSource,
    LengthSource,
    LogLevelSource,
    MappingSource,
    MemoryFileSource,
    ModuleSource,
    ScriptSource,
    SlotsSource,
    StateSource,
    StepHooksSource,
    TypeSource,
    cache_table,
)  # fmt: skip
from actorflow.script_state.unsupported import refuse_disguised, refuse_unsupported, unwrap_prepared
from actorflow.script_state.user_code import has_user_class, is_installed, is_user_class, is_user_file
from actorflow.standins.beside import BESIDE
from actorflow.standins.locations import (
    AttributeLocation,
    FrozenMemberLocation,
    ImmutableItemLocation,
    ItemLocation,
    KeyLocation,
    MemberLocation,
    ScriptAttributeLocation,
    ScriptListLocation,
    TensorLocation,
)
from actorflow_compiler.core.expressions import has_numbers
from actorflow_compiler.core.torch_internals import HOOKS, hooks_of, module_hooks, users_step_hooks
from actorflow_compiler.substitutes.observers import give_ranges_sizes
from actorflow_compiler.values.variables import attributes_given

__all__ = [
    "CACHE",
    "LOGGING_LIBRARIES",
    "PLAIN",
    "ScriptSearch",
    "nowhere",
    "search_attributes",
    "search_entries",
    "search_global_hooks",
    "search_object",
    "search_tensor",
    "search_frozen_set",
    "search_tuple",
    "search_value_attributes",
    "wraps_function",
]

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
OPTIMIZER_ATTRIBUTES = ("param_groups", "state", "defaults")  # followed separately
OPTIMIZER_METHODS = ("step", "zero_grad")
SCHEDULER_METHODS = ("step", "get_lr", "_get_closed_form_lr")  # methods of schedulers that are followed
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
CONTAINERS = (  # library classes whose attributes are all followed
    collections.UserList, collections.UserString, queue.Queue, threading.Event, Distribution, Dataset,
)  # fmt: skip
NUMBER_OF_C: Any = ctypes.c_int.__base__
NATIVE: dict[Any, Callable[[str, Any], StateSource]] = {  # objects with state outside Python attributes
    **dict.fromkeys((random.Random, np.random.Generator, np.random.RandomState, torch.Generator), GeneratorSource),
    np.random.BitGenerator: GeneratorSource,
    **dict.fromkeys((np.ndarray, np.void, bytearray, array.array, memoryview), ArraySource),
    **dict.fromkeys((ctypes.Array, ctypes.Structure, ctypes.Union, NUMBER_OF_C), ArraySource),
    **dict.fromkeys((io.StringIO, io.BytesIO), MemoryFileSource),
}
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
LOGGING_LIBRARIES = frozenset(("logging", "mlflow", "rich", "tensorboardX", "tqdm", "unittest", "wandb"))
CACHE = type(functools.cache(id))


class ScriptSearch(Protocol):
    """The search that finds the objects, and follows the values and functions that they hold."""

    found: Findings  # so far

    def value(self, path: str, value: Any, place: TensorLocation, attribute: str | None = None) -> None:
        """Search a value that was reached by ``path`` and is held at ``place``, as an ``attribute`` if it is one."""

    def function(self, function: Any, self_name: str = "self", owner: type | None = None, root: int = ROOT) -> None:
        """Follow a callable; ``owner`` is the class whose method it is."""

    def method(self, owner: type, name: str, root: int = ROOT) -> None:
        """Follow the attribute of this name in a class and in its bases."""


def search_object(search: ScriptSearch, path: str, value: Any) -> None:
    """Search an object that is reached for the first time, and is the holder of what is found."""
    refuse_disguised(path, value)
    for kinds, search_kind in KINDS:
        if isinstance(value, kinds):
            search_kind(search, path, value)
            return
    if has_user_class(value):
        search_attributes(search, path, value)
        return
    for kinds, search_kind in LIBRARY_KINDS:
        if isinstance(value, kinds):
            search_kind(search, path, value)
            return
    if wraps_function(value):
        search.function(value.__wrapped__, path)
    elif isinstance(getattr(value, "__dict__", None), dict):
        _library_object(search, path, value)


# -- parts of objects ------------------------------------------------------------------------------


def search_attributes(search: ScriptSearch, path: str, value: Any, but: Container[str] = ()) -> None:
    """Search an object's attributes, except those in ``but``."""
    search.found.add_object(value)
    if has_user_class(value):
        search.found.add_sources(value, TypeSource(path, value))
    own = getattr(value, "__dict__", {})
    bases: tuple[Any, ...] = type(value).__mro__
    whole = is_user_class(bases[0]) and not all(map(_is_readable, bases))
    search.found.add_sources(value, AttributesSource(path, own, whole))
    for name, item in list(own.items()):
        if name not in but and name != BESIDE:
            search.value(f"{path}.{name}", item, ItemLocation(own, name), None if whole else name)
    slots = [name for base in type(value).__mro__ for name in _slot_names(base)]
    if slots:
        search.found.add_sources(value, SlotsSource(path, value, slots))
    for name in slots:
        if hasattr(value, name):
            search.value(f"{path}.{name}", getattr(value, name), AttributeLocation(value, name), name)
    if wraps_function(value):
        search.function(value.__wrapped__, path)


def search_value_attributes(search: ScriptSearch, path: str, value: Any, attribute: str | None) -> None:
    """Search the attributes of a number, string or tuple whose class is the user's."""
    if getattr(value, "__dict__", None) is not None:
        search.found.add_reference(value, attribute)
        if search.found.first_visit(value):
            with search.found.within(id(value)):
                search_attributes(search, path, value)


def _container_attributes(search: ScriptSearch, path: str, value: Any) -> None:
    """Search the attributes of a container whose class is the user's."""
    if has_user_class(value):
        search_attributes(search, path, value)


def search_tuple(
    search: ScriptSearch, path: str, value: tuple[Any, ...], place: TensorLocation, attribute: str | None
) -> None:
    """Search the items of a tuple that is held at ``place``."""
    if type(value) is not tuple and is_user_class(type(value)):
        search.found.classes.append(type(value))
        search_value_attributes(search, path, value, attribute)
    rebuild: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
    for index, item in enumerate(value):
        search.value(f"{path}.{index}", item, ImmutableItemLocation(place, index, rebuild), attribute)


def search_entries(search: ScriptSearch, path: str, value: Mapping[Any, Any]) -> None:
    """Search the keys and values of a mapping."""
    search.found.add_sources(value, MappingSource(path, value))
    if isinstance(value, collections.defaultdict):
        search.found.add_sources(value, SlotsSource(path, value, ["default_factory"]))
        search.function(value.default_factory)
    handles = path.rpartition(".")[2] in HOOKS  # keys are handles, which every rank numbers by itself
    for index, (key, item) in enumerate(value.items()):
        name = key if isinstance(key, str | int) and not handles else index
        search.value(f"{path}.{name}" if path else str(name), item, ItemLocation(value, key))
    for key in [*value]:
        if isinstance(key, Tensor):
            if isinstance(value, dict):
                search.value(path, key, KeyLocation(value, key))
        elif not isinstance(key, PLAIN):
            search.value(path, key, nowhere())


def search_tensor(search: ScriptSearch, path: str, tensor: Tensor) -> None:
    """Follow a tensor's hooks, and the attributes that the script has given it."""
    _hooks(search, tensor)
    given = attributes_given(tensor)
    if given and search.found.first_visit(tensor):
        with search.found.within(id(tensor)):
            for name, item in given.items():
                search.value(f"{path}.{name}", item, AttributeLocation(tensor, name))


def search_global_hooks(search: ScriptSearch) -> None:
    """Follow the global hooks of modules and of optimizers."""
    for path, kept in module_hooks().items():
        search.found.add_read_source(MappingSource(path, kept))
    search.found.add_read_source(StepHooksSource("the hooks of all optimizers", None))
    for kept in (*module_hooks().values(), users_step_hooks()):
        for hook in kept.values():
            search.function(hook)


def _hooks(search: ScriptSearch, thing: Any) -> None:
    """Follow the hooks of a tensor or an optimizer."""
    for kind in hooks_of(thing).values():
        for hook in kind:
            search.function(hook)


# -- kinds of objects, whether their classes are a library's or the user's -------------------------


def _module(search: ScriptSearch, path: str, root: nn.Module) -> None:
    found = search.found
    refuse_unsupported(path, root)
    found.modules.append((path, root))
    give_ranges_sizes(root.modules())
    for prefix, module in root.named_modules():
        found.first_visit(module)
        found.add_object(module)
        where = f"{path}.{prefix}" if prefix else path
        whole = any(_is_library_module(owner) for owner in type(module).__mro__)
        found.add_reference(module, None)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                search_tensor(search, f"{where}.{name}", tensor)
        script = isinstance(module, torch.jit.ScriptModule)
        own = ScriptSource(where, module) if script else ModuleSource(where, vars(module), whole)
        dicts = (MappingSource(where, getattr(module, name), dots=True) for name in OWN_DICTS)
        found.add_sources(module, own, KindSource(where, module), HooksSource(where, module), *dicts)
        if isinstance(own, ScriptSource):
            for name, at, tensor in own.tensors():
                place = ScriptAttributeLocation(own.program, name)
                inner = f"{where}.{name}" if at < 0 else f"{where}.{name}.{at}"
                search.value(inner, tensor, place if at < 0 else ScriptListLocation(place, at))
            continue
        before, found.in_library = found.in_library, whole
        with found.within(id(module)):
            for name, item in list(module.__dict__.items()):
                if name not in OWN_DICTS and name != BESIDE:
                    search.value(f"{where}.{name}", item, ItemLocation(module.__dict__, name), None if whole else name)
        found.in_library = before


def _optimizer(search: ScriptSearch, path: str, value: torch.optim.Optimizer) -> None:
    inner = unwrap_prepared(path, value)
    if inner is not None:
        search.value(f"{path}.optimizer", inner, AttributeLocation(value, "optimizer"))
        whole = search.found.in_library
        search.found.add_sources(value, AttributesSource(path, vars(value), whole, of_library=True))
        return
    search.found.optimizers.append((path, value))
    _hooks(search, value)
    if has_user_class(value):  # it may wrap other optimizers, as SAM does
        search_attributes(search, path, value, OPTIMIZER_ATTRIBUTES)
        return
    search.found.add_sources(value, AttributesSource(path, vars(value), False, of_library=True))
    search.value(f"{path}.defaults", value.defaults, ItemLocation(vars(value), "defaults"), "defaults")
    for name in OPTIMIZER_METHODS:  # set on the instance, instead of the methods of its class
        if name in vars(value):
            search.value(f"{path}.{name}", vars(value)[name], ItemLocation(vars(value), name), name)


def _scheduler(search: ScriptSearch, path: str, value: LRScheduler) -> None:
    """Search a learning-rate scheduler, except for the numbers that it counts."""
    search.found.schedulers.append((path, value))
    search.found.add_object(value)
    for name in SCHEDULER_METHODS:
        search.method(type(value), name, id(value))
    for name, item in list(vars(value).items()):
        if name != "optimizer" and not has_numbers(item):
            search.value(f"{path}.{name}", item, ItemLocation(vars(value), name), None)


def _scaler(search: ScriptSearch, path: str, value: torch.amp.GradScaler) -> None:
    if value.is_enabled():
        search.found.scalers.append((path, value))


def _mapping(search: ScriptSearch, path: str, value: Mapping[Any, Any]) -> None:
    search_entries(search, path, value)
    _container_attributes(search, path, value)


def _list(search: ScriptSearch, path: str, value: list[Any] | deque[Any]) -> None:
    _container_attributes(search, path, value)
    search.found.add_sources(value, ItemsSource(path, value))
    for index, item in enumerate(value):
        search.value(f"{path}.{index}", item, ItemLocation(value, index))


def _set(search: ScriptSearch, path: str, value: AbstractSet[Any]) -> None:
    search.found.add_sources(value, ItemsSource(path, value))
    for index, item in enumerate(stable_order(value, search.found.names.known)):
        if not isinstance(item, Tensor):
            search.value(f"{path}.{index}", item, nowhere())
        elif isinstance(value, set):
            search.value(f"{path}.{index}", item, MemberLocation(value, item))


def search_frozen_set(search: ScriptSearch, path: str, value: frozenset[Any], place: TensorLocation) -> None:
    """Search the tensors of a frozen set that is held at ``place``."""
    for index, item in enumerate(stable_order(value, search.found.names.known)):
        if isinstance(item, Tensor):
            search.value(f"{path}.{index}", item, FrozenMemberLocation(place, item))


def _python_module(search: ScriptSearch, path: str, value: types.ModuleType) -> None:
    if value.__name__.startswith("actorflow."):
        search.found.globals.add(value.__name__)
    if is_user_file(getattr(value, "__file__", None)):
        search.found.namespaces.append((path, value))


def _class(search: ScriptSearch, path: str, value: type) -> None:
    if is_user_class(value):
        search.found.classes.append(value)
        search.found.instantiated[value] = None
    elif is_installed(value.__module__):
        search.found.classes.append(value)
    if is_user_class(type(value)):  # a metaclass
        search.found.classes.append(type(value))


def _native(search: ScriptSearch, path: str, value: Any) -> None:
    stateless = isinstance(value, random.SystemRandom)  # it asks the system, which steps must not
    made = [make(path, value) for kind, make in NATIVE.items() if isinstance(value, kind) and not stateless]
    search.found.add_sources(value, *made)
    _container_attributes(search, path, value)


# -- kinds of objects of libraries -----------------------------------------------------------------


def _script_function(search: ScriptSearch, path: str, value: Any) -> None:
    search.found.add_sources(value, ScriptSource(path, value))


def _logger(search: ScriptSearch, path: str, value: logging.Logger) -> None:
    attributes = AttributesSource(path, vars(value), False, of_library=True)
    search.found.add_sources(value, LogLevelSource(path, value), attributes)


def _view(search: ScriptSearch, path: str, value: Any) -> None:
    search.value(path, value.mapping, nowhere())


def _container(search: ScriptSearch, path: str, value: Any) -> None:
    search.found.add_sources(value, AttributesSource(path, vars(value), True))
    for name, item in list(vars(value).items()):
        search.value(f"{path}.{name}", item, ItemLocation(vars(value), name))


def _shared_by_processes(search: ScriptSearch, path: str, value: Any) -> None:
    search.value(path, value.get_obj(), nowhere())


def _context_variable(search: ScriptSearch, path: str, value: contextvars.ContextVar[Any]) -> None:
    search.found.add_sources(value, ContextVarSource(path, value))
    search.value(path, value.get(None), nowhere())


def _weak_reference(search: ScriptSearch, path: str, value: weakref.ReferenceType[Any]) -> None:
    search.value(f"{path}()", value(), nowhere())


def _getter(search: ScriptSearch, path: str, value: Any) -> None:
    """Note the attributes that an ``operator.attrgetter`` or ``methodcaller`` names."""
    said = dict.fromkeys(part for name in value.__reduce__()[1] for part in str(name).split("."))
    search.found.attributes.update(said)
    search.found.attribute_reads.add_names(said)


def _cached_function(search: ScriptSearch, path: str, value: Any) -> None:
    search.found.add_sources(value, CacheSource(path, value))
    if (table := cache_table(value)) is not None:
        search.value(f"the cache of {path}", table, nowhere())
    else:
        search.found.add_sources(value, CacheEntriesSource(path, value))
    search.function(value.__wrapped__, path)


def _library_object(search: ScriptSearch, path: str, value: Any) -> None:
    """Search an object of a library; it follows only tensors, native objects, lists and dictionaries in its attributes.

    Code names the attributes that it reads, unless the class computes attributes or items from others, as a
    configuration does.  Then objects of the same library in its attributes are followed too.
    """
    found = search.found
    makes = hasattr(type(value), "__getattr__") or isinstance(value, Sequence)
    makes = makes and _package(value) not in LOGGING_LIBRARIES
    found.add_sources(value, AttributesSource(path, vars(value), found.in_library or makes, of_library=True))
    if hasattr(type(value), "__len__"):
        found.add_sources(value, LengthSource(path, value))
    before = len(found.sources)
    for name, item in list(vars(value).items()):
        kin = makes and _package(item) == _package(value)
        if kin or isinstance(item, (*NATIVE, list, dict)) or _is_dense(item):
            search.value(f"{path}.{name}", item, ItemLocation(vars(value), name), None if makes else name)
    for _, one in found.sources[before:] if not makes else ():
        one.of_library = True


def _is_dense(value: Any) -> bool:
    """Whether a value is a tensor that a plan can hold."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_quantized or value.is_nested or value.is_meta)


Kinds = tuple[tuple[tuple[Any, ...], Callable[[ScriptSearch, str, Any], None]], ...]
# Classes, and how their objects are searched: an object is searched by the first line that has a class of it.
KINDS: Kinds = (  # a user's class of these kinds is searched as the kind, too
    ((nn.Module,), _module),
    ((torch.optim.Optimizer,), _optimizer),
    ((LRScheduler,), _scheduler),
    ((torch.amp.GradScaler,), _scaler),
    ((Mapping,), _mapping),
    ((list, deque), _list),
    ((set, frozenset, weakref.WeakSet), _set),
    ((types.ModuleType,), _python_module),
    ((type,), _class),
    (tuple(NATIVE), _native),
    (NAMESPACES, search_attributes),
)
LIBRARY_KINDS: Kinds = (  # only for objects whose class is not the user's
    ((torch.jit.ScriptFunction,), _script_function),
    ((logging.Logger,), _logger),
    (VIEWS, _view),
    (CONTAINERS, _container),
    ((SynchronizedBase,), _shared_by_processes),
    ((contextvars.ContextVar,), _context_variable),
    ((weakref.ReferenceType,), _weak_reference),
    ((operator.attrgetter, operator.methodcaller), _getter),
    ((CACHE,), _cached_function),
)


def nowhere() -> TensorLocation:
    """A location for a value that nothing else can take the place of."""
    return ItemLocation({}, "")


def wraps_function(value: Any) -> bool:
    """Whether a function is wrapped; looked up statically, because some objects create any attribute on access."""
    return inspect.getattr_static(value, "__wrapped__", None) is not None


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


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
