"""Put into plain data all that the capture of a step can read of the script, so that another process can compare it.

The search has found what the step's code can read, and guards compare that within a process, many values by identity.
Between processes an object is what the search found in it, a function is its code, and a library's function or class is
its name.  Whatever has no such form raises NoDigest, with its place: then the step is captured, as without this module.
So does code that asks for more than its values: what it prints, which files and devices there are, addresses, hashes.
"""

from __future__ import annotations

import array
import collections
import dis
import functools
import hashlib
import os
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actorflow.script_state.arguments import CallArguments
from actorflow.script_state.object_search import PLAIN
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import (
    AttributesSource,
    CacheSource,
    ClassSource,
    CountersSource,
    GeneratorSource,
    GlobalsSource,
    ScriptSource,
    StateSource,
    TypeSource,
    cache_table,
)
from actorflow.script_state.user_code import HEAP_TYPE, is_user_class, is_user_file
from actorflow_compiler.capture.optimizer_state import is_torchs
from actorflow_compiler.core.digest import NoDigest
from actorflow_compiler.core.torch_internals import OpOverload, OpOverloadPacket, only_dispatch

__all__ = ["covered_lines", "script_form"]

MOST_VALUES = 200_000  # that are put into plain data
PURE = frozenset((  # modules of Python whose functions do nothing but compute
    "_collections", "_collections_abc", "_functools", "_operator", "abc", "bisect", "builtins", "cmath", "collections",
    "collections.abc", "contextlib", "copy", "dataclasses", "enum", "fractions", "functools", "heapq", "itertools",
    "math", "numbers", "operator", "re", "string", "types", "typing", "__future__",
))  # fmt: skip
IMPURE = frozenset((  # builtins that do or read more than their arguments
    "__import__", "breakpoint", "compile", "dir", "eval", "exec", "exit", "globals", "hash", "help", "id", "input",
    "locals", "open", "print", "quit",
))  # fmt: skip
ASKING = frozenset((  # attributes, of torch and NumPy mostly, that write, or read what is no state of the script
    "classes", "compile", "current_device", "current_stream", "data_ptr", "default_generator", "distributed", "dump",
    "dumps", "from_file", "fromfile", "genfromtxt", "get_device_capability", "get_device_name", "get_device_properties",
    "get_num_interop_threads", "get_num_threads", "get_rank", "get_rng_state", "get_state", "get_world_size", "hub",
    "initial_seed", "jit", "library", "load", "load_library", "loads", "loadtxt", "max_memory_allocated",
    "mem_get_info", "memmap", "memory_allocated", "memory_reserved", "memory_stats", "monitor", "multiprocessing",
    "ops", "profiler", "save", "savez", "script", "seed", "storage", "tofile", "untyped_storage", "utilization", "warn",
    "write", "fromregex", "open_memmap", "read_array", "DataSource", "show_config", "show_runtime",
    "_C", "_cdata", "_version", "__subclasses__", "__code__", "__closure__", "__globals__", "f_back",
))  # fmt: skip
BY_NAME = frozenset(("getattr", "attrgetter", "methodcaller", "vars", "__dict__", "__getattribute__"))
SHOWING = frozenset(("__str__", "__repr__", "__format__"))
SHOWS = frozenset(("str", "repr", "format", "ascii"))
NOT_IN_STEPS = frozenset(("__init__", "__new__", "extra_repr", "__init_subclass__", "__class_getitem__"))
COPYING = frozenset(("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"))
CALLABLES_OF_C: tuple[Any, ...] = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
CONTAINERS = (list, dict, set, frozenset, OrderedDict, deque, defaultdict, types.MappingProxyType, torch.Size)
CONSTANTS: tuple[Any, ...] = (torch.memory_format, torch.layout, torch.qscheme)
TORCH = str(Path(torch.__file__).parent) + "/"
NUMPY = str(Path(np.__file__).parent) + "/"
STDLIB = tuple(str(Path(sysconfig.get_paths()[key]).resolve()) + "/" for key in ("stdlib", "platstdlib"))
OURS = ("actorflow", "actorflow_compiler", "actorflow_scheduler", "actorflow_protos")
ATTACHED = str(Path(__file__).parents[1] / "attached.py")  # our methods of torch's classes, which wrap torch's
APART = (  # modules of torch and NumPy that do more than compute
    "torch.distributed", "torch.hub", "torch.serialization", "torch.utils.data", "torch.utils.cpp_extension",
    "torch.profiler", "torch.multiprocessing", "torch.jit", "torch._dynamo", "torch.library", "torch.package",
    "torch.onnx", "torch.export", "torch._inductor", "torch.utils.benchmark", "torch.utils.tensorboard",
    "torch.cuda.memory", "torch._export", "numpy.random", "numpy.lib.npyio", "numpy.lib._npyio_impl", "numpy.ctypeslib",
)  # fmt: skip
WRAPPERS = ("contextlib.py", "functools.py")  # files of functions that carry the module of what they wrap
STATE_HOOKS = ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_post_hooks")  # of an optimizer
COVERED = (types.SimpleNamespace, collections.UserDict, collections.UserList, collections.UserString)


def script_form(function: Callable[..., Any], found: SearchResult, arguments: CallArguments) -> tuple[Any, ...]:
    """All that the capture of a step reads of the script, as plain data, equal in each process where the script is.

    ``function`` is the job's, from which the search has begun.  These are the code that the search has followed and its
    files, the tensors' shapes, the modules, the optimizers, the values that code can read or sets, and the call's
    arguments besides tensors and numbers.  What a plan reads anew at each call, or has conditions on (``NumberReads``),
    is left out.  Raises NoDigest.
    """
    try:
        with only_dispatch():  # faster for stand-ins
            form = _Form(found)
            leaves = tuple([form.argument(path, leaf) for path, leaf in _objects(arguments)])
            begun = form.argument("the job's function", function)
            return form.all(), begun, leaves, str(arguments.structure), arguments.specs, tuple(arguments.numbers)
    except RecursionError:
        raise NoDigest("values that are nested too deep") from None


def covered_lines(found: SearchResult) -> Mapping[str, set[int]]:
    """The lines of the user's code that the search has followed, by file."""
    lines: dict[str, set[int]] = {}
    for code in _with_inner(found.codes):
        of_file = lines.setdefault(os.path.abspath(code.co_filename), set())
        of_file.update(line for *_, line in code.co_lines() if line is not None)
    return lines


def _objects(arguments: CallArguments) -> Iterator[tuple[str, Any]]:
    """The arguments that are neither tensors nor numbers."""
    for (path, kind, key), leaf in zip(arguments.key[2], _without_tensors(arguments), strict=True):
        yield path, (kind.__qualname__ if key is None else leaf)


def _without_tensors(arguments: CallArguments) -> list[Any]:
    return [leaf for leaf in arguments.leaves if type(leaf).__name__ != "_TensorMark"]


class _Form:
    """Puts what a search has found into plain data."""

    def __init__(self, found: SearchResult) -> None:
        self._found, self._state = found, found.state
        self._numbers: dict[int, int] = {}  # id of an object → its number, in the order in which they are met
        self._alive: list[Any] = []  # so that ids stay unique
        self._tensors = {id(h.tensor): name for name, h in self._state.held.items()}
        self._modules = {
            id(m): f"{root}.{name}" if name else root
            for root, module in reversed(self._state.modules.items())
            for name, m in module.named_modules()
        }
        self._sources = {id(one.holder): one for one in found.sources}
        self._sources |= {id(one.holder): one for one in found.sources if isinstance(one, CountersSource)}
        self._done: set[int] = set()  # ids of objects whose contents have been written down
        self._objects = {
            **{id(thing): name for name, thing in self._state.optimizers.items()},
            **{id(thing): name for name, thing in self._state.scalers.items()},
        }
        self._optimizers = {id(vars(thing)) for thing in self._state.optimizers.values()}
        self._codes = {*_with_inner(found.codes)}
        self._classes: dict[type, None] = {}
        self._values = 0
        self._where = ""

    # -- the whole ---------------------------------------------------------------------------------

    def all(self) -> tuple[Any, ...]:
        """Everything that the search has found."""
        self._check_code()
        stored = [(type(one).__name__, one.path, key, one.values()[key]) for one, key in self._found.stored_only()]
        form = (
            tuple(map(_code_form, self._found.codes)),
            tuple(sorted(_files(self._codes))),
            tuple([self._tensor(name) for name in self._state.held]),
            tuple(self._module_form()),
            tuple([self._optimizer(name) for name in self._state.optimizers]),
            tuple([(name, _class_name(type(one))) for name, one in self._state.scalers.items()]),
            self._order_of_sets(),
            dict(self._state.beside), self._state.named, self._state.looks_at_steps, self._found.stores,
            tuple([(type(one).__name__, one.path) for one in self._found.sources]),
            tuple([self._source(one) for one in self._found.read_sources]),
            tuple([self._stored(*one) for one in stored]),
        )  # fmt: skip
        self._check_classes()
        return form

    def argument(self, path: str, leaf: Any) -> Any:
        """An argument that is no tensor."""
        self._where = path
        return path, self.value(leaf)

    def _tensor(self, name: str) -> tuple[Any, ...]:
        """What capture sees of a tensor of the state: all but its values."""
        held = self._state.held[name]
        tensor: Any = held.tensor
        kind = type(tensor)
        if kind.__module__.partition(".")[0] not in ("torch", *OURS):
            raise NoDigest(f"{name}, a tensor of the class {kind.__module__}.{kind.__qualname__}")
        strided = tensor.layout == torch.strided and kind in (Tensor, nn.Parameter)
        memory = (tuple(tensor.stride()), tensor.storage_offset(), self._memory(tensor)) if strided else ()
        base = self._tensors.get(id(tensor._base), "another") if strided and tensor._base is not None else ""
        return (
            name, str(held.kind), len(held.places), _class_name(kind), tuple(tensor.shape), tensor.dtype, tensor.device,
            str(tensor.layout), tensor.requires_grad, tensor.is_leaf, bool(tensor.is_conj()), bool(tensor.is_neg()),
            memory, base,
        )  # fmt: skip

    def _memory(self, tensor: Tensor) -> int:
        """A number that is equal for tensors that share memory."""
        if tensor.device.type == "meta" or not tensor.numel():
            return -1
        address = tensor.untyped_storage().data_ptr()
        return self._numbers.setdefault(-address - 1, len(self._numbers))

    def _module_form(self) -> Iterator[tuple[Any, ...]]:
        for root in self._state.modules.values():
            for name, module in root.named_modules(remove_duplicate=False):
                kind = type(module)
                self._where = name
                yield name, self._modules[id(module)], self._class(kind), module.training

    def _optimizer(self, name: str) -> tuple[Any, ...]:
        """What of an optimizer neither the key of a plan nor its conditions on numbers have."""
        optimizer = self._state.optimizers[name]
        self._where = name
        groups = tuple(
            [
                (tuple([self._tensors.get(id(p), "") for p in group["params"]]), tuple(sorted(group)))
                for group in optimizer.param_groups
            ]
        )
        looked_at = self._state.looks_at_steps or not is_torchs(optimizer)  # else a first step is like those after it
        kept = tuple(
            [
                (self._tensors.get(id(p), ""), tuple([(str(key), self._kept(value)) for key, value in values.items()]))
                for p, values in optimizer.state.items()
                if isinstance(p, Tensor) and looked_at
            ]
        )
        rest = tuple([(str(key), self.value(v)) for key, v in optimizer.state.items() if not isinstance(key, Tensor)])
        return name, self._class(type(optimizer)), groups, kept, rest, self.value(dict(optimizer.defaults))

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype, value.device
        return type(value).__name__ if isinstance(value, int | float) else self.value(value)

    def _stored(self, kind: str, path: str, key: Any, value: Any) -> tuple[Any, ...]:
        """A value that code sets and does not read; a step may leave it as it is."""
        self._where = f"{path}.{key}"
        try:
            return kind, path, self.value(key), self.value(value)
        except NoDigest:  # what the step may set there it reads elsewhere, or makes: it is none of this kind
            return kind, path, self.value(key), _class_name(type(value))

    # -- sources -----------------------------------------------------------------------------------

    def _source(self, one: StateSource) -> tuple[Any, ...]:
        """A source: what kind it is, where it is, and the values of it that code can read or sets."""
        self._where = one.path
        if isinstance(one, ScriptSource):
            raise NoDigest(f"{one.path}, which torch.jit has compiled")
        if isinstance(one, CacheSource):
            if cache_table(one.holder) is None and one.holder.cache_info().currsize:
                raise NoDigest(f"what functools.lru_cache keeps of {one.path}")
            return type(one).__name__, one.path
        if isinstance(one, GeneratorSource):
            return type(one).__name__, one.path, _class_name(type(one.holder))
        if isinstance(one, ClassSource | TypeSource):
            self._class(one.holder if isinstance(one, ClassSource) else type(one.holder))
        number = self._number(one.holder)
        values = one.read()
        if one.of_library and isinstance(one, AttributesSource):
            values = one.values()  # a library's own code reads any
            if id(one.holder) in self._optimizers:
                but = ("state", "param_groups", "defaults")
                values = {k: _scripts_own(v) if k in STATE_HOOKS else v for k, v in values.items() if k not in but}
        items = []
        for key, value in values.items():
            self._where = str(one.label(key))
            items.append((self.value(key), self.value(value)))
        names = tuple(one.names) if isinstance(one, GlobalsSource) else ()
        return type(one).__name__, one.path, number, one.by_name, one.whole, names, tuple(items)

    def _number(self, thing: Any) -> int:
        """A number for an object; its ``__dict__`` has the same one."""
        number = self._numbers.get(id(thing))
        if number is None:
            own = None if isinstance(thing, type | types.ModuleType) else getattr(thing, "__dict__", None)
            number = self._numbers.get(id(own), len(self._numbers)) if type(own) is dict else len(self._numbers)
            self._numbers[id(thing)] = number
            self._alive.append(thing)
            if type(own) is dict:
                self._numbers.setdefault(id(own), number)
        return number

    # -- values ------------------------------------------------------------------------------------

    def value(self, value: Any) -> Any:
        """A value as plain data.  Raises NoDigest."""
        self._values += 1
        if self._values > MOST_VALUES:
            raise NoDigest(f"more than {MOST_VALUES} values, at {self._where}")
        kind: Any = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, Tensor):
            if (name := self._tensors.get(id(value))) is None:
                self._refuse("a tensor that is no variable of the step")
            return "tensor", name
        if isinstance(value, Enum):
            return "enum", self._class(kind), value.name, self.value(value.value)
        if isinstance(value, CONSTANTS):
            return "constant", str(value)
        if isinstance(value, np.generic):
            return value
        if value is Ellipsis or value is NotImplemented:
            return "constant", repr(value)
        if kind in (slice, range):
            return kind.__name__, self.value((value.start, value.stop, value.step))
        if kind is tuple:
            return ("tuple", *[self.value(item) for item in value])
        if isinstance(value, str | bytes | int | float | complex):
            base = next(base for base in kind.__mro__ if base in PLAIN)
            return "of class", self._class(kind), base(value), self._number(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        return self._object(value, kind)

    def _object(self, value: Any, kind: Any) -> Any:
        """An object, which is what it holds the first time that it is met, and a number after that."""
        if (name := self._modules.get(id(value)) or self._objects.get(id(value))) is not None:
            return "part", name
        if isinstance(value, types.MethodType):
            return "method", self.value(value.__func__), self.value(value.__self__)
        if isinstance(value, CALLABLES_OF_C):
            return self._of_c(value)
        if isinstance(value, OpOverload | OpOverloadPacket):
            return ("op", str(value)) if str(value).startswith("aten.") else self._refuse(f"the op {value}")
        if isinstance(value, torch.Generator):
            return "generator", str(value.device), self._number(value)
        if isinstance(value, weakref.ReferenceType):
            return "weak", self.value(value())
        if isinstance(value, types.CodeType):
            return "code", _code_form(value)
        number = self._number(value)
        if id(value) in self._done:
            return "again", number
        self._done.add(id(value))
        return self._contents(value, kind, number)

    def _contents(self, value: Any, kind: Any, number: int) -> Any:
        """An object that is met for the first time."""
        if isinstance(value, types.FunctionType):
            return ("function", number, *self._function(value))
        if isinstance(value, functools.partial):
            return "partial", number, self.value(value.func), self.value(value.args), self.value(value.keywords)
        if isinstance(value, staticmethod | classmethod):
            return kind.__name__, self.value(value.__func__)
        if isinstance(value, property):
            return "property", self.value(value.fget), self.value(value.fset), self.value(value.fdel)
        if isinstance(value, functools.cached_property | functools.partialmethod):
            return kind.__name__, self.value(value.func)
        if kind is type(functools.cache(id)):
            return "cached", self.value(value.__wrapped__), self.value(value.cache_parameters())
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject or type(value) is not np.ndarray:
                self._refuse("an array of objects")
            of = value.dtype.str, value.shape, value.strides, value.flags.writeable, self._shared(value)
            return "array", of, hashlib.sha256(value.tobytes()).digest()
        if isinstance(value, bytearray | array.array):
            return kind.__name__, bytes(value)
        made = self._container(value)
        if made is not None:
            plain = kind in CONTAINERS or (kind is collections.Counter and not vars(value))
            mine = () if plain else self._covered(value)
            more = self.value(value.default_factory) if isinstance(value, defaultdict) else ()
            most = value.maxlen if isinstance(value, deque) else None
            return self._class(kind), number, made, mine, more, most
        return self._covered(value)

    def _shared(self, array: np.ndarray[Any, Any]) -> tuple[int, int]:
        """Numbers that say which memory arrays share: whose it is, and where in it the array begins."""
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        begins, whole = (one.__array_interface__["data"][0] for one in (array, owner))
        return self._number(owner if owner.base is None else owner.base), begins - whole

    def _container(self, value: Any) -> tuple[Any, ...] | None:
        """The contents of a container of Python; None for another object."""
        if isinstance(value, dict | types.MappingProxyType):
            return tuple([(self.value(key), self.value(item)) for key, item in value.items()])
        if isinstance(value, list | tuple | deque):
            return tuple([self.value(item) for item in value])
        if isinstance(value, set | frozenset):
            if not all(isinstance(item, PLAIN) for item in value):
                self._refuse("a set of objects")
            return ("set", *value)  # in its order, which each process has by itself for strings
        return None

    def _covered(self, value: Any) -> Any:
        """An object whose attributes the search has found, or a plain one of torch's, with its attributes."""
        kind: Any = type(value)
        own = getattr(value, "__dict__", None)
        one = self._sources.get(id(value)) or (None if own is None else self._sources.get(id(own)))
        users = is_user_class(kind)
        if (one is not None and (users or isinstance(one, CountersSource) or kind in COVERED)) or (
            users and own is not None and not own and not _slots(kind)
        ):
            return "object", self._class(kind), self._number(value)
        of_python = all(base.__flags__ & HEAP_TYPE or base is object for base in kind.__mro__)
        if of_python and type(own) is dict and not _slots(kind) and _is_known(kind.__module__):
            return "object", self._class(kind), self._number(value), tuple([(k, self.value(v)) for k, v in own.items()])
        return self._refuse(f"a {_class_name(kind)}")

    # -- code --------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> tuple[Any, ...]:
        code = function.__code__
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.value(cell.cell_contents))
            except ValueError:  # nothing is assigned to the variable yet
                cells.append("empty")
        given = self.value(function.__defaults__), self.value(function.__kwdefaults__)
        if is_user_file(code.co_filename):
            if code not in self._codes:
                self._refuse(f"the function {function.__qualname__}, which the search has not followed")
            named = function.__module__, function.__name__, function.__qualname__, function.__doc__
            return named, _code_form(code), tuple(cells), given
        if not _is_trusted(code.co_filename, str(function.__module__)) or function.__name__ in ASKING:
            self._refuse(f"the function {function.__module__}.{function.__qualname__} of a library")
        return function.__module__, code.co_qualname, code.co_firstlineno, tuple(cells), given

    def _of_c(self, value: Any) -> tuple[Any, ...]:
        name, owner = value.__name__, getattr(value, "__self__", None)
        if name in ASKING:
            self._refuse(f"the function {name}")
        module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
        if owner is None or isinstance(owner, type | types.ModuleType):
            module = module or getattr(owner, "__name__", "")
            if (module == "builtins" and name in IMPURE) or not _is_known(str(module)):
                self._refuse(f"the function {module}.{name}")
            return "of C", str(module), getattr(value, "__qualname__", name)
        return "of C", name, self.value(owner)

    def _module(self, module: types.ModuleType) -> tuple[Any, ...]:
        file = getattr(module, "__file__", None)
        if not is_user_file(file) and (not _is_known(module.__name__) or module.__name__.partition(".")[0] in OURS):
            self._refuse(f"the module {module.__name__}")
        return "module", module.__name__, self._number(vars(module))  # two may have one name

    def _class(self, kind: type) -> tuple[Any, ...]:
        """A class by its name; of the user's, those of its bases, too."""
        users: Any = is_user_class
        meta: Any = type(kind)
        for base in (*kind.__mro__, *meta.__mro__):
            if not users(base) and not _is_known(base.__module__):
                self._refuse(f"the class {_class_name(base)} of a library")
        if users(kind):
            self._classes.setdefault(kind)
            number = self._number(kind)  # as two may have one name
            return "class", number, _class_name(kind), tuple([_class_name(base) for base in kind.__mro__[1:]])
        return "class", _class_name(kind)

    def _refuse(self, what: str) -> Any:
        raise NoDigest(f"{self._where} ({what})" if self._where else what)

    def _check_code(self) -> None:
        """Raise NoDigest for code that does or reads more than its values."""
        for code in self._codes:
            line = f"{code.co_filename}:{code.co_firstlineno}"
            for step in dis.get_instructions(code):
                kind, name = step.opname, step.argval
                if kind in ("LOAD_GLOBAL", "LOAD_NAME") and name in IMPURE:
                    raise NoDigest(f"{name}() in {line}")
                if kind in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and name in ASKING:
                    raise NoDigest(f".{name} in {line}")
                by_name = kind == "LOAD_CONST" and isinstance(name, str) and not BY_NAME.isdisjoint(code.co_names)
                if by_name and not (ASKING | IMPURE).isdisjoint(name.split(".")):
                    raise NoDigest(f"{name!r} in {line}")
                if kind == "IMPORT_NAME":
                    there = sys.modules.get(name)
                    if there is None or not (is_user_file(getattr(there, "__file__", None)) or _is_known(name)):
                        raise NoDigest(f"import {name} in {line}")

    def _order_of_sets(self) -> object:
        """What is equal in processes in which sets that the code makes have one order; None if it makes none."""
        return hash("any string") if any(map(_makes_sets, self._codes)) else None

    def _check_classes(self) -> None:
        """Raise NoDigest for methods of the user's classes that the search has not followed, and that may be called.

        A library calls methods that take the place of its own, and Python those by which an object is shown or copied.
        """
        shows = any(
            step.opname in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC")
            or (step.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD") and step.argval in SHOWS)
            for code in self._codes
            for step in dis.get_instructions(code)
        )
        for kind in [*self._classes]:
            for made in kind.__mro__:
                if is_user_class(made):
                    self._check_class(made, kind, shows)

    def _check_class(self, made: type, kind: type, shows: bool) -> None:
        library = [b for b in kind.__mro__ if b is not object and not is_user_class(b)]
        for name, method in list(vars(made).items()):
            function = getattr(method, "__func__", None) or getattr(method, "fget", None) or method
            if not isinstance(function, types.FunctionType) or name in NOT_IN_STEPS:
                continue
            code = function.__code__
            if code in self._codes or not is_user_file(code.co_filename):
                continue
            where = f"{made.__qualname__}.{name}, which the search has not followed"
            if name in SHOWING:
                if shows and not code.co_filename.startswith("<"):
                    raise NoDigest(where)
            elif name in COPYING or any(name in vars(base) for base in library):
                raise NoDigest(where)


def _makes_sets(code: types.CodeType) -> bool:
    """Whether code makes sets, besides those in which it only looks something up."""
    steps = [*dis.get_instructions(code)]
    views = not {"keys", "items"}.isdisjoint(code.co_names)  # of which operators make sets
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        kind, value = step.opname, step.argval
        if kind in ("BUILD_SET", "SET_ADD", "SET_UPDATE"):
            return True
        if kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR") and value in ("set", "frozenset"):
            return True
        if isinstance(value, frozenset) and (after is None or after.opname != "CONTAINS_OP"):
            return True
        if views and kind == "BINARY_OP" and step.argrepr.strip("=") in ("-", "&", "|", "^"):
            return True
    return False


def _with_inner(codes: Sequence[types.CodeType]) -> Iterator[types.CodeType]:
    for code in codes:
        yield code
        yield from _with_inner([one for one in code.co_consts if isinstance(one, types.CodeType)])


def _code_form(code: types.CodeType) -> tuple[Any, ...]:
    return (
        code.co_qualname, code.co_filename, code.co_firstlineno, code.co_code, code.co_linetable,
        code.co_exceptiontable, tuple(map(_constant, code.co_consts)), code.co_names, code.co_varnames,
        code.co_freevars, code.co_cellvars, code.co_flags, code.co_argcount, code.co_posonlyargcount,
        code.co_kwonlyargcount,
    )  # fmt: skip


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code_form(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    return "..." if value is Ellipsis else value


def _files(codes: set[types.CodeType]) -> Iterator[tuple[str, bytes]]:
    """The files of code, which error messages quote, with their checksums."""
    for name in {code.co_filename for code in codes if not code.co_filename.startswith("<")}:
        try:
            yield name, hashlib.sha256(Path(name).read_bytes()).digest()
        except OSError:
            raise NoDigest(f"{name}, which cannot be read") from None


def _class_name(kind: type) -> str:
    named = f"{kind.__module__}.{kind.__qualname__}"
    return named if kind.__qualname__.rpartition(".")[2] == kind.__name__ else f"{named} ({kind.__name__})"


def _scripts_own(hooks: Any) -> Any:
    """The hooks of an optimizer without those that actorflow gives to one that has stepped."""
    ours = [getattr(hook, "__module__", None) == "actorflow.variables.optimizer_slots" for hook in hooks.values()]
    return OrderedDict([one for one, is_ours in zip(hooks.items(), ours, strict=True) if not is_ours])


def _slots(kind: type) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


def _is_known(module: str) -> bool:
    """Whether the functions of a library's module only compute, and its classes hold what ``script_form`` sees."""
    return module in PURE or (module.partition(".")[0] in ("torch", "numpy", *OURS) and not module.startswith(APART))


def _is_trusted(filename: str, module: str) -> bool:
    """Whether a library's function is known to compute only, beside what it is a wrapper of."""
    if module.startswith(APART):
        return False
    if filename.startswith((TORCH, NUMPY)) or filename == ATTACHED:
        return True
    within = filename.startswith(STDLIB) and "-packages/" not in filename
    return within and (module in PURE or Path(filename).name in WRAPPERS)
