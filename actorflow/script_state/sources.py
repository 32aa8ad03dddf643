"""Sources of Python state: the objects from which a step reads values, each with its values by key.

A source has one holder of values: a dictionary of globals, a closure's cell, a function with its defaults, the
attributes of an object, a dictionary, a list.  Guards read values from sources, and side effects are written to them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import re
import types
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actorflow.standins.beside import BESIDE
from actorflow_compiler.core.expressions import has_numbers, number_of
from actorflow_compiler.core.torch_internals import hooks_of, script_attributes, script_constants, users_step_hooks
from actorflow_compiler.values.variables import RECURRENT, attributes_given

__all__ = [
    "ArraySource", "AttributesSource", "CacheEntriesSource", "CacheSource", "ClassSource", "ClosureSource",
    "ContextVarSource", "CountersSource", "DecimalSource", "DefaultsSource", "EnvironmentSource", "GeneratorSource",
    "Getter", "GlobalsSource", "HooksSource", "ItemsSource", "KindSource", "LengthSource", "LibrarySource",
    "LogLevelSource", "LookedAtSource", "MappingSource", "MemoryFileSource", "ModuleSource",
    "OWN_DICTS", "ParamGroupSource", "SchedulerSource", "ScriptSource", "SlotsSource", "StateSource",
    "StepHooksSource", "StoredClassSource", "StoredGlobalsSource", "SubclassesSource", "TensorAttributesSource",
    "TypeSource", "WholeEnvironmentSource", "cache_table", "generator_state", "getter",
]  # fmt: skip

OF_LIBRARIES = ("GLOO_", "GRPC_", "KMP_", "NCCL_", "TORCHELASTIC_", "TORCHINDUCTOR_", "TORCH_NCCL_", "TRITON_")
FEW = 128  # results in a cache, which are looked at in every call
MANY = 2000  # results in a cache, which would take milliseconds to look at
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
CONSTANTS = "its constants"  # tensors that torch.jit has compiled into code
Getter = Callable[[Any], Iterable[Any]]  # a holder → some of its values

OWN_DICTS = ("_parameters", "_buffers", "_modules")  # dictionaries of a module whose entries have sources of their own
# attributes that torch's modules and actorflow use internally, which are no state of the script
OF_MODULES = "_non_persistent_buffers_set"  # all modules have it
INTERNAL = (frozenset(vars(nn.Module())) | {*RECURRENT, BESIDE}) - {"training"}


@functools.lru_cache(1024)
def getter(*keys: Any) -> Getter:
    """A getter of the values of these keys, always as a tuple; cached, so that holders with the same keys share one."""
    return itemgetter(*keys, *keys) if len(keys) == 1 else itemgetter(*keys)


class StateSource:
    """A holder of values that code can read; ``path`` is how the script reaches it."""

    names: tuple[str, ...] = ()  # names of the values that are read; empty: all
    reads: frozenset[str] | None = None  # names of the attributes that code reads of it; None: any
    whole = False  # whether all of its values count as read, because a library's code may read any
    of_library = False  # whether it belongs to a library's object: changes that code cannot read are ignored
    counts = False  # whether calls change its numbers; plans state themselves for which values they are valid
    by_name = False  # whether ops of plans read its numbers themselves

    def __init__(self, path: str, holder: Any) -> None:
        self.path, self.holder = path, holder

    def values(self) -> dict[Any, Any]:
        """All values of the source, by key."""
        raise NotImplementedError

    def read(self) -> dict[Any, Any]:
        """The values that code can read, by key."""
        return self.values()

    def compared(self, now: dict[Any, Any], old: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Of the values that are there ``now``, those that are to be the ``old`` ones."""
        return now

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """Getters that quickly fetch the values in ``read`` from the holder; None if only ``read()`` can do that."""
        return None

    def put(self, key: Any, value: Any) -> None:
        """Set a value.  Raises TypeError if that is impossible."""
        raise TypeError(f"{self.label(key)} is not to be written")

    def drop(self, key: Any) -> None:
        """Delete a value.  Raises TypeError if that is impossible."""
        raise TypeError(f"{self.label(key)} is not to be written")

    def label(self, key: Any) -> str:
        """The place of a value, for messages: ``trainer.history[0]``."""
        return f"{self.path}.{key}" if self.path else str(key)


class LookedAtSource(StateSource):
    """What a step only looks at: it is never put back, and no call changes it."""


class _DictSource(StateSource):
    """A source whose holder is a dictionary."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return dict(self.holder.items())

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        self.holder[key] = value

    def drop(self, key: Any) -> None:
        """See ``StateSource``."""
        del self.holder[key]


class GlobalsSource(_DictSource):
    """Globals of functions, and modules of the user: the entries of a dictionary that code names."""

    def __init__(self, path: str, holder: Any, names: Iterable[str]) -> None:
        super().__init__(path, holder)
        self.names = tuple(names)

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {name: self.holder[name] for name in self.names if name in self.holder}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``; includes missing names, because a new global may hide a builtin."""
        return (*_got(read), *_misses(self.names, read))


class EnvironmentSource(GlobalsSource):
    """The process's environment: the variables that code may name."""

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``; None, because an added variable counts as well."""
        return None

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"{self.path}[{key!r}]"


class WholeEnvironmentSource(EnvironmentSource):
    """The process's environment: all variables but those that libraries set for themselves while the script runs."""

    def __init__(self, path: str, holder: Any, names: Iterable[str] = ("*",)) -> None:
        super().__init__(path, holder, names)

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {name: text for name, text in self.holder.items() if not name.startswith(OF_LIBRARIES)}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (_encoded,) if hasattr(self.holder, "_data") else None  # decoding takes ten times as long


class _NamedAttributesSource(StateSource):
    """The attributes of an object that code names."""

    def __init__(self, path: str, holder: Any, names: Iterable[str]) -> None:
        super().__init__(path, holder)
        self.names = tuple(names)

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        setattr(self.holder, key, value)

    def drop(self, key: Any) -> None:
        """See ``StateSource``."""
        delattr(self.holder, key)


class LibrarySource(_NamedAttributesSource):
    """A library's module: the attributes that code names."""

    of_library = True

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        found = {}
        for name in self.names:
            with contextlib.suppress(Exception):  # a property may raise anything
                found[name] = getattr(self.holder, name)
        return found

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (*_attributes(read), *(lambda holder, get=get: get(vars(holder)) for get in _misses(self.names, read)))


class StoredGlobalsSource(GlobalsSource):
    """Globals that code sets, whether it reads them or not."""


class ClassSource(_NamedAttributesSource):
    """The class attributes (not inherited) that code names."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {name: self.holder.__dict__[name] for name in self.names if name in self.holder.__dict__}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        of_dict = (*_got(read), *_misses(self.names, read))  # the class may get missing names
        return tuple(lambda owner, get=get: get(owner.__dict__) for get in of_dict)


class SubclassesSource(StateSource):
    """The subclasses of a class, where code asks for ``__subclasses__``."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {f"__subclasses__()[{at}]": made for at, made in enumerate(type.__subclasses__(self.holder))}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (type.__subclasses__,)


class StoredClassSource(ClassSource):
    """Class attributes that code sets, whether it reads them or not."""


class AttributesSource(_DictSource):
    """The ``__dict__`` of an object or module; code reads the attributes that it names, or all if ``whole``."""

    def __init__(self, path: str, holder: dict[str, Any], whole: bool, of_library: bool = False) -> None:
        super().__init__(path, holder)
        self.whole, self.of_library = whole, of_library

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        internal = INTERNAL if OF_MODULES in self.holder else (BESIDE,)
        return {name: value for name, value in self.holder.items() if name not in internal}

    def read(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        found = self.values()
        reads = None if self.whole else self.reads
        return found if reads is None else {name: value for name, value in found.items() if name in reads}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``; checks that unread attributes exist, because the number of attributes is compared."""
        unread = [name for name in self.values() if name not in read]
        return (*_got(read), *([lambda holder: map(holder.__contains__, unread)] if unread else []))


class ModuleSource(AttributesSource):
    """The ``__dict__`` of an ``nn.Module``, with the dictionaries of its parameters, buffers and child modules."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {**super().values(), **{name: self.holder[name] for name in OWN_DICTS}}

    def read(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {**super().read(), **{name: self.holder[name] for name in OWN_DICTS}}


class CountersSource(AttributesSource):
    """Attributes whose numbers each call changes; code never counts as reading these numbers."""

    counts = True

    def __init__(self, path: str, holder: dict[str, Any]) -> None:
        super().__init__(path, holder, whole=True)

    def read(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {key: value for key, value in super().read().items() if not has_numbers(value)}


class SchedulerSource(CountersSource):
    """The attributes of a learning-rate scheduler."""


class ParamGroupSource(CountersSource):
    """A parameter group of an optimizer; plans may read its settings themselves (``by_name``)."""

    def __init__(self, path: str, holder: dict[str, Any], by_name: bool) -> None:
        super().__init__(path, holder)
        self.by_name = by_name

    def read(self) -> dict[Any, Any]:
        """See ``StateSource``; without the learning rate, which may be a tensor."""
        return {key: value for key, value in super().read().items() if key != "lr"}

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``; a learning rate that is a tensor is filled in place, as schedulers do."""
        now = self.holder.get(key)
        if isinstance(now, Tensor) and number_of(value):
            now.fill_(value)
        else:
            self.holder[key] = value

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"{self.path}[{key!r}]"


class MappingSource(_DictSource):
    """A mapping, whose keys and their order matter; with ``dots`` its items are labelled as attributes of a module."""

    def __init__(self, path: str, holder: Any, dots: bool = False) -> None:
        super().__init__(path, holder)
        self.dots = dots

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (iter, dict.values) if isinstance(self.holder, dict) else None

    @property
    def has_plain_keys(self) -> bool:
        """Whether it is a dictionary whose keys are all plain strings, so that equal keys are interchangeable."""
        return isinstance(self.holder, dict) and all(type(key) is str for key in self.holder)

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        said = "a tensor" if isinstance(key, Tensor) else _ADDRESS.sub("", repr(key))  # without addresses
        return super().label(key) if self.dots or not self.path else f"{self.path}[{said}]"


class ItemsSource(StateSource):
    """A list, a deque or a set."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return dict(enumerate(self.holder))

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (iter,)

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        self.holder[key] = value

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"{self.path}[{key}]"


class ClosureSource(StateSource):
    """A variable of an enclosing function; the holder is its cell."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        try:
            return {self.path: self.holder.cell_contents}
        except ValueError:  # the enclosing function has not set it yet
            return {}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (_content,) if read else None

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        self.holder.cell_contents = value

    def drop(self, key: Any) -> None:
        """See ``StateSource``."""
        del self.holder.cell_contents

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return self.path


class SlotsSource(_NamedAttributesSource):
    """The slots of an object (``__slots__``)."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {name: getattr(self.holder, name) for name in self.names if hasattr(self.holder, name)}

    def read(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {n: v for n, v in self.values().items() if self.reads is None or n in self.reads}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        wanted = [name for name in self.names if self.reads is None or name in self.reads]
        if len(read) != len(wanted):  # an unset slot may be set
            return None
        return _attributes(read)

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        object.__setattr__(self.holder, key, value)  # works for frozen dataclasses as well

    def drop(self, key: Any) -> None:
        """See ``StateSource``."""
        object.__delattr__(self.holder, key)


class DefaultsSource(StateSource):
    """The code of a function, and the default values of its parameters."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        code = self.holder.__code__
        defaults = self.holder.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        found = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        return {"": code, "*": self.holder.__kwdefaults__, **found}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (_defaults,)

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``; only for defaults."""
        if key in ("", "*"):
            super().put(key, value)
        defaults = {name: was for name, was in self.values().items() if name not in ("", "*")}
        self.holder.__defaults__ = (*(defaults | {key: value}).values(),)

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        if key in ("", "*"):
            return f"the {'defaults of keywords' if key else 'code'} of {self.path}"
        return f"{key} (a default of {self.path})"


class ArraySource(StateSource):
    """A NumPy, Python or C array, or mutable bytes: its contents, or their checksum."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        array = self.holder
        if not isinstance(array, np.ndarray):
            return {"": array.tobytes() if isinstance(array, np.void) else bytes(array)}
        contents = tuple(array.ravel().tolist()) if array.dtype.hasobject else zlib.crc32(array.tobytes())
        return {"": (str(array.dtype), array.shape, contents)}

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return self.path


class MemoryFileSource(ArraySource):
    """A file in memory (``io.StringIO``, ``io.BytesIO``): its contents and position."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {"": (self.holder.getvalue(), self.holder.tell()) if not self.holder.closed else None}


class ContextVarSource(StateSource):
    """A ``contextvars.ContextVar``: its value in the current context."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        try:
            return {"": self.holder.get()}
        except LookupError:  # it has no value
            return {}

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        self.holder.set(value)

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return self.path


class LogLevelSource(ArraySource):
    """A logger: its effective level, and whether it is disabled."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        log = self.holder
        return {"": (log.getEffectiveLevel(), bool(log.disabled), log.manager.disable)}


class DecimalSource(ArraySource):
    """The module ``decimal``: this thread's context (precision, rounding, ...)."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        context = self.holder.getcontext()
        return {"": (context.prec, context.rounding, context.Emin, context.Emax, context.clamp)}


class TypeSource(StateSource):
    """The class of an object, and the class's bases."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {"": type(self.holder), "bases": type(self.holder).__mro__}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (_type,)

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        if not key:
            self.holder.__class__ = value

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"the {'bases of the ' * bool(key)}class of {self.path}"


class KindSource(TypeSource):
    """The class of a module.  Guards fetch the classes of all modules at once."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return {"": type(self.holder)}

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return ()


class GeneratorSource(StateSource):
    """A random generator of Python, NumPy or torch: its state."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``; nothing for torch's generators, whose draws a capture sees itself."""
        return {} if isinstance(self.holder, torch.Generator) else {"": generator_state(self.holder)}

    def read(self) -> dict[Any, Any]:
        """See ``StateSource``; nothing, because a step must not draw from it, and other draws make no difference."""
        return {}

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return self.path


class CacheSource(StateSource):
    """A function with ``functools.lru_cache``: the tensors in its cache.

    A cache without a limit is a dictionary, which has a source of its own (``cache_table``); then this source is empty.
    """

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        if cache_table(self.holder) is not None:
            return {}
        leaves = pytree.tree_leaves(gc.get_referents(self.holder))
        return dict(enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor)))

    def read(self) -> dict[Any, Any]:
        """See ``StateSource``; nothing, because a cache only holds results of its function."""
        return {}

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"the cache of {self.path}"


class CacheEntriesSource(LookedAtSource):
    """What ``functools.lru_cache`` with a limit keeps: results by key.  It may get more, which makes no difference.

    A cache that is full forgets some, which its function gives again; what it keeps is only lost when it is cleared.
    One with more than ``MANY`` results is not looked into.
    """

    def __init__(self, path: str, holder: Any) -> None:
        super().__init__(path, holder)
        self._counts: Any = None  # of the cache when it was last looked into
        self._entries: dict[Any, Any] = {}

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``; a cache with more than ``FEW`` results is only looked into if it may have others."""
        counts, had = self.holder.cache_info(), self._counts
        if counts.currsize > MANY:
            return {}
        grown = had is None or (counts.misses, counts.currsize) != (had.misses, had.currsize)
        if grown or counts.hits < had.hits or counts.currsize <= FEW:
            self._entries = _cached(self.holder)
        self._counts = counts
        return self._entries

    def compared(self, now: dict[Any, Any], old: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """See ``StateSource``."""
        counts = self.holder.cache_info()
        if now is old or counts.currsize > MANY:
            return old
        full = counts.currsize == counts.maxsize
        return {key: now.get(key, value) for key, value in old.items() if key in now or full}

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"what the cache of {self.path} keeps"


def _cached(function: Any) -> dict[Any, Any]:
    """The results in a cache with a limit, by key; nothing where Python keeps them in another way."""
    kept = gc.get_referents(function)[1 : 1 + 3 * function.cache_info().currsize]
    kinds = {getattr(kind, "__name__", "") for kind in kept[2::3]}  # each result is after its key, before what holds it
    return dict(zip(kept[::3], kept[1::3], strict=True)) if kinds <= {"_lru_list_elem"} else {}


def cache_table(function: Any) -> dict[Any, Any] | None:
    """The dictionary in which ``functools.cache`` keeps results; None for a cache with a limit, which has none."""
    if function.cache_parameters()["maxsize"] is not None:
        return None
    dicts = (one for one in gc.get_referents(function) if type(one) is dict)
    return next((one for one in dicts if one is not vars(function)), None)


class ScriptSource(StateSource):
    """The attributes of a torch.jit module besides parameters, buffers and modules; for a function only its constants.

    The constants are tensors that were compiled into the code; their values here are their version counters.
    """

    def __init__(self, path: str, holder: Any) -> None:
        super().__init__(path, holder)
        self.program: Any = None
        scripts = [holder]
        if isinstance(holder, torch.jit.ScriptModule):
            self.program, self.names = script_attributes(holder)
            scripts = [self.program._get_method(name) for name in self.program._method_names()]
        self.constants = [constant for script in scripts for constant in script_constants(script)]

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        found: dict[Any, Any] = {name: self.program.getattr(name) for name in self.names}
        found = {name: _frozen(value) for name, value in found.items()}
        if self.constants:
            found[CONSTANTS] = tuple(constant._version for constant in self.constants)
        return found

    def tensors(self) -> Iterable[tuple[str, int, Tensor]]:
        """The tensors among the attributes and in lists: name, position (-1 for the attribute itself), tensor."""
        for name in self.names:
            value = self.program.getattr(name)
            items = enumerate(value) if isinstance(value, list) else [(-1, value)]
            yield from ((name, at, item) for at, item in items if isinstance(item, Tensor))

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``; does nothing for lists and dictionaries, because torch.jit returns copies of them."""
        if key != CONSTANTS and not isinstance(self.program.getattr(key), list | dict | tuple):
            self.program.setattr(key, value)


class HooksSource(StateSource):
    """The hooks of a module, a tensor or an optimizer."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return hooks_of(self.holder)

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"a hook of {self.path} ({key})"


class LengthSource(LookedAtSource):
    """The length of a library's object."""

    of_library = True

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``; empty if the object has no length."""
        with contextlib.suppress(Exception):  # ``__len__`` may raise anything
            return {"": len(self.holder)}
        return {}

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return f"the length of {self.path}"


class StepHooksSource(HooksSource):
    """The script's global hooks for all optimizers."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return users_step_hooks()

    def label(self, key: Any) -> str:
        """See ``StateSource``."""
        return self.path


class TensorAttributesSource(StateSource):
    """The attributes that the script has set on a tensor."""

    def values(self) -> dict[Any, Any]:
        """See ``StateSource``."""
        return attributes_given(self.holder)

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        """See ``StateSource``."""
        return (_all_attributes,)

    def put(self, key: Any, value: Any) -> None:
        """See ``StateSource``."""
        vars(self.holder)[key] = value

    def drop(self, key: Any) -> None:
        """See ``StateSource``."""
        del vars(self.holder)[key]


def _frozen(value: Any) -> Any:
    """A comparable form of a torch.jit attribute: containers are copied at each access, so identity is meaningless."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else repr(value) if isinstance(value, dict) else value


def generator_state(generator: Any) -> object:
    """A generator's state, in a form that is equal if the generator would draw the same numbers next."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _state_text(generator.get_state(legacy=False))
    bits = generator if isinstance(generator, np.random.BitGenerator) else generator.bit_generator
    return _state_text(bits.state)


def _state_text(state: Any) -> str:
    """The state of a generator of NumPy, nested dictionaries, as text; to print its arrays would take milliseconds."""
    if isinstance(state, dict):
        return "".join(f"{name}({_state_text(value)})" for name, value in state.items())
    return f"{state.dtype} {state.tobytes().hex()}" if isinstance(state, np.ndarray) else repr(state)


def _got(read: Mapping[Any, Any]) -> tuple[Getter, ...]:
    """Getters of these keys from a dictionary; they raise KeyError if one is missing."""
    return (getter(*read),) if read else ()


def _attributes(read: Mapping[Any, Any]) -> tuple[Getter, ...]:
    """Getters of these attributes from an object; they raise AttributeError if one is missing."""
    if len(read) > 1:
        return (attrgetter(*read),)
    return tuple(lambda holder, name=name: (getattr(holder, name),) for name in read)


def _misses(names: Iterable[str], read: Collection[Any]) -> tuple[Getter, ...]:
    """A getter that tells whether a dictionary still has none of the names that are not read, if there are any."""
    missing = frozenset(names).difference(read)
    return (lambda holder: (holder.keys().isdisjoint(missing),),) if missing else ()


def _all_attributes(tensor: Any) -> Iterable[Any]:
    return tensor.__dict__.values()  # type: ignore[no-any-return]


def _content(cell: types.CellType) -> Iterable[Any]:
    return (cell.cell_contents,)


def _encoded(environment: Any) -> Iterable[Any]:
    return environment._data.values()  # type: ignore[no-any-return]


def _defaults(function: types.FunctionType) -> Iterable[Any]:
    return (function.__code__, function.__kwdefaults__, *(function.__defaults__ or ()))


def _type(thing: Any) -> Iterable[Any]:
    return type(thing), type(thing).__mro__
