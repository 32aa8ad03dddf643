"""What of torch a capture can meet that is not the script's: its settings, and whether its functions are its own.

A script may change either before it calls a job, and nothing that is read of the script itself would show it.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import sys
import types
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from actorflow_compiler.core.digest import NoDigest
from actorflow_compiler.core.torch_internals import setting_readers

__all__ = ["library_names", "torch_settings"]

ROOTS = ("math", "cmath", "operator", "functools", "itertools", "contextlib", "copy", "collections", "builtins")
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
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_misses",
))  # fmt: skip
PLAIN = (bool, int, float, str, type(None))
_CALLABLES: tuple[Any, ...] = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip


def torch_settings() -> tuple[tuple[str, str], ...]:
    """Torch's settings in this process, by name, as text."""
    found = []
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

    Modules that a process has not imported are left out, and those in ``but``.  Raises NoDigest where a function of the
    script, which is one whose file ``is_users``, has taken the place of theirs.
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
    """A line for each name of a module that is not a function of its own file, under its own name."""
    file = getattr(module, "__file__", None)
    for key, value in list(vars(module).items()):
        if key.startswith("__") and (module is not builtins or key.endswith("__")):
            continue
        if isinstance(value, types.ModuleType) and value.__name__ == f"{name}.{key}":
            continue  # which is there once anybody has imported it
        if f"{name}.{key}" in COUNTERS:
            continue
        if type(value) is types.FunctionType:
            if value.__code__.co_filename != file or value.__qualname__ != key:
                yield f"{key} {_ident(value, f'{name}.{key}', is_users)}\n"
        elif isinstance(value, type):
            own = value.__module__ == name
            yield f"{key} {value.__module__}.{value.__qualname__}\n"
            for inner, one in list(vars(value).items()) if own else ():
                if type(one) is types.FunctionType:
                    code = one.__code__
                    if code.co_filename == file and one.__qualname__ == f"{value.__qualname__}.{inner}":
                        continue
                known = f"{name}.{key}.{inner}" in COUNTERS or inner == "__slotnames__"
                if not (known or (inner.startswith("__") and isinstance(one, (str, dict, *_CALLABLES)))):
                    yield f"{key}.{inner} {_ident(one, f'{name}.{key}.{inner}', is_users)}\n"
        else:
            yield f"{key} {_ident(value, f'{name}.{key}', is_users)}\n"


def _ident(value: Any, where: str, is_users: Callable[[str], bool]) -> str:
    """What a value is, in words that are equal in each process."""
    kind = type(value)
    if kind is types.FunctionType:
        code = value.__code__
        if is_users(code.co_filename) and not code.co_filename.startswith("<"):
            raise NoDigest(f"{where}, in whose place is a function of {code.co_filename}:{code.co_firstlineno}")
        return f"{value.__module__} {value.__qualname__} {code.co_qualname} {code.co_firstlineno}"
    if kind in _CALLABLES:
        return f"{kind.__name__} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}"
    if kind in (staticmethod, classmethod):
        return f"{kind.__name__} {_ident(value.__func__, where, is_users)}"
    if kind is property:
        return " ".join(_ident(one, where, is_users) for one in (value.fget, value.fset) if one is not None)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value) if kind in PLAIN else f"{kind.__module__}.{kind.__qualname__}"
