"""What a search finds: ``Findings`` while it goes on, ``SearchResult`` at its end."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.reachability import ROOT, UNREAD, AttributeReads, ReferenceGraph
from actorflow.script_state.sources import (
    AttributesSource,
    ClassSource,
    GlobalsSource,
    HooksSource,
    ItemsSource,
    LibrarySource,
    ParamGroupSource,
    SchedulerSource,
    SlotsSource,
    StateSource,
    StoredClassSource,
    StoredGlobalsSource,
    TensorAttributesSource,
)
from actorflow.script_state.state_naming import StateNaming
from actorflow.script_state.user_code import is_user_class
from actorflow.standins.locations import TensorLocation
from actorflow_compiler.capture.optimizer_state import is_fused
from actorflow_compiler.values.variables import ScriptState

__all__ = ["Findings", "SearchResult"]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    state: ScriptState
    sources: tuple[StateSource, ...]  # all sources of values that the function can reach, in the order of the search
    read_sources: tuple[StateSource, ...]  # the sources that its code can read
    codes: tuple[types.CodeType, ...]  # user code that it can run, in the order of the search
    stores: frozenset[str] = frozenset()  # names of globals and attributes that it sets or deletes
    awaited: tuple[str, ...] = ()  # full names of modules that it may import, and that were not loaded

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


class Findings:
    """What a search has found so far, each in the order of the search, which is the same on every rank.

    ``names`` holds the names that earlier searches gave.
    """

    def __init__(self, names: NameRegistry) -> None:
        self.names = names
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.schedulers: list[tuple[str, LRScheduler]] = []
        self.scalers: list[tuple[str, torch.amp.GradScaler]] = []
        self.tensors: list[tuple[str, Tensor, TensorLocation]] = []
        self.namespaces: list[tuple[str, types.ModuleType]] = []
        self.sources: list[tuple[int, StateSource]] = []  # id of an object, and its source
        self.references = ReferenceGraph()
        self.types: dict[int, type] = {}  # id of an object with attributes → its class
        self.classes: list[type] = [Tensor]  # classes that may have methods in user code
        self.instantiated: dict[type, None] = {}  # classes that code names and may instantiate
        self.codes: list[types.CodeType] = []
        self.awaited: dict[str, None] = {}  # full names of modules that code may import, and that are not loaded
        self.globals: set[str] = set()  # names of globals and closure variables that code reads
        self.attributes: dict[str, None] = {}  # names of attributes that code reads
        self.attribute_reads = AttributeReads()
        self.stores: dict[str, None] = {}  # names of globals and attributes that code sets
        self.written_globals: dict[int, dict[str, Any]] = {}  # globals of functions, by id
        self._seen: dict[int, Any] = {}  # id → the object, kept alive so that its id stays unique
        self._holder = ROOT  # the id of the object that is being searched
        self.in_library = False  # whether that is a library's module, all of whose attributes count as read

    def first_visit(self, thing: Any) -> bool:
        """Whether an object has not been visited before; now it has."""
        if id(thing) in self._seen:
            return False
        self._seen[id(thing)] = thing
        return True

    @contextlib.contextmanager
    def within(self, holder: int) -> Iterator[None]:
        """A context in which values that are found are held by the object with the id ``holder``."""
        before, self._holder = self._holder, holder
        try:
            yield
        finally:
            self._holder = before

    @property
    def is_at_root(self) -> bool:
        """Whether code is being searched whose reads count."""
        return self._holder == ROOT

    def add_reference(self, thing: Any, attribute: str | None) -> None:
        """Note that the current object holds a thing, read by this attribute; None: it is read in any case."""
        self.references.add(self._holder, thing, attribute)

    def add_sources(self, thing: Any, *sources: StateSource) -> None:
        """Add sources of an object's values, which count as read if code can read the object."""
        self.sources += [(id(thing), source) for source in sources]

    def add_read_source(self, source: StateSource) -> None:
        """Add a source to the object that is being searched, which counts as read whatever attributes code names."""
        self.add_reference(source, None)
        self.sources.append((id(source), source))

    def add_object(self, thing: Any) -> None:
        """Note an object with attributes, whose class may have methods in user code."""
        self.classes.append(type(thing))
        self.types[id(thing)] = type(thing)

    def result(self) -> SearchResult:
        """The state that was found, and its sources; called once, at the end of the search."""
        state = self._state()
        reached = self.references.reached(lambda holder: self.attribute_reads.of_class(self.types.get(holder)))
        self._add_optimizers(state)
        for path, scheduler in self.schedulers:
            self.add_sources(scheduler, SchedulerSource(path, vars(scheduler)))
        for held in state.held.values():
            by = id(held.tensor) if id(held.tensor) in reached else ROOT
            self.sources += [
                (by, HooksSource(held.name, held.tensor)),
                (by, TensorAttributesSource(held.name, held.tensor)),
            ]
        self._add_stored()
        apart = {(type(one), id(one.holder), one.names): (thing, one) for thing, one in self.sources[::-1]}
        sources = [*apart.values()][::-1]
        for thing, one in sources:
            one.reads = self.attribute_reads.of_class(self.types.get(thing))
        read = tuple(_merge_named([one for thing, one in sources if thing in reached]))
        every = tuple(one for _, one in sources)
        return SearchResult(state, every, read, tuple(self.codes), frozenset(self.stores), tuple(self.awaited))

    def _state(self) -> ScriptState:
        """The state that was found, by name."""
        looks_at_steps = self.attribute_reads.of_any_object("state", "state_dict")
        named = frozenset(self.globals.union(self.attributes))
        naming = StateNaming(self.names, ScriptState(named=named, looks_at_steps=looks_at_steps))
        naming.modules(self.modules)
        naming.tensors(self.tensors)
        naming.scalers(self.scalers)
        naming.optimizers(self.optimizers)
        return naming.state

    def _add_optimizers(self, state: ScriptState) -> None:
        """Add sources of the hooks and the parameter groups of optimizers."""
        by_code = ROOT if "param_groups" in self.attribute_reads else UNREAD  # otherwise inputs of each call
        for name, optimizer in state.optimizers.items():
            self.sources.append((ROOT, HooksSource(name, optimizer)))
            for g, group in enumerate(optimizer.param_groups):
                path = f"{name}.param_groups[{g}]"
                self.sources += [
                    (ROOT, ItemsSource(f"{path}['params']", group["params"])),
                    (by_code, ParamGroupSource(path, group, is_fused(optimizer))),
                ]

    def _add_stored(self) -> None:
        """Add sources of the globals and class attributes that code sets, whether it reads them or not."""
        stored = [("", namespace) for namespace in self.written_globals.values()]
        stored += [(path, module.__dict__) for path, module in self.namespaces]
        self.sources += [(UNREAD, StoredGlobalsSource(path, holder, self.stores)) for path, holder in stored]
        bases = dict.fromkeys(base for made in self.classes for base in made.__mro__ if is_user_class(base))
        self.sources += [(UNREAD, StoredClassSource(owner.__name__, owner, self.stores)) for owner in bases]


def _merge_named(sources: Sequence[StateSource]) -> Iterator[StateSource]:
    """The sources, merging those of the same holder that differ only in names."""
    names: dict[tuple[type, str, int], dict[str, None]] = {}
    for one in sources:
        if isinstance(one, GlobalsSource | ClassSource | LibrarySource):
            names.setdefault((type(one), one.path, id(one.holder)), {}).update(dict.fromkeys(one.names))
    for one in sources:
        if not isinstance(one, GlobalsSource | ClassSource | LibrarySource):
            yield one
        elif found := names.pop((type(one), one.path, id(one.holder)), None):
            yield type(one)(one.path, one.holder, found)
