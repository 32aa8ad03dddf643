"""Name the state that a search has found: modules, then other tensors, then parameters that only optimizers hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.set_order import tensor_text
from actorflow.standins.locations import (
    FrozenMemberLocation,
    ItemLocation,
    MemberLocation,
    ScriptTensorLocation,
    TensorLocation,
)
from actorflow.standins.owned_tensor import OwnedTensor
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import scaler_state
from actorflow_compiler.plan.plan import VariableKind
from actorflow_compiler.values.variables import ScriptState, StateTensor

__all__ = ["StateNaming"]

MEMBERS = (MemberLocation, FrozenMemberLocation)


class StateNaming:
    """Adds modules, tensors, scalers and optimizers to ``state``, each by the name that it has in this process.

    An object without a name is named by its path.  Names are given in the order of the calls.
    """

    def __init__(self, names: NameRegistry, state: ScriptState) -> None:
        self.state = state
        self._names = names
        self._held: dict[int, StateTensor] = {}  # by id of the tensor

    def _hold(self, tensor: Tensor, wanted: str, kind: VariableKind, place: TensorLocation) -> StateTensor:
        """Add a tensor that is held at ``place``; if another tensor has replaced it, put that one there."""
        left = tensor.left if isinstance(tensor, OwnedTensor) else None
        made_of = tensor.made_of if isinstance(tensor, OwnedTensor) else None
        now = self._names.current(tensor) if left is None else left
        if now is not tensor:
            place(now)
            tensor = now
        if id(tensor) not in self._held:
            name = self._names.give(tensor, wanted)
            self._held[id(tensor)] = self.state.held[name] = StateTensor(name, kind, tensor)
            if made_of is not None:
                self._names.made_of[name] = made_of
        held = self._held[id(tensor)]
        held.places.append(place)
        return held

    def modules(self, found: Iterable[tuple[str, nn.Module]]) -> None:
        """Name root modules by path, and their parameters and buffers by the root's name and their qualified name."""
        found = [*found]
        inner = {id(child) for _, m in found for child in m.modules() if child is not m}
        for path, root in found:
            if id(root) in inner:
                continue
            root_name = self._names.give(root, path)
            self.state.modules[root_name] = root
            for prefix, module in root.named_modules():
                where = f"{root_name}.{prefix}" if prefix else root_name
                item = ScriptTensorLocation if isinstance(module, torch.jit.ScriptModule) else ItemLocation
                parameters, buffers = module._parameters, module._buffers
                for kind, tensors in ((VariableKind.PARAMETER, parameters), (VariableKind.BUFFER, buffers)):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            self._hold(tensor, f"{where}.{name}", kind, item(tensors, name))

    def tensors(self, found: Iterable[tuple[str, Tensor, TensorLocation]]) -> None:
        """Name tensors that modules do not hold, by path: those last that are members of sets.

        Raises CaptureError for equal ones that a set alone holds: ranks may swap them, as sets are ordered by address.
        """
        seen: set[tuple[str, str]] = set()
        for path, tensor, place in sorted(found, key=lambda one: isinstance(one[2], MEMBERS)):
            if isinstance(place, MEMBERS) and not self._is_known(tensor):
                group, _, _ = path.rpartition(".")
                key = group, tensor_text(tensor)
                if key in seen:
                    raise CaptureError(
                        f"{group} is a set, and two of its tensors are equal ({key[1].rpartition(' ')[0]}); nothing "
                        "else that the job can reach holds them, so ranks may swap them; expected: a list or a dict"
                    )
                seen.add(key)
            trained = tensor.requires_grad and tensor.is_leaf
            self._hold(tensor, path, VariableKind.PARAMETER if trained else VariableKind.TENSOR, place)

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor has a name, of a module or of an earlier search."""
        return id(self._names.current(tensor)) in self._held or self._names.known(tensor) is not None

    def scalers(self, found: Iterable[tuple[str, torch.amp.GradScaler]]) -> None:
        """Name gradient scalers by path, and their tensors by attribute."""
        for path, scaler in found:
            title = self._names.give(scaler, path)
            self.state.scalers[title] = scaler
            held = [
                self._hold(tensor, f"{title}.{name}", VariableKind.TENSOR, ItemLocation(vars(scaler), name))
                for name, tensor in scaler_state(scaler)
            ]
            scale, tracker = (one.name for one in held)
            self.state.beside[tracker] = scale

    def optimizers(self, found: Iterable[tuple[str, torch.optim.Optimizer]]) -> None:
        """Name optimizers by path, and parameters that only they hold by group and position."""
        for path, optimizer in found:
            name = self._names.give(optimizer, path)
            self.state.optimizers[name] = optimizer
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    self._hold(parameter, f"{name}.{g}.{i}", VariableKind.PARAMETER, ItemLocation(group["params"], i))
