"""Places to which steps assign other tensors, kept apart from what else the script holds.

``self.hidden = h.detach()`` gives the attribute another tensor and leaves the one that was there alone.  Plans write
into one variable instead.  So a stand-in that the script has taken from such a place keeps its value from then on, and
a tensor that the script puts there is only read.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.script_state.guards import same, summarize
from actorflow.script_state.sources import StateSource
from actorflow.standins.lazy_tensor import wait_for_values
from actorflow.standins.owned_tensor import OwnedTensor, ReleasedValue, real_value
from actorflow_compiler.values.variables import ScriptState, StateTensor

__all__ = ["RebindingSites", "RebindingSite", "tensors_in"]


_TENSOR_MARK = object()  # where a tensor is


class RebindingBackend(Protocol):
    """What rebinding sites need of the table of variables."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is the stand-in of one."""

    def read(self, name: str) -> Tensor:
        """A copy of the whole value, once all calls that were issued are done."""

    def write(self, name: str, value: Tensor) -> None:
        """Replace the value, on all ranks alike."""

    def renew(self, owned: OwnedTensor) -> OwnedTensor:
        """Another stand-in for the variable."""


class RebindingSite:
    """A place to which steps assign another tensor, or a list, tuple or dictionary of other tensors."""

    def __init__(self, source: StateSource, key: Any, value: Any) -> None:
        self.source, self.key = source, key
        self.left: list[tuple[int, Tensor]] = []  # what this call leaves to the script: which of the tensors, and where
        self._holders: list[int] = []  # references to what we have put there and to its parts; none: not counted yet
        self._departed = False  # the script has put ours elsewhere: nobody has those that take their place
        self._alone = False  # what is there was put there since the last call: nobody else has it
        self._put(value)

    def _put(self, value: Any) -> None:
        self._value = value  # what we have put there
        self.leaves, self._form = _flatten(value)
        self.source.put(self.key, value)
        self._departed, self._alone, self._holders = False, True, []

    def is_at(self, other: RebindingSite) -> bool:
        """Whether it is of the same place as another one, which plans for other variables may have made."""
        return self.source.holder is other.source.holder and bool(self.key == other.key)

    @property
    def found(self) -> list[Tensor]:
        """The tensors that are there now."""
        return tensors_in(self.source.values().get(self.key))

    @property
    def names(self) -> Iterator[str]:
        """The variables whose stand-ins are there."""
        return (leaf.name_in_plan for leaf in self.leaves)

    def misfit(self) -> str:
        """What is there that the plan does not know, for people; nothing where all is ours."""
        now = self.source.values().get(self.key)
        leaves, form = _flatten(now)
        if self._is_formed(form) and all(map(is_, leaves, self.leaves)):
            return ""
        return f"{self.source.label(self.key)} changed from {summarize(self._value)} to {summarize(now)}"

    def refresh(self, holder: RebindingBackend, states: Callable[[], Iterable[ScriptState]]) -> None:
        """Before a call: take over what the script has put there, and part with what it holds of what was there."""
        self._alone = False
        now = self.source.values().get(self.key)
        there = now is self._value
        tensors = self._tensors(now, holder)
        if tensors is None:
            return
        now = None
        others = [number for number, (old, new) in enumerate(zip(self.leaves, tensors, strict=True)) if new is not old]
        if not there or others:
            if self._are_held(there):  # on this rank, perhaps not on others
                self.leave_behind(holder, states())
            else:
                self._put(self._with(self.leaves))
        for number in others:
            holder.write(self.leaves[number].name_in_plan, real_value(tensors[number]).detach())
            self.left.append((number, tensors[number]))

    def make_way(self, holder: RebindingBackend, states: Callable[[], Iterable[ScriptState]]) -> None:
        """Before a call that puts others there: part with what the script holds."""
        if not self._alone and self._are_held(there=True):
            self.leave_behind(holder, states())

    def leave_behind(self, holder: RebindingBackend, states: Iterable[ScriptState]) -> None:
        """Let the script keep what it holds, with the value of now; put other stand-ins in its place."""
        self.left += enumerate(self.leaves)
        self._put(self._with(self._renewed(holder, states)))

    def depart(self, holder: RebindingBackend, states: Iterable[ScriptState]) -> None:
        """The same, where the script has put what it holds into other places; what it has put here stays."""
        self.leaves = self._renewed(holder, states)
        self._departed = True

    def _renewed(self, holder: RebindingBackend, states: Iterable[ScriptState]) -> list[Tensor]:
        """Other stand-ins; those that there were have the value of now, and keep it."""
        others: dict[int, OwnedTensor] = {}
        for old in self.leaves:
            past = ReleasedValue(holder.read(old.name_in_plan))
            others[id(old)] = holder.renew(old)
            old.leave(past)
        for state in states:
            for held in state.held.values():
                held.tensor = others.get(id(held.tensor), held.tensor)
        return [others[id(leaf)] for leaf in self.leaves]

    def changed(self, values: Sequence[Tensor]) -> None:
        """This call's step has changed what was there, before it put others there: ``values`` are what it has made."""
        for number, tensor in self.left:
            value = wait_for_values(values[number])
            if isinstance(tensor, OwnedTensor):
                tensor.leave(ReleasedValue(value))
            else:
                with torch.no_grad():
                    tensor.copy_(value)

    def settle(self) -> None:
        """After a call: nobody but us holds what we have put there since the last one."""
        self.left = []
        if not self.misfit():
            now = self.source.values().get(self.key)
            self._alone = self._alone or now is not self._value  # a capture has put others there: a tuple is made anew
            self._value = now
            now = None
        if self._alone:
            self._holders, self._alone = self._references(), False

    def _is_formed(self, form: tuple[list[Any], Any]) -> bool:
        return form[1] == self._form[1] and all(map(same, self._form[0], form[0]))

    def _with(self, tensors: Sequence[Tensor]) -> Any:
        """The same with other tensors."""
        left = iter(tensors)
        rest, form = self._form
        return pytree.tree_unflatten([next(left) if one is _TENSOR_MARK else one for one in rest], form)

    def _are_held(self, there: bool) -> bool:
        """Whether the script holds something of what we have put ``there``, or had, where something else is."""
        known = self._holders
        if self._departed:
            return False
        return not known or self._references() != [known[0] - (not there), *known[1:]]

    def _references(self) -> list[int]:
        found: list[int] = []
        _count(self._value, found)
        return found

    def _tensors(self, now: Any, holder: RebindingBackend) -> Sequence[Tensor] | None:
        """The tensors that are there now, if they are plain or ours, and like what we had."""
        leaves, form = _flatten(now)
        fits = self._is_formed(form) and all(
            new is old or (_is_like(old, new) and not holder.owns(new))
            for old, new in zip(self.leaves, leaves, strict=True)
        )
        return leaves if fits else None


class RebindingSites:
    """The rebinding sites of one rank, by weak references: plans hold them."""

    def __init__(self, holder: RebindingBackend) -> None:
        self._holder = holder
        self._refs: list[weakref.ref[RebindingSite]] = []  # in an order that is the same on all ranks

    @property
    def _sites(self) -> list[RebindingSite]:
        return [site for ref in self._refs if (site := ref()) is not None]

    def adopt(
        self, places: Iterable[tuple[StateSource, Any]], new: Mapping[int, StateTensor], states: Iterable[ScriptState]
    ) -> tuple[RebindingSite, ...]:
        """A plan was taken in whose step rebinds these places.

        ``new`` are tensors of the script, by id, whose stand-ins lie nowhere yet; the script may hold those of others.
        """
        found = []
        states = [*states]
        for source, key in places:
            value = source.values().get(key)
            same = (one for one in self._sites if one.source.holder is source.holder and one.key == key)
            site = next((one for one in same if not one.misfit()), None)
            if site is not None:
                site.leave_behind(self._holder, states)
                found.append(site)
                continue
            value = pytree.tree_map(lambda leaf: new[id(leaf)].tensor if id(leaf) in new else leaf, value)
            owned = tensors_in(value)
            if not owned or not all(isinstance(leaf, OwnedTensor) and self._holder.owns(leaf) for leaf in owned):
                continue
            known = any(not any(held.tensor is leaf for held in new.values()) for leaf in owned)
            before = _flatten(source.values().get(key))[0]
            site = RebindingSite(source, key, value)
            site.left = [(number, tensor) for number, tensor in enumerate(before) if id(tensor) in new]
            self._refs = [*(ref for ref in self._refs if ref() is not None), weakref.ref(site)]
            if known:
                site.leave_behind(self._holder, states)
            found.append(site)
        placed = {id(leaf) for site in found for leaf in site.leaves}
        for held in new.values():
            if id(held.tensor) not in placed:
                held.put(held.tensor)
        return tuple(found)

    def forget(self, names: Container[str]) -> None:
        """Plans change these variables in place, or they are gone."""
        left = (site for site in self._sites if not any(name in names for name in site.names))
        self._refs = [weakref.ref(site) for site in left]

    def among(self, holders: Callable[[], Container[int]]) -> list[RebindingSite]:
        """The places of these holders, by id: what a job looks at, which is there on all ranks."""
        sites = self._sites
        of = holders() if sites else ()
        return [site for site in sites if id(site.source.holder) in of]

    def refresh(self, sites: Iterable[RebindingSite], states: Callable[[], Iterable[ScriptState]]) -> None:
        """Before a call."""
        sites = [*sites]
        ours = {id(leaf): site for site in sites for leaf in site.leaves}
        moved = [ours[id(new)] for site in sites for new in site.found if not ours.get(id(new), site).is_at(site)]
        for site in dict.fromkeys(moved):  # all of them before the first is written
            site.depart(self._holder, states())
        for site in sites:
            site.refresh(self._holder, states)

    def make_way(self, sites: Iterable[RebindingSite], states: Callable[[], Iterable[ScriptState]]) -> None:
        """Before a call of a plan that puts other tensors there."""
        for site in sites:
            site.make_way(self._holder, states)


def _flatten(value: Any) -> tuple[list[Any], tuple[list[Any], Any]]:
    """The tensors in a value, and what else it is made of."""
    leaves, form = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, ([_TENSOR_MARK if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that a value is, or that lists, tuples and dictionaries in it hold."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_like(ours: Tensor, now: Tensor) -> bool:
    return (ours.shape, ours.dtype, ours.device) == (now.shape, now.dtype, now.device) and not now.requires_grad


def _count(value: Any, found: list[int]) -> None:
    found.append(sys.getrefcount(value))
    if not isinstance(value, Tensor):
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, Iterable) else ():
            _count(part, found)
