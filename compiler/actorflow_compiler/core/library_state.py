"""Detect settings of torch, and functions of it that were replaced, on which a capture depends beside the script.

A script may change either before it calls a job, and nothing that is read of the script itself would show it.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import hashlib
import sys
import types
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from actorflow_compiler.core.digest import NoDigest
from actorflow_compiler.core.torch_internals import setting_readers

__all__ = ["library_names", "torch_settings"]

ROOTS = (
    "math", "cmath", "operator", "functools", "itertools", "contextlib", "copy", "collections", "builtins", "numpy",
    "numpy.linalg", "numpy.fft",
)  # fmt: skip
PREFIXES = (  # of modules whose code runs while a step is captured
    "torch", "torch.amp", "torch.autograd", "torch.backends", "torch.cuda.amp", "torch.distributions", "torch.func",
    "torch.linalg", "torch.masked", "torch.nested", "torch.nn", "torch.optim", "torch.special", "torch.utils",
    "torch.fft", "torch.fx", "torch._decomp", "torch._higher_order_ops", "torch._prims", "torch._prims_common",
    "torch._refs", "torch._subclasses", "torch._functorch", "torch._library", "torch.random",
)  # fmt: skip
WITHOUT = ("torch.utils.data", "torch.fx.passes", "torch.utils.tensorboard", "torch.utils._sympy", "torch.nn.backends")
COUNTERS = frozenset((  # names that a capture and other calls change, and that say nothing of what a function does
    "torch.utils.hooks.RemovableHandle.next_id", "torch.autograd.profiler._cupti_monitor_module",
    "torch.autograd.profiler._cupti_monitor_checked", "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_hits",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_misses", "torch.fx.traceback.current_meta",
    "torch.masked.maskedtensor.binary.INPLACE_BINARY_NAMES", "torch.masked.maskedtensor.unary.INPLACE_UNARY_NAMES",
))  # fmt: skip
PLAIN = (bool, int, float, str, type(None))
DEEPEST = 3  # levels of what is nested in a value that are told apart
HOLDERS = (types.SimpleNamespace, collections.OrderedDict, collections.deque, np.ndarray, torch.Tensor)  # of a script
MOST = 200  # items of a container whose contents count
_CALLABLES: tuple[Any, ...] = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip


def torch_settings() -> tuple[tuple[str, str], ...]:
    """Torch's settings in this process, and NumPy's, by name, as text."""
    found = [("NumPy's printing", repr(np.get_printoptions())), ("NumPy's errors", repr(np.geterr()))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, read in setting_readers():
            value: object = "none"
            with contextlib.suppress(Exception):  # where two ways of setting it contradict each other, say
                value = read()
            found.append((name, repr(value)))
    return tuple(found)


def library_names(is_users: Callable[[str], bool], but: Container[str] = ()) -> Mapping[str, str]:
    """Module of torch or Python → a digest of what its names, and those of its classes, stand for.

    Modules that a process has not imported are left out, and those in ``but``.  Raises NoDigest where a function or an
    object of the script, which is one whose file ``is_users``, has taken the place of theirs or a place beside it.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, types.ModuleType) and _counts(name) and name not in but:
            held = hashlib.sha256()
            for text in _texts(name, module, is_users):
                held.update(text.encode("utf-8", "surrogatepass"))
            found[name] = held.hexdigest()[:16]
    return found


def _counts(name: str) -> bool:
    if name in ROOTS:
        return True
    if not name.startswith("torch") or name.startswith(WITHOUT):
        return False
    return name == "torch" or (name.startswith("torch._") and name.count(".") == 1) or _below(name)


def _below(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in PREFIXES if one != "torch")


def _texts(name: str, module: types.ModuleType, is_users: Callable[[str], bool]) -> Iterator[str]:
    """A line for each name of a module but those of functions that are as they were written in its own file."""
    file = getattr(module, "__file__", None)
    for key, value in list(vars(module).items()):
        if key.startswith("__") and (module is not builtins or key.endswith("__")):
            continue
        if isinstance(value, types.ModuleType) and value.__name__ == f"{name}.{key}":
            continue  # which is there once anybody has imported it
        if f"{name}.{key}" in COUNTERS:
            continue
        of = _Identity(f"{name}.{key}", is_users)
        if type(value) is types.FunctionType:
            if text := of.unless_own(value, file, key):
                yield f"{key} {text}\n"
        elif isinstance(value, type):
            own = value.__module__ == name
            yield f"{key} {of(value)}\n"
            for inner, one in list(vars(value).items()) if own else ():
                known = f"{name}.{key}.{inner}" in COUNTERS or inner == "__slotnames__"
                if known or (inner.startswith("__") and isinstance(one, (str, dict, *_CALLABLES))):
                    continue
                of = _Identity(f"{name}.{key}.{inner}", is_users)
                if type(one) is not types.FunctionType:
                    yield f"{key}.{inner} {of(one)}\n"
                elif text := of.unless_own(one, file, f"{value.__qualname__}.{inner}"):
                    yield f"{key}.{inner} {text}\n"
        else:
            yield f"{key} {of(value)}\n"


class _Identity:
    """What a value is, in words that are equal in each process.

    Raises NoDigest for what is the script's, wherever in the value it is: the words would not say what that does.
    """

    def __init__(self, where: str, is_users: Callable[[str], bool]) -> None:
        self._where, self._is_users = where, is_users
        self._is_public = "._" not in where  # else a container of torch's own, which may hold whatever it has met

    def unless_own(self, function: types.FunctionType, file: str | None, name: str) -> str:
        """The words for a function, of which its defaults are all that counts if it is the file's own of this name."""
        code = function.__code__
        if code.co_filename != file or function.__qualname__ != name or code.co_qualname != name:
            return self(function)
        if function.__defaults__ is None and function.__kwdefaults__ is None:
            return ""
        return f"{self(function.__defaults__)} {self(function.__kwdefaults__)}"

    def __call__(self, value: Any, depth: int = 0) -> str:
        """The words for a value."""
        kind = type(value)
        if kind in PLAIN:
            return repr(value)
        if kind is types.FunctionType:
            return self._function(value, depth)
        if kind in _CALLABLES:
            return f"{kind.__name__} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}"
        if isinstance(value, type):
            self._check_class(value)
            return f"{value.__module__}.{value.__qualname__}"
        self._check_class(kind)
        if parts := self._parts(value, kind):
            if depth > DEEPEST and self._is_public:
                raise NoDigest(f"{self._where}, which is nested too deep")
            inner = () if depth > DEEPEST else [self(part, depth + 1) for part in parts]
            return f"{kind.__name__}({', '.join(inner)})"
        if isinstance(value, HOLDERS) and self._is_public:
            raise NoDigest(f"{self._where}, which is a {kind.__module__}.{kind.__qualname__}")
        name = getattr(value, "__name__", "") if kind.__module__ in ("functools", "numpy") else ""
        return f"{kind.__module__}.{kind.__qualname__} {name}"

    def _parts(self, value: Any, kind: type) -> Sequence[Any]:
        """What a value consists of, as far as that is known."""
        if kind in (staticmethod, classmethod):
            return (value.__func__,)
        if kind is property:
            return (value.fget, value.fset)
        if kind is types.MethodType:
            return (value.__func__, value.__self__)
        if kind is functools.partial:
            return (value.func, value.args, value.keywords)
        if kind is type(functools.cache(id)):
            return (value.__wrapped__,)
        if not self._is_public or len(value if kind in (tuple, list, dict, set, frozenset) else ()) > MOST:
            return ()  # tables, which torch fills as it needs them
        if kind in (tuple, list):
            return tuple(value)
        if kind is dict:
            return [part for item in list(value.items()) for part in item]
        if kind in (set, frozenset) and all(type(item) in PLAIN for item in value):
            return sorted(value, key=repr)
        return ()

    def _function(self, value: types.FunctionType, depth: int) -> str:
        code = value.__code__
        if code.co_filename.startswith("<"):  # made of text
            module = sys.modules.get(str(value.__globals__.get("__name__")))
            file = getattr(module, "__file__", None)
            if not str(value.__module__).startswith("namedtuple_") and (file is None or self._is_users(file)):
                self._refuse(code)
        elif self._is_users(code.co_filename):
            self._refuse(code)
        for cell in value.__closure__ or ():  # a library's wrapper of the script's function
            with contextlib.suppress(ValueError):
                inner = cell.cell_contents
                if depth <= DEEPEST:
                    self(inner, depth + 1)
        given = f"{self(value.__defaults__, depth + 1)} {self(value.__kwdefaults__, depth + 1)}"
        return f"{value.__module__} {value.__qualname__} {code.co_qualname} {code.co_firstlineno} {given}"

    def _check_class(self, kind: type) -> None:
        name = kind.__module__
        file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
        if name == "__main__" or (file is not None and self._is_users(file)):
            raise NoDigest(f"{self._where}, in which is the script's {name}.{kind.__qualname__}")

    def _refuse(self, code: types.CodeType) -> None:
        raise NoDigest(f"{self._where}, in whose place is a function of {code.co_filename}:{code.co_firstlineno}")
