"""A job's function goes in; the modules, optimizers and tensors it can reach come out, with all that holds them.

The search follows what the function closes over, the globals it names, its defaults, ``self``, and the
functions and methods of the user's own code that it calls.  It is the same on every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import site
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from actorflow.lazy import Result
from actorflow.places import Attribute, Cell, Item, Member, PartialArgs, Place
from actorflow_compiler.torch_internals import scaler_state
from actorflow_compiler.variables import Held, State

__all__ = ["Names", "find"]

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
METHODS = (types.FunctionType, staticmethod, classmethod, property)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
OWN_DICTS = ("_parameters", "_buffers", "_modules")  # of a module: walked by name
ALWAYS_CALLED = ("__call__", "forward", "__init__", "__new__", "__enter__", "__exit__", "__getitem__")


class Names:
    """Names given in this process: a thing keeps its name, and no two things share one."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Any, str]] = {}
        self._taken: set[str] = set()
        self._instead: dict[int, tuple[weakref.ref[Any], Any]] = {}  # id → a thing and what took its place

    def current(self, thing: Any) -> Any:
        """The thing, or what took its place."""
        old = self._instead.get(id(thing))
        return old[1] if old is not None and old[0]() is thing else thing

    def known(self, thing: Any) -> str | None:
        """The name of a thing that has one."""
        found = self._given.get(id(thing))
        return found[1] if found is not None else None

    def give(self, thing: Any, wanted: str) -> str:
        """The thing's name; ``wanted``, or ``wanted_2`` and so on where another thing has it, if it had none."""
        name = self.known(thing)
        if name is None:
            name, count = wanted, 1
            while name in self._taken:
                count += 1
                name = f"{wanted}_{count}"
            self._taken.add(name)
            self._given[id(thing)] = (thing, name)
        return name

    def replace(self, old: Any, new: Any) -> None:
        """``new`` takes the place and the name of ``old``."""
        name = self._given.pop(id(old))[1]
        self._given[id(new)] = (new, name)
        self._instead[id(old)] = (weakref.ref(old), new)


def find(
    function: Callable[..., Any],
    model: Any = None,
    optimizer: Any = None,
    names: Names | None = None,
    more: Mapping[str, Any] = {},
) -> State:
    """Everything of the script's state that ``function`` can reach.

    ``model`` and ``optimizer`` (one, a list or a dictionary of them) are taken as well and named
    ``model``, ``model.0`` and so on.  Parameters and buffers are named by their root module's variable
    and their qualified name, other tensors by their variable.  ``names`` carries the names that
    earlier searches gave, and ``more`` what the job holds besides, by the names that are wanted for it.
    """
    search = _Search(names if names is not None else Names())
    for name, given in (("model", model), ("optimizer", optimizer)):
        if given is not None:
            search.value(name, given, Item({name: given}, name))
    for name, held in more.items():
        search.value(name, held, Item({}, ""))
    search.function(function, "self")
    search.settle()
    return search.state()


class _Search:
    def __init__(self, names: Names) -> None:
        self.names = names
        self.seen: dict[int, Any] = {}  # id → the thing, kept alive so that ids stay its own
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.schedulers: list[tuple[str, LRScheduler]] = []
        self.scalers: list[tuple[str, torch.amp.GradScaler]] = []
        self.tensors: list[tuple[str, Tensor, Place]] = []
        self.attributes: dict[str, None] = {}  # names that code reads from objects, in order
        self.classes: list[type] = []
        self.globals: set[str] = set()  # names of globals, and of enclosing functions' variables, that code reads
        self.namespaces: list[tuple[str, types.ModuleType]] = []
        self.pending: deque[Callable[[], None]] = deque()

    def once(self, thing: Any) -> bool:
        if id(thing) in self.seen:
            return False
        self.seen[id(thing)] = thing
        return True

    # -- functions ---------------------------------------------------------------------------------

    def function(self, function: Any, self_name: str = "self") -> None:
        """Follow one callable."""
        if isinstance(function, types.MethodType):
            self.value(self_name, function.__self__, Item({}, ""))
            self.function(function.__func__)
        elif isinstance(function, functools.partial):
            if self.once(function):
                self.function(function.func)
                self.tuple("args", function.args, PartialArgs(function))
                self.mapping("", function.keywords)
        elif isinstance(function, types.FunctionType):
            if self.once(function):
                own = is_user_file(function.__code__.co_filename)
                if str(function.__module__).startswith("actorflow."):  # under whatever name the script has it
                    self.globals.update((f"{function.__module__}.{function.__name__}", function.__name__))
                self.pending.append(lambda: self.code(function) if own else self.wrapped_by(function))
        elif isinstance(function, staticmethod | classmethod):
            self.function(function.__func__)
        elif isinstance(function, property):
            self.function(function.fget)
        elif hasattr(function, "__wrapped__"):
            self.function(function.__wrapped__)
        elif function is not None and not isinstance(function, types.BuiltinFunctionType):
            self.value(self_name, function, Item({}, ""))

    def wrapped_by(self, function: types.FunctionType) -> None:
        """Follow what a function of a library was made from: ``torch.no_grad()`` and the like wrap functions."""
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, CALLABLES):
                    self.function(cell.cell_contents)

    def code(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.globals.add(name)
            try:
                self.value(name, cell.cell_contents, Cell(cell))
            except ValueError:  # a name that the enclosing function has not set yet
                continue
        for name in _globals_of(function.__code__, self.attributes):
            self.globals.add(name)
            if name in function.__globals__:
                self.value(name, function.__globals__[name], Item(function.__globals__, name))
        defaults = function.__defaults__ or ()
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        names = arguments[len(arguments) - len(defaults) :]
        for index, (name, default) in enumerate(zip(names, defaults, strict=True)):
            self.value(name, default, Member(Attribute(function, "__defaults__"), index, tuple))
        if function.__kwdefaults__:
            self.mapping("", function.__kwdefaults__)

    # -- values ------------------------------------------------------------------------------------

    def value(self, path: str, value: Any, place: Place) -> None:
        """Look at one value that was reached by ``path`` and is held at ``place``."""
        if isinstance(value, (*PLAIN, Result)):
            return
        if isinstance(value, Tensor):
            self.tensors.append((path, value, place))
        elif isinstance(value, tuple):
            self.tuple(path, value, place)
        elif isinstance(value, types.MethodType | types.FunctionType | functools.partial | staticmethod | classmethod):
            self.function(value, path)
        elif not self.once(value):
            return
        elif isinstance(value, nn.Module):
            self.module(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append((path, value))
        elif isinstance(value, LRScheduler):
            self.schedulers.append((path, value))
        elif isinstance(value, torch.amp.GradScaler):
            if value.is_enabled():
                self.scalers.append((path, value))
        elif isinstance(value, Mapping):
            self.mapping(path, value)
        elif isinstance(value, list | deque):
            for index, item in enumerate(value):
                self.value(f"{path}.{index}", item, Item(value, index))
        elif isinstance(value, set | frozenset):
            for index, item in enumerate(sorted(value, key=_sort_key)):
                if isinstance(item, nn.Module):  # tensors cannot be exchanged inside a set
                    self.value(f"{path}.{index}", item, Item({}, ""))
        elif isinstance(value, types.ModuleType):
            if value.__name__.startswith("actorflow."):
                self.globals.add(value.__name__)
            if is_user_file(getattr(value, "__file__", None)):
                self.namespaces.append((path, value))
        elif isinstance(value, type):
            if is_user_class(value):
                self.classes.append(value)
        elif isinstance(value, NAMESPACES) or is_user_class(type(value)):  # type: ignore[arg-type]  # a class is hashable
            self.object(path, value)
        elif hasattr(value, "__wrapped__"):
            self.function(value.__wrapped__, path)

    def tuple(self, path: str, value: tuple[Any, ...], place: Place) -> None:
        rebuild: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
        for index, item in enumerate(value):
            self.value(f"{path}.{index}", item, Member(place, index, rebuild))

    def mapping(self, path: str, value: Mapping[Any, Any]) -> None:
        for index, (key, item) in enumerate(value.items()):
            name = key if isinstance(key, str | int) else index
            self.value(f"{path}.{name}" if path else str(name), item, Item(value, key))

    def object(self, path: str, value: Any) -> None:
        self.classes.append(type(value))
        self.mapping(path, getattr(value, "__dict__", {}))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    self.value(f"{path}.{name}", getattr(value, name), Attribute(value, name))
        if hasattr(value, "__wrapped__"):
            self.function(value.__wrapped__, path)

    def module(self, path: str, root: nn.Module) -> None:
        self.modules.append((path, root))
        for prefix, module in root.named_modules():
            self.once(module)
            self.classes.append(type(module))
            where = f"{path}.{prefix}" if prefix else path
            for name, item in list(module.__dict__.items()):
                if name not in OWN_DICTS:
                    self.value(f"{where}.{name}", item, Item(module.__dict__, name))

    # -- the end -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Follow functions, and the methods and module attributes that code names, until nothing new turns up."""
        followed: set[tuple[int, str]] = set()
        while True:
            while self.pending:
                self.pending.popleft()()
            before = len(followed)
            for owner in list(self.classes):
                for name in [*ALWAYS_CALLED, *self.attributes]:
                    if (id(owner), name) not in followed:
                        followed.add((id(owner), name))
                        self.method(owner, name)
            for path, namespace in list(self.namespaces):
                for name in list(self.attributes):
                    if (id(namespace), name) not in followed:
                        followed.add((id(namespace), name))
                        if name in namespace.__dict__:
                            self.value(f"{path}.{name}", namespace.__dict__[name], Item(namespace.__dict__, name))
            if len(followed) == before and not self.pending:
                break
        for path, scheduler in self.schedulers:
            if self.once(scheduler.optimizer):
                self.optimizers.append((f"{path}.optimizer", scheduler.optimizer))

    def method(self, owner: type, name: str) -> None:
        for base in owner.__mro__:
            if name in base.__dict__:
                if is_user_class(base):
                    found = base.__dict__[name]
                    if isinstance(found, METHODS) or hasattr(found, "__wrapped__"):
                        self.function(found)
                return

    def state(self) -> State:
        """What was found, named: modules first, then loose tensors, then what only optimizers hold."""
        state = State(named=frozenset(self.globals.union(self.attributes)))
        held: dict[int, Held] = {}

        def hold(tensor: Tensor, wanted: str, kind: str, place: Place) -> None:
            now = self.names.current(tensor)
            if now is not tensor:
                place(now)
                tensor = now
            if id(tensor) not in held:
                name = self.names.give(tensor, wanted)
                held[id(tensor)] = state.held[name] = Held(name, kind, tensor)
            held[id(tensor)].places.append(place)

        inner = {id(child) for _, m in self.modules for child in m.modules() if child is not m}
        for path, root in self.modules:
            if id(root) in inner:
                continue
            root_name = self.names.give(root, path)
            state.modules[root_name] = root
            for prefix, module in root.named_modules():
                where = f"{root_name}.{prefix}" if prefix else root_name
                for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            hold(tensor, f"{where}.{name}", kind, Item(tensors, name))
        for path, tensor, place in self.tensors:
            trained = tensor.requires_grad and tensor.is_leaf
            hold(tensor, path, "parameter" if trained else "tensor", place)
        for path, scaler in self.scalers:
            title = self.names.give(scaler, path)
            state.scalers[title] = scaler
            tensors = scaler_state(scaler)
            for name, tensor in tensors:
                hold(tensor, f"{title}.{name}", "tensor", Item(vars(scaler), name))
            scale, tracker = (held[id(vars(scaler)[name])].name for name, _ in tensors)
            state.beside[tracker] = scale
        for path, optimizer in self.optimizers:
            name = self.names.give(optimizer, path)
            state.optimizers[name] = optimizer
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    hold(parameter, f"{name}.{g}.{i}", "parameter", Item(group["params"], i))
        return state


def _globals_of(code: types.CodeType, attributes: MutableMapping[str, None]) -> Iterator[str]:
    """The global names that code reads, in order; the attribute names go to ``attributes``.

    What it reads of anything named ``layers`` is a name, too: ``layers.dense``.
    """
    seen: dict[str, None] = {}
    before: object = None
    for instruction in dis.get_instructions(code):
        if before == "layers" and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            seen[f"layers.{instruction.argval}"] = None
        before = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            seen[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes[instruction.argval] = None
    yield from seen
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant, attributes)


def _sort_key(item: Any) -> tuple[str, str]:
    """An order of a set's items that does not depend on addresses."""
    return type(item).__qualname__, repr(item) if isinstance(item, nn.Module | str | int) else ""


@functools.cache
def _library_folders() -> Sequence[str]:
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(torch.__file__).parent)]
    packages = ("actorflow", "actorflow_compiler", "actorflow_scheduler", "actorflow_protos")
    ours = [str(Path(file).parent) for name in packages if (file := getattr(sys.modules.get(name), "__file__", None))]
    return tuple({str(Path(f).resolve()) + "/" for f in folders + ours})


@functools.cache
def is_user_file(filename: str | None) -> bool:
    """Whether a source file is the user's own: of no library, and not ours."""
    if filename is None or filename.startswith("<frozen"):
        return False
    if filename.startswith("<"):
        return True
    return not str(Path(filename).resolve()).startswith(tuple(_library_folders()))


@functools.cache
def is_user_class(owner: Any) -> bool:
    """Whether a class comes from the user's own code."""
    if owner.__module__ == "__main__":
        return True
    module = sys.modules.get(owner.__module__)
    return module is not None and is_user_file(getattr(module, "__file__", None))
