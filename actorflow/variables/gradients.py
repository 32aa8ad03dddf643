"""The gradients of parameters that plans own: which ones are kept between calls, and ``p.grad`` for the script."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Iterable
from typing import Protocol

from torch import Tensor

from actorflow.standins.owned_tensor import OwnedGradient, OwnedTensor, real_value
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.values.gradients import GRADIENT_SUFFIX, NO_GRADIENTS, GradientEffects, GradientState
from actorflow_compiler.values.variables import ScriptState

__all__ = ["KeptGradients", "made_by_script", "standing_before"]


def standing_before(state: ScriptState, known: GradientState) -> GradientState:
    """The gradients that exist when a step begins: those of ``known``, and the script's own of unowned parameters."""
    new = {h.name for h in state.held.values() if _eager_gradient(h.tensor) is not None}
    return GradientState(known.kept | new, known.lost)


def made_by_script(state: ScriptState, kept: KeptGradients | None) -> dict[str, Tensor]:
    """The gradients that the script made and no plan has as a variable yet, by the names of their future variables."""
    found = {h.name: _eager_gradient(h.tensor) for h in state.held.values()}
    later = {} if kept is None else {name: kept.start_of(name + GRADIENT_SUFFIX, state) for name in found}
    return {name + GRADIENT_SUFFIX: grad for name, grad in (found | later).items() if grad is not None}


class GradientBackend(Protocol):
    """The operations of the table of variables that ``KeptGradients`` uses."""

    @property
    def layouts(self) -> Container[str]:
        """The names of all variables."""

    @property
    def capturing(self) -> bool:
        """Whether a step is being captured."""

    @property
    def moment(self) -> object:
        """See ``VariableStore``."""

    def read(self, name: str) -> Tensor:
        """A copy of the whole value of a variable."""

    def write(self, name: str, value: Tensor) -> None:
        """Replace the value of a variable."""


class KeptGradients:
    """The gradients of the parameters that plans own, on one rank."""

    def __init__(self, holder: GradientBackend) -> None:
        self.standing = NO_GRADIENTS
        self._holder = holder
        self._scripts: dict[str, Tensor] = {}  # by parameter: gradients that the script made, not variables yet
        self._stand_ins: weakref.WeakValueDictionary[str, OwnedGradient] = weakref.WeakValueDictionary()
        self._after: dict[tuple[GradientState, GradientEffects], GradientState] = {}
        self._fits: dict[tuple[GradientState, GradientEffects], bool] = {}

    @property
    def capturing(self) -> bool:
        """See ``VariableStore``."""
        return self._holder.capturing

    @property
    def moment(self) -> object:
        """See ``VariableStore``."""
        return self._holder.moment

    def share(self, name: str, copy: Tensor) -> None:
        """See ``VariableStore``; does nothing, because each op reads a gradient again."""

    def unshare(self, copy: Tensor) -> None:
        """See ``VariableStore``."""

    def tie(self, owned: OwnedTensor, data: Tensor | None) -> None:
        """See ``VariableStore``; does nothing, because each op reads a gradient again."""

    # -- calls -------------------------------------------------------------------------------------

    def fit(self, gradients: GradientEffects) -> bool:
        """Whether the gradients that exist are those that a plan expects."""
        key = self.standing, gradients
        if key not in self._fits:
            self._fits[key] = gradients.fit(self.standing)
        return self._fits[key]

    def moved_by(self, gradients: GradientEffects) -> tuple[str, ...]:
        """What a call changes about which gradients are kept, as text; the choice of the next plan depends on it."""
        return () if self._then(gradients).kept == self.standing.kept else ("which gradients there are",)

    def _then(self, gradients: GradientEffects) -> GradientState:
        key = self.standing, gradients
        if key not in self._after:
            self._after[key] = gradients.after(self.standing)
        return self._after[key]

    def called(self, gradients: GradientEffects) -> None:
        """Note that a call of a plan with these effects was issued."""
        self.standing = self._then(gradients)
        for name in self._scripts.keys() & (gradients.cleared | gradients.keeps | gradients.loses):
            del self._scripts[name]
        if self._stand_ins:
            self._forget(gradients.cleared | gradients.keeps | gradients.loses)

    def start_of(self, variable: str, state: ScriptState) -> Tensor | None:
        """The initial value of a gradient's variable; None means zeros."""
        name = variable.removesuffix(GRADIENT_SUFFIX)
        held = state.held.get(name)
        eager = None if held is None else _eager_gradient(held.tensor)
        return self._scripts.get(name) if eager is None else eager

    def adopted(self, variable: str) -> None:
        """Note that a plan now has a gradient as a variable."""
        self._scripts.pop(variable.removesuffix(GRADIENT_SUFFIX), None)

    def take(self, name: str, parameter: Tensor) -> None:
        """Take over the gradient of a parameter that a plan is about to own."""
        grad = _eager_gradient(parameter)
        if grad is not None:
            self._scripts[name] = grad
            self._stands(name, kept=True)

    def drop(self, names: Iterable[str]) -> None:
        """Forget the gradients of parameters that are dropped."""
        names = frozenset(names)
        for name in self._scripts.keys() & names:
            del self._scripts[name]
        self.standing = GradientState(self.standing.kept - names, self.standing.lost - names)
        self._after.clear()
        self._fits.clear()

    # -- the script --------------------------------------------------------------------------------

    def get(self, owned: OwnedTensor) -> Tensor | None:
        """``p.grad`` of a stand-in: the script's own tensor, a stand-in for the gradient, or None."""
        name = owned.name_in_plan
        if name in self._scripts:
            return self._scripts[name]
        if name not in self.standing.kept and name not in self.standing.lost:
            return None
        found = self._stand_ins.get(name)
        if found is None:
            found = self._stand_ins[name] = OwnedGradient.of_parameter(owned, name + GRADIENT_SUFFIX, self)
        return found

    def copy(self, owned: OwnedTensor) -> Tensor | None:
        """A copy of the gradient, for a copy of the tensor.

        None if there is none, or if it was not kept: code that copies a parameter hardly ever needs its gradient.
        """
        grad = None if owned.name_in_plan in self.standing.lost else self.get(owned)
        return None if grad is None else real_value(grad).detach().clone()

    def set(self, owned: OwnedTensor, value: Tensor | None) -> None:
        """``p.grad = value``; the script of every rank does the same.

        Raises StateError for a gradient whose shape or dtype is not the parameter's.
        """
        name = owned.name_in_plan
        if value is not None and value is self.get(owned):
            return
        new = None if value is None else real_value(value).detach()
        if new is not None and (new.shape != owned.shape or new.dtype != owned.dtype):
            raise StateError(
                f"a gradient {new.dtype}{list(new.shape)} was given to {name}; {owned.dtype}{list(owned.shape)}, as "
                f"the parameter is, was expected"
            )
        self._forget([name])
        self._scripts.pop(name, None)
        self._stands(name, kept=new is not None)
        if new is None:
            return
        if name + GRADIENT_SUFFIX in self._holder.layouts:
            self._holder.write(name + GRADIENT_SUFFIX, new)
        else:
            self._scripts[name] = new.clone()

    def read(self, variable: str) -> Tensor:
        """See ``VariableStore``."""
        self._refuse_lost(variable)
        return self._holder.read(variable)

    def write(self, variable: str, value: Tensor) -> None:
        """See ``VariableStore``."""
        self._refuse_lost(variable)
        self._holder.write(variable, value)

    def _refuse_lost(self, variable: str) -> None:
        """Raise StateError if the gradient of this variable was not kept."""
        if variable.removesuffix(GRADIENT_SUFFIX) in self.standing.lost:
            raise StateError(
                f"{variable} was not kept: an optimizer's step has used it, and the job that computed it begins with "
                f"zero_grad(). Let the job return what is wanted of it (a norm, say), or let it call zero_grad() after "
                f"optimizer.step(), where nothing reads it any more"
            )

    def _stands(self, name: str, kept: bool) -> None:
        one = frozenset([name])
        without = self.standing.kept - one
        self.standing = GradientState(without | one if kept else without, self.standing.lost - one)

    def _forget(self, names: Collection[str]) -> None:
        for name, gradient in [*self._stand_ins.items()]:
            if name in names:
                del self._stand_ins[name]
                gradient.gone = True


def _eager_gradient(tensor: Tensor) -> Tensor | None:
    """The gradient of a leaf tensor that no plan owns; otherwise None."""
    if isinstance(tensor, OwnedTensor) or not tensor.is_leaf:
        return None
    return None if tensor.grad is None else tensor.grad.detach()
