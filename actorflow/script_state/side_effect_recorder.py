"""Record what a step changes in Python state while it is captured, and take it back.

If a step replaces a tensor that the plan has as a variable, the captured step writes the new value into that variable,
detached from its graph: PyTorch's graph would also be freed before the next call could use it.  Other changes are side
effects, which each call repeats; one that a call could not repeat is an error.
"""

from __future__ import annotations

import contextlib
import dis
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from types import FunctionType, MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actorflow.script_state import tree
from actorflow.script_state.comparisons import ComparisonWatch
from actorflow.script_state.generators import GeneratorWatch
from actorflow.script_state.guards import ABSENT, same, summarize
from actorflow.script_state.key_encoding import decode_key, encode_key
from actorflow.script_state.nondeterminism import StandIns, refuse_nondeterminism
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.side_effects import (
    DELETED,
    Rebinding,
    SideEffect,
    describe_value,
    place_key,
    takes_many_values,
)
from actorflow.script_state.sources import (
    ArraySource,
    CacheSource,
    ClassSource,
    GeneratorSource,
    HooksSource,
    ItemsSource,
    LibrarySource,
    LookedAtSource,
    MappingSource,
    SchedulerSource,
    ScriptSource,
    StateSource,
)
from actorflow.script_state.symbolic_casts import symbolic_casts
from actorflow.standins.memory_spans import memory_span, overlap
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.expressions import NumberSource, SourceKind, number_of
from actorflow_compiler.core.torch_internals import is_read
from actorflow_compiler.numbers.indexing import STANDS_FOR_A_VIEW
from actorflow_compiler.numbers.symbolic import Milestones, NumberEnv, SymNumber, current_value
from actorflow_compiler.numbers.unbacked import is_unbacked
from actorflow_compiler.plan.plan import VariableKind
from actorflow_compiler.substitutes.random_streams import UNSEEDED

__all__ = ["RestartCapture", "SideEffectRecorder"]

DRAWS = frozenset((  # functions of Python's and NumPy's generators
    "random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "gauss", "normalvariate",
    "betavariate", "expovariate", "rand", "randn", "normal", "permutation", "random_sample", "integers", "seed",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Change:
    """A value in a source that is another one after the step than before it, or is there only before or after it."""

    at: int  # the position of the source in the search's result
    one: StateSource
    key: Any
    where: str  # the source's label for the key
    read: bool  # whether the step can read the value
    old: Mapping[Any, Any]  # the source's values before the step
    now: Mapping[Any, Any]  # and after it

    @property
    def was(self) -> Any:
        """The value before the step; None if it was not there."""
        return self.old.get(self.key)

    @property
    def value(self) -> Any:
        """The value after the step; None if it is deleted."""
        return self.now.get(self.key)

    @property
    def is_deleted(self) -> bool:
        """Whether the value is not there after the step."""
        return self.key not in self.now


class _TensorsLeft:
    """The tensors that a run of a step leaves: ``results`` of the call, and ``writes``, which variables take over."""

    def __init__(self, results: list[Tensor]) -> None:
        self.results = results
        self.writes: list[tuple[Tensor, Tensor]] = []  # a variable's tensor, and the one that replaced it
        self._numbered: list[tuple[int, Tensor]] = []  # tensors that are among the results, with their indices

    def result(self, tensor: Tensor) -> int:
        """The index of a tensor among the results; a tensor that is left in two places is one result."""
        for number, known in self._numbered:
            if known is tensor:
                return number
        self._numbered.append((len(self.results), tensor))
        self.results.append(tensor.detach())
        return len(self.results) - 1

    def write(self) -> None:
        """Write the new values into the variables; results keep the values from before."""
        for at, result in enumerate(self.results):
            if any(_shared(result, held) for held, _ in self.writes):
                self.results[at] = result.detach().clone()
        with torch.no_grad():
            fresh = [(held, new.detach().clone()) for held, new in self.writes]
            for held, new in fresh:
                held.copy_(new)


class _StrCopy(str):
    """A copy that is equal to a value, but never identical to what the step stores; see ``_mark``."""


class _IntCopy(int):
    """See ``_StrCopy``."""


class _FloatCopy(float):
    """See ``_StrCopy``."""


class _TupleCopy(tuple[Any, ...]):
    """See ``_StrCopy``."""


COPIES: Mapping[type, type] = MappingProxyType({str: _StrCopy, int: _IntCopy, float: _FloatCopy, tuple: _TupleCopy})


class RestartCapture(BaseException):  # no ``Exception``, so that no handler in the script catches it
    """Raised if the step changes numbers that it reads: it must be captured again with stand-ins for these numbers."""

    def __init__(self, places: Sequence[NumberSource]) -> None:
        super().__init__(", ".join(map(str, places)))
        self.places = places


class SideEffectRecorder:
    """Records what one run of a step changes; a context, after which the script's state is as before.

    ``before`` contains, for each place, the values that other plans leave there.  With ``numbers``, the numbers at the
    places ``own`` are replaced by stand-ins, so that a call leaves there what it computes from them.
    """

    def __init__(
        self, name: str, found: SearchResult, before: Mapping[str, Collection[str]], numbers: NumberEnv | None = None,
        own: Sequence[NumberSource] = (), stand_ins: StandIns | None = None,
    ) -> None:  # fmt: skip
        self._stand_ins = StandIns() if stand_ins is None else stand_ins
        self._name, self._found, self._sources, self._state = name, found, found.sources, found.state
        self._numbers, self._own = numbers, own
        self._counting: list[NumberSource] = []
        self._read = {(id(one.holder), type(one)) for one in found.read_sources}
        self._codes, self._counts = found.codes, before

    def __enter__(self) -> SideEffectRecorder:
        self.rebound: list[Rebinding] = []
        held = [one.holder for one in self._sources if isinstance(one, GeneratorSource)]
        self._generators = GeneratorWatch(one for one in held if not isinstance(one, torch.Generator))
        self._values = [one.values() for one in self._sources]
        there = [(_current(place), h) for h in self._state.held.values() for place in h.places]
        self._held = {id(tensor): h for tensor, h in there}
        self._versions = {id(tensor): tensor._version for tensor, _ in there if isinstance(tensor, Tensor)}
        self._held.pop(id(None), None)
        self._seeded = [(g, g.get_state()) for g in {id(g): g for g in map(_of_torch, self._sources) if g}.values()]
        for generator, _ in self._seeded:
            generator.manual_seed(UNSEEDED)
        self._instead = []
        for one, values in zip(self._sources, self._values, strict=True):
            for key, value in values.items():
                stand_in = self._instead_of(one, key, value)
                if stand_in is not None:
                    with contextlib.suppress(TypeError):  # a set, or the defaults of a function
                        one.put(key, stand_in)
                        self._instead.append((one, key, value, stand_in))
        self._now = [dict(values) for values in self._values]  # with the stand-ins
        for source in self._own:
            assert self._numbers is not None
            one, key, values = self._sources[int(source.at)], place_key(source), self._now[int(source.at)]
            if key == source.key and source.index >= 0:
                items = [*values[key]]
                items[source.index] = self._numbers.stand_in(source, items[source.index])
                values[key] = type(values[key])(items)
                one.put(key, type(values[key])(items))  # a copy, because the step may change it
            else:
                values[key] = self._numbers.stand_in(source, values[key])
                one.put(key, values[key])
        self._mark()
        self._during = contextlib.ExitStack()
        self._during.enter_context(refuse_nondeterminism(self._state.named))
        self._compared = ComparisonWatch(self._sources, self._found.read_sources)
        self._during.enter_context(self._compared.watching())
        if self._numbers is not None:
            self._during.enter_context(symbolic_casts(self._found))
        return self

    def _instead_of(self, one: StateSource, key: Any, value: Any) -> Any:
        """What the step sees in place of a value of a source; None for the value itself."""
        if isinstance(one, SchedulerSource) and type(value) is Counter:
            return Milestones(value)
        of_library = one.of_library and isinstance(value, Iterator | tuple)  # its own methods may take the next items
        if of_library or isinstance(one, ArraySource | GeneratorSource | HooksSource | LibrarySource):
            return None
        stand_in = self._stand_ins.of(value, one.label(key))
        binds = isinstance(stand_in, FunctionType) and not hasattr(type(value), "__get__")
        return staticmethod(stand_in) if binds and isinstance(one, ClassSource) else stand_in

    def _mark(self) -> None:
        """Replace values that the step only sets by copies, so that storing an equal value is noticed."""
        numbers = {id(one): at for at, one in enumerate(self._sources)}
        for one, key in self._found.stored_only():
            values = self._now[numbers[id(one)]]
            if (kind := COPIES.get(type(values[key]))) is not None:
                copy = kind(values[key])
                with contextlib.suppress(Exception):  # a class that does not allow setting it
                    one.put(key, copy)
                    values[key] = copy

    def _put_back(self) -> None:
        for one, key, value, stand_in in self._instead:
            if one.values().get(key) is stand_in:
                one.put(key, value)

    def __exit__(self, *_: object) -> None:
        self._during.close()
        self._generators.put_back()
        for generator, state in self._seeded:
            generator.set_state(state)
        for one, old in zip(self._sources, self._values, strict=True):
            if not isinstance(one, ArraySource | GeneratorSource | HooksSource | LookedAtSource):
                _restore(one, old)

    def so_far(self) -> tuple[list[SideEffect], str]:
        """The side effects so far, and the label of a change that calls could not repeat, or an empty text."""
        found, lost = [], ""
        for at, (one, old) in enumerate(zip(self._sources, self._now, strict=True)):
            if isinstance(one, ArraySource | GeneratorSource | HooksSource | LookedAtSource):
                continue
            now, kept = one.values(), one.read() if one.of_library else None
            if isinstance(one, ItemsSource) and len(now) != len(old):
                lost = lost or one.path
                continue
            for key in {**old, **now}:
                if key in old and key in now and (same(old[key], now[key]) or _same_items(old[key], now[key])):
                    continue
                if kept is not None and key not in kept:
                    continue
                tensors: list[Tensor] = []
                shape = describe_value(now[key], tensors) if key in now else DELETED
                if shape is None or tensors:
                    lost = lost or one.label(key)
                else:
                    found.append(SideEffect(at, self._sent(one.label(key), key), one.label(key), shape, True))
        return found, lost

    def begun(self, changes: Iterable[SideEffect]) -> list[SideEffect]:
        """The previous values at places that the step sets but does not read; no guard checks these places.

        Only for values that the step could store again without being noticed.
        """
        found = []
        for one in changes:
            values, key = self._values[one.at], decode_key(one.key, self._sources)
            if one.plain and not one.read and key in values and type(values[key]) not in COPIES:
                found.append(replace(one, value=describe_value(values[key], [])))
        return found

    def changes(self, results: list[Tensor]) -> list[SideEffect]:
        """The side effects of the run; tensors in them are appended to ``results``.

        Raises CaptureError for changes that calls of a plan could not repeat, and RestartCapture.
        """
        self._during.close()
        self._put_back()
        self._refuse_unseen()
        left = _TensorsLeft(results)
        effects = [self._side_effect(change, left) for change in self._changed()]
        if self._counting:
            raise RestartCapture(self._counting)
        left.write()
        return [effect for effect in effects if effect is not None]

    def _refuse_unseen(self) -> None:
        """Raise CaptureError for what the step did once, and calls of a plan would not do or notice."""
        for one in self._sources:
            if (generator := _of_torch(one)) and generator.initial_seed() != UNSEEDED:
                instead = f"{one.path}.manual_seed(...) before the call, or torch.manual_seed(...) in the step"
                self._refuse(one.path, "is seeded in the step", instead, one.path)
        if (unseen := self._compared.unseen) is not None:
            path, name = unseen
            self._refuse(
                path, f"is compared as a whole in the step, which reads {path}.{name} without that a call could tell "
                f"that it has changed", f"its fields one by one ({path}.{name} == …), or @dataclass(frozen=True)", path,
            )  # fmt: skip
        if self._generators.moved:
            raise CaptureError(
                f"{self._line(DRAWS)}: {self._name} draws random numbers of Python or NumPy, or seeds them, which it "
                f"would do once, when it is captured, and not in every call; expected: draw them outside and pass them "
                f"as arguments, or draw them with torch (torch.rand, torch.manual_seed) in the step"
            )

    def _changed(self) -> Iterator[_Change]:
        """All values that the step changed, in the order of the sources."""
        for at, (one, old) in enumerate(zip(self._sources, self._now, strict=True)):
            can_read = (id(one.holder), type(one)) in self._read
            unread = one.of_library and not can_read
            alone = isinstance(one, GeneratorSource | LookedAtSource) or (
                unread and isinstance(one, ItemsSource | MappingSource | ArraySource)
            )
            now = old if alone else one.values()
            if isinstance(one, ItemsSource) and len(now) != len(old):
                self._refuse(one.path, f"has {len(old)} items before the step and {len(now)} after it", holder=one.path)
            for key in (*old, *(key for key in now if key not in old)):
                if key in old and key in now and same(old[key], now[key]):
                    continue
                read = can_read and (isinstance(one, SchedulerSource) or key in one.read())
                yield _Change(at, one, key, one.label(key), read, old, now)

    def _side_effect(self, change: _Change, left: _TensorsLeft) -> SideEffect | None:
        """The side effect that repeats a change; None if no call needs to repeat it.

        A change that is a variable's new value is written into the variable instead.
        """
        one = change.one
        if isinstance(one, CacheSource) and change.is_deleted:
            return None
        self._refuse_by_source(change)
        numbers = _stand_ins(change.was)
        if numbers and not change.is_deleted and _same_items(change.was, change.value):
            return None
        self._refuse_counts(change, bool(numbers))
        if change.is_deleted:
            return SideEffect(change.at, self._sent(change.where, change.key), change.where, DELETED, change.read)
        self._refuse_unbacked(change)
        tensors: list[Tensor] = []
        shape = describe_value(change.value, tensors)
        if one.of_library and not change.read and not tensors:
            return None
        if shape is None:
            if not change.read or one.whole:  # the previous value is there again
                return None
            before = summarize(change.was) if change.key in change.old else ABSENT
            self._refuse(change.where, f"is {before} before the step and {summarize(change.value)} after")
        if self._rebinds(change, shape, tensors, left):
            return None
        return self._stored(change, shape, tensors, numbers, left)

    def _refuse_by_source(self, change: _Change) -> None:
        """Raise CaptureError for sources whose values calls cannot set, or not to this one."""
        one, where = change.one, change.where
        if isinstance(one, ArraySource | HooksSource):
            self._refuse(where, "is changed in the step")
        if isinstance(one, CacheSource):
            instead = f"@functools.cache in place of @functools.lru_cache, or {one.path} called before the step"
            self._refuse(where, "gets a tensor that the step makes, which no other call could have", instead, one.path)
        if isinstance(one, ScriptSource) and not isinstance(change.value, bool | Tensor | None):
            self._refuse(
                where, f"changes from {summarize(change.was)} to {summarize(change.value)} in code of torch.jit",
                "the plain module, or a buffer: torch.zeros(()) that is counted up",
            )  # fmt: skip

    def _refuse_counts(self, change: _Change, computed: bool) -> None:
        """Raise CaptureError for a setting that calls count, unless the step computes it from its previous value."""
        one = change.one
        alone = one.by_name and self._numbers is None  # the plan's ops would read the previous value
        if one.counts and (alone or not (computed or change.read or number_of(current_value(change.value)))):
            there = f"changes from {summarize(change.was)} to {summarize(change.value)} in the step"
            self._refuse(change.where, there, "do this after the call; learning rates are read in every call", one.path)

    def _refuse_unbacked(self, change: _Change) -> None:
        """Raise CaptureError for a number that is computed from tensors, and not a tensor itself."""
        if any(is_unbacked(leaf) and leaf.resolve(leaf.tensor) is None for leaf in pytree.tree_leaves(change.value)):
            self._refuse(
                change.where,
                "would be a number that is there only when a call has run (.item() or float() of a tensor)",
                "the tensor itself, without .item(), which each call carries on; or keep the number after the call",
            )

    def _rebinds(
        self, change: _Change, shape: tree.Description, tensors: Sequence[Tensor], left: _TensorsLeft
    ) -> bool:  # fmt: skip
        """Whether the new value's tensors are new values of variables; then these are written, and it is noted.

        Raises CaptureError for tensors that a plan cannot keep.
        """
        where = change.where
        was: list[Tensor] = []
        alike = change.key in change.old and describe_value(change.was, was) == shape
        fit = tensors and alike and all(self._fits(a, b) for a, b in zip(was, tensors, strict=True))
        fit = fit and self._alone(change.was)
        for index, tensor in enumerate(tensors):
            if not alike or (tensor is not was[index] and not (fit and _moves(tensor, was, tensors))):
                self._check(where, tensor)
        if not fit or not any(map(is_read, was)):  # a variable is needed only if its value is read
            return False
        for a, b in zip(was, tensors, strict=True):
            if any(a is held and b is new for held, new in left.writes):  # two holders of one object, such as a class
                continue
            if a is not b and any(_shared(b, other) for _, other in left.writes):
                said = "and another one that the step sets would be one tensor"
                self._refuse(where, said, "keep a copy (.clone())")
            left.writes += [(a, b)] if a is not b else []
        kept = all(a._version == self._versions[id(a)] for a in was)
        changed = () if kept else tuple(map(left.result, was))
        self.rebound.append(Rebinding(change.at, self._sent(where, change.key), changed))
        return True

    def _stored(
        self, change: _Change, shape: tree.Description, tensors: Sequence[Tensor], numbers: Sequence[SymNumber],
        left: _TensorsLeft,
    ) -> SideEffect | None:  # fmt: skip
        """The side effect that stores a new value; None for a number that is to be captured again with a stand-in.

        ``numbers`` are the stand-ins in the previous value.
        """
        where, read, value = change.where, change.read, change.value
        if read and (kind := _other_kind(value)):
            self._refuse(where, f"is or holds a {kind} that the step makes, and a call would leave a plain dictionary")
        # whether the value is computed from stand-ins of this step; a number of another kind is one from now on
        own = bool(numbers) and value.__class__ is change.was.__class__
        counted = number_of(change.was) and number_of(current_value(value)) and isinstance(change.key, str | int)
        if not own and self._numbers is not None and read and counted:
            self._counting.append(self._place(change.at, change.key, where))
            return None
        sources = [number.expression for number in numbers if isinstance(number.expression, NumberSource)]
        baked = not own or self._numbers is None or any(map(self._numbers.is_specialized, sources))
        if read and not tensors and baked and takes_many_values(self._counts.get(where, ()), repr(shape)):
            self._refuse(
                where,
                f"changes from {summarize(change.was)} to {summarize(value)}, and to another value in each call",
            )
        described = _numbered(shape, [*map(left.result, tensors)])
        return SideEffect(change.at, self._sent(where, change.key), where, described, read, not tensors and baked)

    def _sent(self, where: str, key: Any) -> Any:
        try:
            return encode_key(key, self._sources)
        except LookupError:
            what = f"is set in the step, by a key that no other rank could find, a {type(key).__name__}"
            self._refuse(where, what, "a key that is a text or a number", where)

    @staticmethod
    def _place(at: int, key: Any, where: str) -> NumberSource:
        key, index = ("", key) if isinstance(key, int) else (key, -1)
        return NumberSource(SourceKind.PLACE, where, str(at), key, index)

    def _fits(self, old: Tensor, new: Tensor) -> bool:
        """Whether a variable of the plan can take the value of the tensor that replaced its own."""
        held = self._held.get(id(old))
        return (
            held is not None
            and held.kind != VariableKind.PARAMETER
            and len(held.places) == 1
            and old.shape == new.shape
            and old.dtype == new.dtype
        )

    def _alone(self, value: Any) -> bool:
        """Whether no other source holds the replaced container, or a container inside it."""
        if not isinstance(value, list | dict | deque):
            return not isinstance(value, tuple) or all(map(self._alone, value))
        pairs = zip(self._sources, self._values, strict=True)
        holders = {(id(one.holder), key) for one, values in pairs for key, v in values.items() if v is value}
        return len(holders) == 1 and all(map(self._alone, value.values() if isinstance(value, dict) else value))

    def _check(self, where: str, tensor: Tensor) -> None:
        """Raise CaptureError for a tensor that a plan cannot keep as PyTorch would."""
        base = tensor if tensor._base is None else tensor._base
        held = self._held.get(id(base))
        if held is not None and any(_current(place) is base for place in held.places):
            self._refuse(where, f"and {held.name} would be one tensor after the step", "keep a copy (.clone())")
        if STANDS_FOR_A_VIEW in vars(base):
            self._refuse(where, "would be a view of another tensor after the step", "keep a copy (.clone())")
        if isinstance(tensor, nn.Parameter):
            self._refuse(where, "is a parameter that the step makes", "make it before the first call")

    def _refuse(self, where: str, what: str, instead: str = "", holder: str = "") -> NoReturn:
        names = re.findall(r"[^\W\d]\w*", holder or where.rpartition(".")[2].partition("[")[0])
        line = self._line({*names}, stores=not holder)
        raise CaptureError(
            f"{line}: {where} {what}. {self._name} is captured once, and its calls run a plan, not Python; expected: "
            + (instead or "do this outside of the step, return it from the step, or keep it in a tensor of fixed shape")
        )

    def _line(self, names: frozenset[str] | set[str], stores: bool = False) -> str:
        """The first line of user code that stores one of these names, or else one that loads it."""
        for wanted in ("STORE_", "LOAD_")[not stores :]:
            for code in sorted(self._codes, key=lambda code: code.co_name == "__init__"):
                line = code.co_firstlineno
                for instruction in dis.get_instructions(code):
                    line = instruction.starts_line or line
                    if str(instruction.argval) in names and instruction.opname.startswith(wanted):
                        return f"{code.co_filename}:{line}"
        return "in the step"


def _stand_ins(value: Any) -> list[SymNumber]:
    """The stand-ins for numbers in a value, which is one itself, or a list or tuple of them."""
    items = value if type(value) in (list, tuple) else (value,)
    return [item for item in items if type(item) is SymNumber]


def _same_items(old: Any, new: Any) -> bool:
    """Whether two lists or tuples have the same items."""
    return (
        type(old) in (list, tuple)
        and type(new) is type(old)
        and len(old) == len(new)
        and all(a is b or same(a, b) for a, b in zip(old, new, strict=True))
    )


def _other_kind(value: Any) -> str:
    """The name of a mapping class in a value that ``tree`` would rebuild as a plain dictionary; empty if none."""
    if isinstance(value, Mapping):
        plain = type(value) in (dict, OrderedDict) or is_dataclass(value)
        return next(filter(None, map(_other_kind, value.values())), "") if plain else type(value).__name__
    return next(filter(None, map(_other_kind, value)), "") if isinstance(value, list | tuple) else ""


def _current(place: Any) -> Any:
    return place.get() if hasattr(place, "get") else None


def _numbered(shape: tree.Description, numbers: Sequence[int]) -> tree.Description:
    """A description whose tensors have other numbers."""
    if isinstance(shape, list):
        return [_numbered(item, numbers) for item in shape]
    if isinstance(shape, dict):
        plain = ("value", "number")
        return {
            k: numbers[v] if k == "tensor" else v if k in plain else _numbered(v, numbers) for k, v in shape.items()
        }
    return shape


def _moves(tensor: Tensor, was: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Whether a tensor only moves to another position in the container that replaces its own."""
    before, after = ([i for i, t in enumerate(tensors) if t is tensor] for tensors in (was, now))
    return len(before) == len(after) == 1 and before != after


def _shared(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a capture may have elements in common."""
    if one is other:
        return True
    a, b = memory_span(one), memory_span(other)
    return a is not None and b is not None and overlap(a, b)


def _restore(one: StateSource, old: Mapping[Any, Any]) -> None:
    now = one.values()
    if isinstance(one, CacheSource):
        if any(all(value is not was for was in old.values()) for value in now.values()):
            one.holder.cache_clear()
        return
    if isinstance(one, ItemsSource):
        if len(now) != len(old) or any(now[i] is not old[i] for i in old):
            one.holder.clear()
            (one.holder.update if isinstance(one.holder, set) else one.holder.extend)(old.values())
        return
    kept = one.read() if one.of_library else now
    for key, value in now.items():
        tensors: list[Tensor] = []
        if key not in kept:  # the library's own state stays, except for tensors of the capture
            describe_value(value, tensors)
        if old.get(key, ABSENT) is value or (key not in kept and not tensors):
            continue
        if key in old:
            one.put(key, old[key])
        else:
            one.drop(key)
    for key in old:
        if key not in now:
            one.put(key, old[key])


def _of_torch(one: StateSource) -> torch.Generator | None:
    """The torch generator of a source, if the script has made it; otherwise None."""
    mine = isinstance(one, GeneratorSource) and isinstance(one.holder, torch.Generator)
    return one.holder if mine and one.holder is not torch.default_generator else None
