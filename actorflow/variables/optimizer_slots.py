"""Stand-ins in the state of optimizers, and changes that the script makes to that state between calls.

The script may load, replace or clear the state, as a whole or for one parameter.  Before the next call its changes are
written to the plans' variables.
"""

from __future__ import annotations

import copy
import operator
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.deferred import DeferredTensor
from actorflow.standins.owned_tensor import OwnedTensor, ReleasedValue, keeps_stand_ins, saved_value, value_or_deferred
from actorflow_compiler.capture.optimizer_state import is_torchs
from actorflow_compiler.core.errors import StateError

__all__ = ["OptimizerSlot", "OptimizerStates"]

HOLDERS = 2  # reference count of a stand-in that only this module holds: the slot, and the argument of ``getrefcount``


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """A tensor of an optimizer's state: ``optimizer.state[parameter][key]``."""

    optimizer: torch.optim.Optimizer
    parameter: Tensor
    key: str


@dataclass(frozen=True, slots=True)
class _HeldSlot:
    """A slot of an optimizer that plans step, with its stand-in; it does not keep the parameter alive."""

    parameter: weakref.ref[Tensor]
    key: str
    owned: OwnedTensor


@dataclass(frozen=True, slots=True)
class _StateSnapshot:
    """A snapshot of an optimizer's state, for a fast check that it has not changed."""

    state: Any
    each: tuple[Any, ...]  # the values of the state, in order
    of: tuple[Any, ...]  # for each slot: the dictionary that holds it; below, its key and its stand-in
    keys: tuple[str, ...]
    owned: tuple[OwnedTensor, ...]

    def is_there(self, state: Any) -> bool:
        try:
            return (
                state is self.state
                and len(state) == len(self.each)
                and all(map(operator.is_, state.values(), self.each))
                and all(map(operator.is_, map(operator.getitem, self.of, self.keys), self.owned))
            )
        except KeyError:
            return False


class OptimizerStates:
    """The stand-ins that plans have put into the state of optimizers, on one rank.

    ``read`` and ``write`` access the value of a variable by name.  ``renew`` makes another stand-in for a variable.
    ``created`` returns the state that an optimizer creates for a parameter in its first step, by key; ``forget`` clears
    its cache, because settings of the optimizer may have changed.
    """

    def __init__(
        self, read: Callable[[str], Tensor], write: Callable[[str, Tensor], None],
        renew: Callable[[OwnedTensor], OwnedTensor], created: Callable[[OptimizerSlot], dict[str, Any]],
        forget: Callable[[], None],
    ) -> None:  # fmt: skip
        self._read, self._write, self._renew, self._created, self._forget = read, write, renew, created, forget
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, _HeldSlot]] = weakref.WeakKeyDictionary()
        self._whole: weakref.WeakKeyDictionary[torch.optim.Optimizer, _StateSnapshot] = weakref.WeakKeyDictionary()
        self._cleared: set[str] = set()  # variables that the script has cleared and that no plan has stepped since
        self._partly: set[str] = set()  # those of them whose parameter alone would get a first step, with dampening
        self._lent: dict[str, str] = {}  # variable → the variable that in PyTorch would continue with its memory

    def hold(self, name: str, slot: OptimizerSlot, owned: OwnedTensor) -> None:
        """Put the stand-in for a variable into its slot of an optimizer's state."""
        optimizer = slot.optimizer
        if optimizer not in self._held:
            self._held[optimizer] = {}
            optimizer.register_state_dict_post_hook(_with_values)
            optimizer.register_load_state_dict_post_hook(self._loaded)
        self._held[optimizer][name] = _HeldSlot(weakref.ref(slot.parameter), slot.key, owned)
        self._whole.pop(optimizer, None)
        self._put(name, slot, owned)

    def drop(self, names: Collection[str]) -> None:
        """Forget these variables, and all variables of parameters that no longer exist."""
        self._lent = {key: into for key, into in self._lent.items() if key not in names and into not in names}
        for optimizer, known in self._held.items():
            gone = [name for name, one in known.items() if name in names or one.parameter() is None]
            for name in gone:
                del known[name]
                self._cleared.discard(name)
                self._partly.discard(name)
            if gone:
                self._whole.pop(optimizer, None)

    def refresh(self) -> None:
        """Before a call: write the changes that the script made to the state of optimizers to the variables."""
        for optimizer in list(self._held):
            if not self._is_as_before(optimizer):
                self._take(optimizer, again=False)

    def _is_as_before(self, optimizer: torch.optim.Optimizer) -> bool:
        whole = self._whole.get(optimizer)
        return whole is not None and whole.is_there(optimizer.state)

    def check(self, used: Collection[str]) -> None:
        """Raise StateError if a plan with these variables would not step as the optimizer does in PyTorch."""
        for name in sorted(self._lent.keys() & used) if self._lent else ():
            raise StateError(
                f"{name} was put into an optimizer's state as {self._lent[name]}, and both are stepped: in PyTorch "
                f"they share memory, and plans keep them apart; expected: a copy "
                f"(copy.deepcopy(optimizer.state[p]), or load_state_dict)"
            )
        for name in self._partly.intersection(used):
            raise StateError(
                f"{name} was taken out of the optimizer's state, and not what it keeps of other parameters: with "
                f"dampening, the first step of a parameter is another one; expected: clear all of it "
                f"(optimizer.state.clear())"
            )

    def stepped(self, used: Collection[str]) -> None:
        """Note that a call of a plan with these variables was issued.

        State that the script had cleared exists again after it, so its stand-ins are put back.
        """
        if not self._cleared or self._cleared.isdisjoint(used):
            return
        self._forget()
        for optimizer, known in self._held.items():
            for name, one in known.items():
                parameter = one.parameter()
                if name in self._cleared and name in used and parameter is not None:
                    self._put(name, OptimizerSlot(optimizer, parameter, one.key), one.owned)

    def _put(self, name: str, slot: OptimizerSlot, owned: OwnedTensor) -> None:
        values = self._own_values(name, slot, owned)
        for key, value in self._created(slot).items():
            if not isinstance(value, Tensor):
                values.setdefault(key, value)
        values[slot.key] = owned
        self._cleared.discard(name)

    def _own_values(self, name: str, slot: OptimizerSlot, owned: OwnedTensor) -> dict[str, Any]:
        """The optimizer's state of a parameter, as a dictionary that no other optimizer or parameter shares."""
        values: dict[str, Any] = slot.optimizer.state.setdefault(slot.parameter, {})
        there = values.get(slot.key)
        if not isinstance(there, OwnedTensor) or there is owned:
            return values
        for optimizer, known in self._held.items():
            one = known.get(there.name_in_plan)
            if one is None or one.owned is not there:
                continue
            self._lent[there.name_in_plan] = name
            if optimizer is not slot.optimizer and optimizer.state is slot.optimizer.state:
                slot.optimizer.state = copy.copy(optimizer.state)
            parameter = one.parameter()
            if parameter is not None and optimizer.state.get(parameter) is values:
                values = slot.optimizer.state[slot.parameter] = dict(values)
        return values

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """After ``optimizer.load_state_dict``: write the loaded state to the variables."""
        self._take(optimizer, again=True)

    def _take(self, optimizer: torch.optim.Optimizer, again: bool) -> None:
        """Write the tensors that replaced stand-ins to the variables, and put the stand-ins back.

        A slot that is missing is reset to its initial value: once after the script cleared it, or each time if
        ``again``.
        """
        self._forget()
        self._whole.pop(optimizer, None)
        slots, missing = [], []
        known = [(name, one, one.parameter()) for name, one in self._held[optimizer].items()]
        for name, one, parameter in known:
            if parameter is None:
                continue
            values = optimizer.state.get(parameter, {})
            found = values.get(one.key)
            if found is None:
                missing.append((name, OptimizerSlot(optimizer, parameter, one.key)))
                continue
            if found is not one.owned:
                _check(name, one.owned, found)
                given = value_or_deferred(found) if isinstance(found, Tensor) else torch.tensor(found)
                self._lent = {key: into for key, into in self._lent.items() if name not in (key, into)}
                values = self._own_values(name, OptimizerSlot(optimizer, parameter, one.key), one.owned)
                one = self._left(optimizer, name, one)
                self._write(name, given)
                values[one.key] = one.owned
            slots.append((values, one.key, one.owned))
        complete = not missing
        stepped = set() if complete else {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [(name, slot) for name, slot in missing if id(slot.parameter) in stepped]  # the others may come back
        self._partly -= {name for name, _, _ in known}
        if slots and any(g.get("dampening") and g.get("momentum") for g in optimizer.param_groups):
            self._partly.update(name for name, _ in missing)
        for name, slot in missing:
            if (again or name not in self._cleared) and is_torchs(optimizer):
                value = self._created(slot).get(slot.key)
                first = value.flatten()[0] if isinstance(value, Tensor) and value.numel() else torch.zeros(())
                self._left(optimizer, name, self._held[optimizer][name])
                self._write(name, first)
            self._cleared.add(name)
        if complete:
            state = optimizer.state
            of, keys, owned = zip(*slots, strict=True) if slots else ((), (), ())
            self._whole[optimizer] = _StateSnapshot(state, tuple(state.values()), of, keys, owned)

    def _left(self, optimizer: torch.optim.Optimizer, name: str, one: _HeldSlot) -> _HeldSlot:
        """Give a stand-in that the script still holds a value of its own, and put another one into the slot."""
        if sys.getrefcount(one.owned) <= HOLDERS:
            return one
        past = ReleasedValue(self._read(name))
        other = _HeldSlot(one.parameter, one.key, self._renew(one.owned))
        one.owned.leave(past)
        self._held[optimizer][name] = other
        return other


def _check(name: str, owned: OwnedTensor, found: Any) -> None:
    """Raise StateError unless ``found`` can replace the value of an optimizer's variable; a count may be a number."""
    fits = (found.shape, found.dtype) == (owned.shape, owned.dtype) if isinstance(found, Tensor) else not owned.ndim
    if not fits and not (isinstance(found, Tensor) and found.shape == owned.shape and not owned.ndim):
        said = f"{found.dtype}{list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise StateError(
            f"{name} was replaced by {said}; a tensor {owned.dtype}{list(owned.shape)} was expected: what an optimizer "
            f"holds after its first step keeps its shape; make a new optimizer"
        )


def _with_values(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dictionary with values instead of stand-ins."""
    if keeps_stand_ins():
        return state_dict
    values = pytree.tree_map_only((OwnedTensor, DeferredTensor), saved_value, state_dict["state"])
    return {**state_dict, "state": values}
