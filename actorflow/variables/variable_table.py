"""The table of variables that plans own on one rank: it puts in stand-ins, and reads and writes values.

The worker holds this rank's parts of the variables.  The whole value of a variable is assembled from the parts of all
ranks when it is read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from actorflow.deferred import DeferredTensor
from actorflow.runtime.parts import assemble, part, sources
from actorflow.runtime.results import Peers, fetch_part
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.torchscript import support_torchscript
from actorflow.standins.locations import ScriptAttributeLocation, ScriptListLocation, ScriptTensorLocation
from actorflow.standins.memory_spans import MemorySpan, memory_span, overlap
from actorflow.standins.owned_tensor import DetachedTensor, OwnedTensor, SharedCopy, real_value, value_or_deferred
from actorflow.support.requests import Request
from actorflow.transport.redistribution import dtype_of
from actorflow.transport.small_tensors import encode
from actorflow.variables.gradients import KeptGradients
from actorflow.variables.host_values import HostValues
from actorflow.variables.optimizer_slots import OptimizerSlot, OptimizerStates
from actorflow.variables.optimizer_state import initial_state, python_state
from actorflow.variables.views import AssignedData, TakenTensor, layout_of, redirect_views
from actorflow_compiler.capture.optimizer_state import is_torchs
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.torch_internals import swap_in_place
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.plan.region import device_shape
from actorflow_compiler.plan.stamping import whole_everywhere
from actorflow_compiler.values.gradients import GRADIENT_SUFFIX, KEPT_GRADIENT
from actorflow_compiler.values.variables import ScriptState, StateTensor

__all__ = ["OfferedValue", "VariablePart", "VariableTable"]


@dataclass(frozen=True, slots=True)
class VariablePart(Request):
    """A request to another rank for its part of a variable."""

    calls: int  # number of calls that the asking rank has issued: it wants the value after them
    writes: int  # number of writes of variables that its script has made
    name: str
    history: int = -1  # digest of what the asking rank has done up to its last call; -1: all ranks did the same


@dataclass(frozen=True, slots=True)
class OfferedValue(Request):
    """A request to the master for a value that it offers."""

    call: int  # number of the call for which the plan is compiled
    name: str


LOOKED_AT = 8192  # elements of a borrowed tensor that each call compares, at most about twice as many

_WEAK: Any = StorageWeakRef  # StorageWeakRef is not typed


@dataclass(slots=True)
class BorrowedTensor:
    """A plain tensor that plans only read: the script keeps it, and the plans have copies of its value."""

    tensor: Tensor | None  # None while no current plan reads it
    get: Callable[[], Any]
    put: Callable[[Tensor], None]  # puts another tensor in its place
    version: int  # of the tensor when it was copied
    alone: bool  # whether the job reads it from one place only
    stood: dict[int, weakref.ref[Tensor]]  # by id: all tensors that were in this place
    memory: torch.UntypedStorage | None  # kept alive, so that its address is not reused
    seen: Tensor | None  # a copy to compare: NumPy and ``.data`` change it without counting a version

    def is_as_before(self, now: Tensor) -> bool:
        """Whether the plans' copy still equals the tensor ``now``."""
        lies = self.memory is not None and _lies_in(now, self.memory)
        same = now is self.tensor and now._version == self.version and lies
        return same and (self.seen is None or _equal(_looked_at(now), self.seen))

    def took(self, now: Tensor) -> None:
        """Note that the plans have copied the tensor ``now``."""
        self.tensor, self.version, self.memory = now, now._version, now.untyped_storage()
        on_host = now.device.type == "cpu" and now.layout == torch.strided and not isinstance(now, DeferredTensor)
        self.seen = _looked_at(now).clone() if on_host or not self.memory.resizable() else None
        self.stood.update(_referred(now))


@dataclass(frozen=True, slots=True)
class _WatchedModule:
    """The stand-ins that a module holds, by name: parameters and buffers."""

    module: weakref.ref[nn.Module]
    parameters: dict[str, OwnedTensor]
    buffers: dict[str, OwnedTensor]


@dataclass(frozen=True, slots=True)
class _ModuleSnapshot:
    """A snapshot of all stand-ins that modules hold, for a fast check that none was replaced."""

    tensors: tuple[Any, ...]  # for each stand-in: the dictionary that holds it; below, its key there, and the stand-in
    keys: tuple[str, ...]
    owned: tuple[OwnedTensor, ...]

    @staticmethod
    def of(watched: Iterable[_WatchedModule]) -> _ModuleSnapshot:
        """A snapshot of what these modules hold."""
        there = ((one, one.module()) for one in watched)
        held = [
            (tensors, key, owned)
            for one, module in there if module is not None
            for known, tensors in ((one.parameters, module._parameters), (one.buffers, module._buffers))
            for key, owned in known.items()
        ]  # fmt: skip
        return _ModuleSnapshot(*zip(*held, strict=True)) if held else _ModuleSnapshot((), (), ())

    def is_there(self) -> bool:
        """Whether all stand-ins are still where they were."""
        try:
            return all(map(is_, map(getitem, self.tensors, self.keys), self.owned))
        except KeyError:
            return False


class VariableTable:
    """The variables of all plans on one rank.

    ``parts`` are this rank's parts, which the worker changes in place.  ``settled`` blocks until every call that this
    rank issued is done; ``progress`` is the number of these calls.  ``together`` blocks until every rank has reached
    the same operation, which its argument names.  ``moved`` is called after each write and each offer.  ``capturing``
    is whether a step is being captured.  ``before_write`` is called with a variable's name before each write.
    ``history`` is the digest of what this rank has done up to its last of so many calls (see ``VariablePart``).
    """

    def __init__(
        self,
        peers: Peers,
        names: NameRegistry,
        parts: dict[str, Tensor],
        device: torch.device,
        settled: Callable[[], None],
        progress: Callable[[], int],
        together: Callable[[str], None],
        moved: Callable[[], None],
        capturing: Callable[[], bool],
        before_write: Callable[[str], None] = lambda name: None,
        history: Callable[[int], int] = lambda calls: -1,
    ) -> None:
        self.layouts: dict[str, Variable] = {}
        self.writes = 0  # number of writes so far; equal on all ranks
        self.offered = -1  # the last call during which values were offered
        self.gradients = KeptGradients(self)
        self.values = HostValues(self)
        self._peers, self._names, self._parts, self._device = peers, names, parts, device
        self._settled, self._progress, self._together, self._moved = settled, progress, together, moved
        self._capturing, self._before_write, self._history = capturing, before_write, history
        self._read_apart = False  # since the last call, the script has read what some ranks must ask others for
        self._owned: dict[str, weakref.ref[OwnedTensor]] = {}
        self._dead: deque[str] = deque()  # names whose stand-ins died; any thread appends, in a garbage collection
        self._gone: dict[str, None] = {}  # the same in order, with their gradients
        self._borrowed: dict[str, BorrowedTensor] = {}
        self._reshaped: dict[str, Tensor] = {}  # borrowed tensors whose shape or dtype has changed
        self._watched: dict[int, _WatchedModule] = {}  # by id of the module
        self._holding: _ModuleSnapshot | None = None  # snapshot of these modules; None: to be made
        self._ties: dict[str, SharedCopy] = {}  # variables that in PyTorch would now share another variable's memory
        self._given: dict[str, AssignedData] = {}  # likewise, the memory of a plain tensor
        self._memories: dict[int, list[tuple[Any, MemorySpan, str]]] = {}  # former memory of owned tensors, by address
        self._taken: list[TakenTensor] = []  # tensors that became stand-ins for the plan being adopted
        self._offers: dict[str, Tensor] = {}  # values that other ranks may request
        self._found: tuple[ScriptState, dict[str, tuple[torch.optim.Optimizer, StateTensor]]] | None = (
            None  # of the last search
        )
        self._creates: dict[tuple[int, int, int, torch.dtype], dict[str, Any]] = {}  # what optimizers create
        self.states = OptimizerStates(self.read, self.write, self._another, self._created, self._creates.clear)

    # -- taking in ---------------------------------------------------------------------------------

    def part_of(self, variable: Variable, value: Tensor) -> Tensor | None:
        """This rank's part of the value of a variable; None if it has none."""
        rank, placement = self._peers.rank, variable.placement
        if rank not in placement:
            return None
        return part(value.detach(), placement, variable.sbp, placement.index(rank)).to(self._device)

    def start_of(self, variable: Variable, state: ScriptState) -> Tensor:
        """The initial value of a new variable: the script's, or the one that its optimizer creates."""
        held = state.held.get(variable.name)
        if held is not None:
            return held.tensor
        if variable.kind == KEPT_GRADIENT:
            grad = self.gradients.start_of(variable.name, state)
            return torch.zeros((), dtype=dtype_of(variable.dtype)).expand(variable.shape) if grad is None else grad
        slot = self.slot(variable.name, state)
        now = slot.optimizer.state.get(slot.parameter, {}).get(slot.key)
        if isinstance(now, Tensor):  # of another optimizer or parameter, or loaded before the first step
            return value_or_deferred(now).to(dtype_of(variable.dtype)).expand(variable.shape)
        created = self._created(slot).get(slot.key)
        fill = created.flatten()[0].item() if isinstance(created, Tensor) and created.numel() else 0.0
        return torch.tensor(fill, dtype=dtype_of(variable.dtype)).expand(variable.shape)  # expanded, takes no memory

    def slot(self, name: str, state: ScriptState) -> OptimizerSlot:
        """The slot of an optimizer's state with this name."""
        if self._found is None or self._found[0] is not state:
            by_id = {id(h.tensor): h for h in state.held.values()}
            places = {
                f"{title}.{by_id[id(p)].name}": (optimizer, by_id[id(p)])
                for title, optimizer in state.optimizers.items()
                for group in optimizer.param_groups
                for p in group["params"]
            }
            self._found = state, places
            self._creates.clear()
        prefix, _, key = name.rpartition(".")
        if prefix not in self._found[1]:
            raise StateError(f"the plan has a variable {name!r}, which is nothing that this rank's script holds")
        optimizer, held = self._found[1][prefix]
        return OptimizerSlot(optimizer, held.tensor, key)

    def offer(self, number: int, values: Mapping[str, Tensor]) -> None:
        """Offer these values to other ranks, which call ``take``, during call ``number`` and until the next offer."""
        self._offers = dict(values)
        self.offered = number
        self._moved()

    def take(self, number: int, variable: Variable) -> Tensor:
        """The master's value of a variable that it offers during call ``number``; waits for the offer."""
        asked, here = OfferedValue(number, variable.name), torch.device("cpu")
        return fetch_part(self._peers, 0, asked, variable.shape, variable.dtype, here)

    def put_stand_in(self, variable: Variable, state: ScriptState, apart: bool = False) -> None:
        """Put a stand-in wherever the script holds the variable's tensor.

        The tensor object itself becomes the stand-in.  With ``apart`` it stays a plain tensor in its places, and only
        ``state`` gets the stand-in.
        """
        name = variable.name
        self.layouts[name] = variable
        held = state.held.get(name)
        if held is not None:
            self._borrowed.pop(name, None)
            where = memory_span(held.tensor)
            known = None if where is None or apart else layout_of(held.tensor, where)
            if where is not None and not apart:
                self._remember(held.tensor, where, name)
            owned = self._replace(held, state.optimizers.values(), apart)
            self._stands_in(name, owned)
            if known is not None:
                self._taken.append(TakenTensor(owned, *known))
            return
        if variable.kind == KEPT_GRADIENT:
            self.gradients.adopted(name)
            return
        slot = self.slot(name, state)
        like = torch.empty(variable.shape, dtype=dtype_of(variable.dtype), device="meta")
        owned = OwnedTensor.of(like, name, self, device=slot.parameter.device)
        self._stands_in(name, owned)
        self.states.hold(name, slot, owned)

    def adopted(self) -> None:
        """After all variables of a plan were adopted: free data that was needed only for that."""
        redirect_views(self._taken, {id(one.tensor) for one in self._borrowed.values()})
        self._taken.clear()
        self._found = None
        self._creates.clear()

    def lend(self, variable: Variable, held: StateTensor) -> None:
        """Register a tensor that plans only read: the script keeps it."""
        place: Any = held.places[0]
        self.layouts[variable.name] = variable
        tensor, alone = held.tensor, len(held.places) == 1
        borrowed = BorrowedTensor(tensor, place.get, place, tensor._version, alone, {}, None, None)
        borrowed.took(tensor)
        self._borrowed[variable.name] = borrowed
        self._names.loosen(tensor)

    def borrows(self, name: str) -> bool:
        """Whether the script keeps the tensor of a variable, which plans only read."""
        return name in self._borrowed

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is the stand-in of a variable."""
        one = self._owned.get(tensor.name_in_plan) if isinstance(tensor, OwnedTensor) else None
        return one is not None and one() is tensor

    def variable_of(self, tensor: Tensor) -> Variable | None:
        """The variable for which a tensor of the script stands; None if the script has the value itself."""
        if not isinstance(tensor, OwnedTensor) or tensor.left is not None:
            return None
        return self.layouts.get(tensor.name_in_plan)

    def renew(self, owned: OwnedTensor) -> OwnedTensor:
        """Make a new stand-in for a variable; the script may keep the previous one."""
        name = owned.name_in_plan
        new = OwnedTensor.of(owned, name, self)
        new.gradients, new.copies = owned.gradients, owned.copies
        self._names.hand_over(owned, new)
        self._stands_in(name, new)
        for watched in self._watched.values():
            watched.buffers.update({key: new for key, one in watched.buffers.items() if one is owned})
        self._holding = None
        return new

    def _another(self, owned: OwnedTensor) -> OwnedTensor:
        """Make a new stand-in for a tensor of an optimizer's state."""
        new = OwnedTensor.of(owned, owned.name_in_plan, self)
        self._stands_in(owned.name_in_plan, new)
        return new

    def taken_from(self, span: MemorySpan) -> str:
        """Name the variable whose former memory overlaps ``span`` and still has a view in the script; else empty."""
        for memory, where, name in self._memories.get(span[0], ()):
            if not memory.expired() and overlap(where, span):
                return name
        return ""

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules for tensors that replace stand-ins."""
        self._holding = None
        for module in modules:
            known = self._watched.get(id(module))
            if known is None or known.module() is not module:
                known = _WatchedModule(weakref.ref(module), {}, {})
            for found, tensors in ((known.parameters, module._parameters), (known.buffers, module._buffers)):
                found.update({key: tensor for key, tensor in tensors.items() if isinstance(tensor, OwnedTensor)})
            if known.parameters or known.buffers:
                self._watched[id(module)] = known

    def _remember(self, tensor: Tensor, where: MemorySpan, name: str) -> None:
        memory: Any = _WEAK(tensor.untyped_storage())
        left = [one for one in self._memories.get(where[0], ()) if not one[0].expired()]
        self._memories[where[0]] = [*left, (memory, where, name)]

    def _stands_in(self, name: str, owned: OwnedTensor) -> None:
        self._names.loosen(owned)
        self._owned[name] = weakref.ref(owned)
        weakref.finalize(owned, self._dead.append, name).atexit = False

    # -- letting go --------------------------------------------------------------------------------

    def suspend(self, names: Iterable[str]) -> None:
        """Stop keeping borrowed tensors alive that no active plan reads any more."""
        for name in names:
            if name in self._borrowed:
                one = self._borrowed[name]
                one.tensor, one.memory, one.seen, one.get, one.put = None, None, None, _nothing, _nowhere

    def resume(self, held: StateTensor) -> None:
        """Note that a plan that reads a suspended borrowed tensor will be called again."""
        borrowed = self._borrowed.get(held.name)
        if borrowed is None or borrowed.tensor is not None:
            return
        place: Any = held.places[0]
        same = id(held.tensor) in borrowed.stood
        borrowed.tensor, borrowed.get, borrowed.put = held.tensor, place.get, place
        borrowed.alone = len(held.places) == 1
        if not same:
            borrowed.version = -1
            borrowed.stood.update(_referred(held.tensor))

    @property
    def news(self) -> bool:
        """Whether stand-ins have died that ``gone`` has not processed yet."""
        return bool(self._dead)

    @property
    def dying(self) -> bool:
        """Whether this rank may have variables that it could drop."""
        return bool(self._dead or self._gone)

    def gone(self, used: Collection[str]) -> list[str]:
        """The variables that this rank could drop: the stand-in has died or, if borrowed, no other plan uses them."""
        while self._dead:
            name = self._dead.popleft()
            one = self._owned.get(name)
            if one is not None and one() is None:
                self._gone[name] = None
                if name + GRADIENT_SUFFIX in self.layouts:
                    self._gone[name + GRADIENT_SUFFIX] = None
        return [*self._gone, *(name for name in self._borrowed if name not in used)]

    def drop(self, names: Iterable[str]) -> None:
        """Forget variables that no rank's script can reach any more; all ranks must drop the same ones."""
        for name in names:
            for kept in (self.layouts, self._owned, self._borrowed, self._gone, self._parts, self._ties, self._given):
                kept.pop(name, None)
        self.gradients.drop(names)
        self.states.drop(frozenset(names))
        for key, watched in list(self._watched.items()):
            if watched.module() is None:
                del self._watched[key]
                self._holding = None
        for address, memories in list(self._memories.items()):
            left = [one for one in memories if not one[0].expired()]
            if left:
                self._memories[address] = left
            else:
                del self._memories[address]

    def _replace(self, held: StateTensor, optimizers: Iterable[torch.optim.Optimizer], apart: bool) -> OwnedTensor:
        """Make the tensor object itself a stand-in, so that every reference to it becomes one, unless ``apart``."""
        tensor = held.tensor
        owned = OwnedTensor.of(tensor, held.name, self)
        if apart:
            self._names.hand_over(tensor, owned)
            held.tensor = owned
            return owned
        self.gradients.take(held.name, tensor)
        if tensor.is_leaf:
            tensor.grad = None
        owned.gradients = self.gradients
        in_scripts = [
            place
            for place in held.places
            if isinstance(place, ScriptTensorLocation | ScriptAttributeLocation | ScriptListLocation)
        ]
        for place in in_scripts:  # torch cannot swap a tensor that it holds itself
            place(torch.empty(0))
        try:
            swap_in_place(tensor, owned)
        except RuntimeError:  # there is a graph through the tensor
            held.put(owned)
            if in_scripts:
                support_torchscript(owned)
            self._names.replace(tensor, owned)
            held.tensor = owned
            for optimizer in optimizers:
                if tensor in optimizer.state:
                    optimizer.state[owned] = optimizer.state.pop(tensor)
            return owned
        assert isinstance(tensor, OwnedTensor)
        for place in in_scripts:
            place(tensor)
            support_torchscript(tensor)
        return tensor

    def _created(self, slot: OptimizerSlot) -> dict[str, Any]:
        optimizer, parameter = slot.optimizer, slot.parameter
        groups = enumerate(optimizer.param_groups)
        g, group = next((g, group) for g, group in groups if any(p is parameter for p in group["params"]))
        key = id(optimizer), g, parameter.dim(), parameter.dtype
        if key not in self._creates:
            made = initial_state if is_torchs(optimizer) else python_state  # the first step of others is in the plan
            self._creates[key] = made(optimizer, group, parameter)
        return self._creates[key]

    # -- between calls -----------------------------------------------------------------------------

    def refresh(self, trains: bool) -> None:
        """Before a call of a job, which ``trains`` or not: write the script's changes to the variables."""
        if trains and self._given:
            self._follow_given()
        self.states.refresh()
        if self._holding is None or not self._holding.is_there():
            for watched in self._watched.values():
                module = watched.module()
                if module is not None:
                    self._refresh(watched.parameters, module._parameters)
                    self._refresh(watched.buffers, module._buffers)
            self._holding = _ModuleSnapshot.of(self._watched.values())
        self._reshaped.clear()
        for name, borrowed in self._borrowed.items():
            if borrowed.tensor is None:
                continue
            now = borrowed.get()
            if isinstance(now, OwnedTensor) and now.left is not None and borrowed.alone:  # it was at a rebinding site
                borrowed.put(now.left)
                now = now.left
            if not isinstance(now, Tensor) or isinstance(now, OwnedTensor) or not borrowed.alone:
                now = borrowed.tensor  # another variable is there by now, and this one may be read elsewhere
            if not borrowed.is_as_before(now):
                layout = self.layouts[name]
                if tuple(now.shape) != layout.shape or now.dtype != dtype_of(layout.dtype):
                    if now is borrowed.tensor:  # otherwise the tensor there is another variable
                        self._reshaped[name] = now
                    continue
                self.write(name, now)
                borrowed.took(now)

    def check(self, used: Collection[str], trains: bool) -> None:
        """Raise StateError if a plan with these variables would differ from PyTorch; ``trains``: it changes them."""
        self.states.check(used)
        if trains:
            self._untied(used)
        for name in self._reshaped.keys() & used:
            now, layout = self._reshaped[name], self.layouts[name]
            raise StateError(
                f"{name} is {now.dtype}{list(now.shape)} now; {layout.dtype}{list(layout.shape)} was expected: "
                f"a tensor that a job reads and that is no argument keeps its shape; put another one in its place, or "
                f"make it an argument"
            )

    def _untied(self, changed: Collection[str]) -> None:
        """Raise StateError if one of the variables to be changed shares memory with another one in PyTorch."""
        for name, whole in self._ties.items():
            if not whole.released and (name in changed or whole.name in changed):
                raise StateError(
                    f"{name} and {whole.name} share memory since .data of one was set to .data of the other, and a job "
                    f"or the script changes one of them: plans keep them apart; expected: a copy "
                    f"({name}.data = {whole.name}.data.clone()), or one parameter in both places from the first call on"
                )

    def _follow_given(self) -> None:
        """Before variables change, turn tensors assigned to ``.data`` of stand-ins into views of variables."""
        for borrowed in self._borrowed.values():
            where = None if borrowed.tensor is None else memory_span(borrowed.tensor)
            name = next((name for name, one in self._given.items() if one.taken.is_at(where)), "")
            if name:
                raise StateError(
                    f"{name}.data was set to memory of a tensor that a job reads as it is, and which would not follow "
                    f"what jobs make of {name}; expected: a copy ({name}.data = tensor.clone())"
                )
        these = []
        while self._given:
            name, one = self._given.popitem()
            tensor = one.tensor()
            if tensor is not None and tensor._version != one.version:  # the script has changed the tensor since
                self.write(name, tensor)
            these.append(one.taken)
        redirect_views(these, ())

    def _refresh(self, known: dict[str, OwnedTensor], tensors: dict[str, Any]) -> None:
        """Write tensors that replaced stand-ins of a module to the variables, and put the stand-ins back."""
        changed = [(key, owned) for key, owned in known.items() if _item(tensors, key) is not owned]
        for key, owned in changed:
            now = _item(tensors, key)
            if now is None:  # the module no longer has it
                del known[key]
                continue
            if self.owns(now):  # e.g. two buffers were exchanged: no value moves, and guards check which is where
                known[key] = now
                continue
            fits = now.shape == owned.shape and now.dtype == owned.dtype
            if owned.is_parameter or not fits:  # a variable of its own: an optimizer may go on with the old one
                del known[key]
                continue
            self.write(owned.name_in_plan, now.detach())
            if now.requires_grad != owned.requires_grad:
                owned.requires_grad_(now.requires_grad)
            tensors[key] = owned

    def takes_over(self, old: Tensor, new: Tensor) -> bool:
        """Whether plans have copied the value of ``new``, which replaced a tensor ``old`` that they read."""
        if isinstance(new, DetachedTensor) and not new.is_released:  # a plan may change the variable that it represents
            return False
        return any(
            one.tensor is new and one.alone and id(old) in one.stood and one.stood[id(old)]() is old
            for one in self._borrowed.values()
        )

    # -- reading and writing -----------------------------------------------------------------------

    @property
    def capturing(self) -> bool:
        """See ``VariableStore``."""
        return self._capturing()

    @property
    def moment(self) -> tuple[int, int]:
        """See ``VariableStore``."""
        return self._progress(), self.writes

    def share(self, name: str, copy: Tensor) -> None:
        """See ``VariableStore``."""
        where = memory_span(copy)
        if where is not None:
            self._remember(copy, where, name)

    def unshare(self, copy: Tensor) -> None:
        """See ``VariableStore``."""
        where = memory_span(copy)
        if where is not None:
            found = self._memories.get(where[0], ())
            self._memories[where[0]] = [one for one in found if one[1] != where]

    def tie(self, owned: OwnedTensor, data: Tensor | None) -> None:
        """See ``VariableStore``.

        Variables that share memory must not change any more; a plain tensor becomes a view of the variable.
        """
        name = owned.name_in_plan
        self._ties.pop(name, None)
        self._given.pop(name, None)
        if isinstance(data, DetachedTensor):
            others = (part for part in data.whole.parts if not part.released and part.name != name)
            if (other := next((part for part in others if _overlap(part.value, data.plain)), None)) is not None:
                self._ties[name] = other
        elif data is not None and (where := memory_span(data)) is not None:
            self._given[name] = AssignedData(
                TakenTensor(owned, *layout_of(data, where)), weakref.ref(data), data._version
            )

    def read(self, name: str) -> Tensor:
        """See ``VariableStore``; other ranks need not call it at the same time."""
        layout = self.layouts[name]
        self._settled()
        calls, writes = self._progress(), self.writes
        self._read_apart = self._read_apart or not whole_everywhere(layout, self._peers.world)

        def one(index: int) -> Tensor:
            owner = layout.placement.ranks[index]
            if owner == self._peers.rank:
                return self._parts[name].clone()
            shape = device_shape(layout.shape, layout.sbp, layout.placement, index)
            asked = VariablePart(calls, writes, name, self._history(calls))
            return fetch_part(self._peers, owner, asked, shape, layout.dtype, self._device)

        parts = {index: one(index) for index in sources(layout.placement, layout.sbp, self._peers.rank)}
        whole = assemble(parts, layout.shape, layout.placement, layout.sbp)
        owned = self._owned[name]() if name in self._owned else None
        return whole if owned is None else whole.to(owned.device)

    def write(self, name: str, value: Tensor) -> None:
        """See ``VariableStore``; every rank must do the same, and CallError is raised where one does something else."""
        self._untied({name})
        if name in self._given:
            self._follow_given()
        layout = self.layouts[name]
        self._settled()
        self._together(f"a write of {name}")  # another rank must not read the new value where it expects the old one
        value = value.detach().to(dtype_of(layout.dtype)).expand(layout.shape)
        mine = self.part_of(layout, value)
        if mine is not None:
            self._before_write(name)
            self._parts[name].copy_(mine)
        self.values.forget(name)
        self.writes += 1
        self._moved()

    def take_reads(self) -> bool:
        """Whether this rank's script has read, since the last time, what some ranks must ask others for.

        As every rank runs the same script, others may be about to read the same.
        """
        found, self._read_apart = self._read_apart, False
        return found

    def serve(self, name: str) -> bytes:
        """This rank's part of a variable as bytes, for a rank that reads the variable."""
        return encode([self._parts[name]])[0]

    def serve_offer(self, name: str) -> bytes:
        """An offered value as bytes."""
        return encode([real_value(self._offers[name]).detach()])[0]


def _nothing() -> None:
    """The getter of a suspended borrowed tensor, which has no place: None."""


def _nowhere(tensor: Tensor) -> None:
    """The setter of a suspended borrowed tensor, which has no place: does nothing."""


def _looked_at(tensor: Tensor) -> Tensor:
    """The elements of a host tensor that each call compares: all of a small one, a strided sample of a large one."""
    tensor = tensor.detach()
    step = tensor.numel() // LOOKED_AT
    if step < 2 or not tensor.untyped_storage().resizable():  # NumPy may write any element unnoticed
        return tensor
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach // step,), (step,), tensor.storage_offset())


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _overlap(one: Tensor, other: Tensor) -> bool:
    where, there = memory_span(one), memory_span(other)
    return where is not None and there is not None and overlap(where, there)


def _lies_in(tensor: Tensor, memory: torch.UntypedStorage) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == memory.data_ptr()
    except RuntimeError:  # a deferred tensor has no memory yet
        return True


def _referred(tensor: Tensor) -> dict[int, weakref.ref[Tensor]]:
    return {id(tensor): weakref.ref(tensor)}


def _item(tensors: Any, key: str) -> Any:
    """A tensor of a module by name; None if it is gone.  torch.jit modules have no dictionary of their tensors."""
    return tensors.get(key) if isinstance(tensors, dict) else dict(tensors.items()).get(key)
