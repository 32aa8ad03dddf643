"""Rebinding sites: places to which steps assign other tensors, kept separate from other references of the script.

``self.hidden = h.detach()`` binds the attribute to another tensor, and leaves the previous tensor unchanged.  Plans
write into one variable instead.  So if the script still holds a stand-in from such a place, that stand-in keeps its
value from then on, and a tensor that the script puts there is only read.
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

__all__ = ["RebindingTable", "RebindingSite", "tensors_in"]


_TENSOR_MARK = object()  # marks the position of a tensor


class RebindingBackend(Protocol):
    """The operations of the table of variables that rebinding sites use."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is the stand-in of a variable."""

    def read(self, name: str) -> Tensor:
        """A copy of the whole value, after all issued calls are done."""

    def write(self, name: str, value: Tensor) -> None:
        """Replace the value, on all ranks equally."""

    def renew(self, owned: OwnedTensor) -> OwnedTensor:
        """Make another stand-in for the variable."""


class RebindingSite:
    """A place to which steps assign another tensor, or a list, tuple or dictionary of other tensors.

    Plans write to the variables of the stand-ins that the site puts there.
    """

    def __init__(self, source: StateSource, key: Any, value: Any) -> None:
        self.source, self.key = source, key
        self.left: list[tuple[int, Tensor]] = []  # tensors left to the script by this call, by position
        self._holders: list[int] = []  # reference counts of our value and its parts; empty: not counted yet
        self._departed = False  # the script has moved our stand-ins elsewhere: nothing holds the new ones yet
        self._alone = False  # our value was put there since the last call: nothing else holds it
        self._put(value)

    def _put(self, value: Any) -> None:
        self._value = value  # the value that we have put there
        self.leaves, self._form = _flatten(value)
        self.source.put(self.key, value)
        self._departed, self._alone, self._holders = False, True, []

    def is_at(self, other: RebindingSite) -> bool:
        """Whether another site, possibly made by a plan for other variables, is at the same place."""
        return self.source.holder is other.source.holder and bool(self.key == other.key)

    @property
    def found(self) -> list[Tensor]:
        """The tensors that are at the place now."""
        return tensors_in(self.source.values().get(self.key))

    @property
    def names(self) -> Iterator[str]:
        """The names of the variables whose stand-ins are there."""
        return (leaf.name_in_plan for leaf in self.leaves)

    def misfit(self) -> str:
        """A description of a value there that the plan does not know, for messages; empty if our value is there."""
        now = self.source.values().get(self.key)
        leaves, form = _flatten(now)
        if self._is_formed(form) and all(map(is_, leaves, self.leaves)):
            return ""
        return f"{self.source.label(self.key)} changed from {summarize(self._value)} to {summarize(now)}"

    def refresh(self, holder: RebindingBackend, states: Callable[[], Iterable[ScriptState]]) -> None:
        """Before a call: take over tensors that the script has put there, and release stand-ins that it still holds.

        A stand-in that is released keeps the current value, for the script; see ``leave_behind``.
        """
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
        """Before a call that puts other tensors there: release the stand-ins that the script holds elsewhere."""
        if not self._alone and self._are_held(there=True):
            self.leave_behind(holder, states())

    def leave_behind(self, holder: RebindingBackend, states: Iterable[ScriptState]) -> None:
        """Leave the current stand-ins to the script, with their current values, and put new ones in their place."""
        self.left += enumerate(self.leaves)
        self._put(self._with(self._renewed(holder, states)))

    def depart(self, holder: RebindingBackend, states: Iterable[ScriptState]) -> None:
        """Renew the stand-ins, which the script has put into other places; the value that it has put here stays."""
        self.leaves = self._renewed(holder, states)
        self._departed = True

    def _renewed(self, holder: RebindingBackend, states: Iterable[ScriptState]) -> list[Tensor]:
        """New stand-ins for the variables; the old ones get the current values as values of their own."""
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
        """Give the tensors that this call leaves to the script the values that they had before the rebinding.

        This is for a step that changed them in place first; ``values`` are these values, as results of the call.
        """
        for number, tensor in self.left:
            value = wait_for_values(values[number])
            if isinstance(tensor, OwnedTensor):
                tensor.leave(ReleasedValue(value))
            else:
                with torch.no_grad():
                    tensor.copy_(value)

    def settle(self) -> None:
        """After a call: record the reference counts of the value that was put there since the last one."""
        self.left = []
        if not self.misfit():
            now = self.source.values().get(self.key)
            self._alone = self._alone or now is not self._value  # a capture has made an equal tuple
            self._value = now
            now = None
        if self._alone:
            self._holders, self._alone = self._references(), False

    def _is_formed(self, form: tuple[list[Any], Any]) -> bool:
        return form[1] == self._form[1] and all(map(same, self._form[0], form[0]))

    def _with(self, tensors: Sequence[Tensor]) -> Any:
        """A value of the same form with other tensors."""
        left = iter(tensors)
        rest, form = self._form
        return pytree.tree_unflatten([next(left) if one is _TENSOR_MARK else one for one in rest], form)

    def _are_held(self, there: bool) -> bool:
        """Whether the script holds the value, or a part of it, elsewhere; ``there``: it is still in its place."""
        known = self._holders
        if self._departed:
            return False
        return not known or self._references() != [known[0] - (not there), *known[1:]]

    def _references(self) -> list[int]:
        found: list[int] = []
        _count(self._value, found)
        return found

    def _tensors(self, now: Any, holder: RebindingBackend) -> Sequence[Tensor] | None:
        """The tensors that are there now, if they are plain or ours, and like ours in form, shape, dtype and device."""
        leaves, form = _flatten(now)
        fits = self._is_formed(form) and all(
            new is old or (_is_like(old, new) and not holder.owns(new))
            for old, new in zip(self.leaves, leaves, strict=True)
        )
        return leaves if fits else None


class RebindingTable:
    """The rebinding sites of one rank, held by weak references: plans hold the sites."""

    def __init__(self, holder: RebindingBackend) -> None:
        self._holder = holder
        self._refs: list[weakref.ref[RebindingSite]] = []  # in the same order on all ranks

    @property
    def _sites(self) -> list[RebindingSite]:
        return [site for ref in self._refs if (site := ref()) is not None]

    def adopt(
        self, places: Iterable[tuple[StateSource, Any]], new: Mapping[int, StateTensor], states: Iterable[ScriptState]
    ) -> tuple[RebindingSite, ...]:
        """Make the sites for a plan whose step rebinds these places; sites that exist and fit are reused.

        ``new`` are the tensors of the script that became variables of this plan, by id; their stand-ins are in no place
        yet.
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
        """Drop the sites of these variables: plans change them in place, or they no longer exist."""
        left = (site for site in self._sites if not any(name in names for name in site.names))
        self._refs = [weakref.ref(site) for site in left]

    def among(self, holders: Callable[[], Container[int]]) -> list[RebindingSite]:
        """The sites of these holders, by id: those that the current job looks at, which exist on all ranks."""
        sites = self._sites
        of = holders() if sites else ()
        return [site for site in sites if id(site.source.holder) in of]

    def refresh(self, sites: Iterable[RebindingSite], states: Callable[[], Iterable[ScriptState]]) -> None:
        """Before a call: refresh these sites, all moved stand-ins first."""
        sites = [*sites]
        ours = {id(leaf): site for site in sites for leaf in site.leaves}
        moved = [ours[id(new)] for site in sites for new in site.found if not ours.get(id(new), site).is_at(site)]
        for site in dict.fromkeys(moved):  # all of them before the first value is written
            site.depart(self._holder, states())
        for site in sites:
            site.refresh(self._holder, states)

    def make_way(self, sites: Iterable[RebindingSite], states: Callable[[], Iterable[ScriptState]]) -> None:
        """Before a call of a plan that puts other tensors at these sites."""
        for site in sites:
            site.make_way(self._holder, states)


def _flatten(value: Any) -> tuple[list[Any], tuple[list[Any], Any]]:
    """The tensors in a value, and its form without them."""
    leaves, form = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, ([_TENSOR_MARK if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: the value itself, or items of its lists, tuples and dictionaries."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_like(ours: Tensor, now: Tensor) -> bool:
    return (ours.shape, ours.dtype, ours.device) == (now.shape, now.dtype, now.device) and not now.requires_grad


def _count(value: Any, found: list[int]) -> None:
    found.append(sys.getrefcount(value))
    if not isinstance(value, Tensor):
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, Iterable) else ():
            _count(part, found)
