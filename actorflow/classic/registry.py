"""The registry of variables: each is made once, and jobs share it by name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from actorflow.classic.initializers import Initializer
from actorflow.classic.minimizer import Minimizer
from actorflow.deferred import deferred_init
from actorflow.regularizers import Regularizer
from actorflow.script_state.seeds import call_seeds
from actorflow.script_state.user_code import user_line
from actorflow.session.plan_keys import GrowingModule
from actorflow.standins.owned_tensor import real_value
from actorflow_compiler.core.errors import LayoutError, StateError
from actorflow_compiler.core.sbp import Sbp
from actorflow_compiler.core.torch_internals import real_tensors
from actorflow_compiler.hints.hints import distribute as distribute_model

__all__ = ["REGISTRY", "Registry"]


@dataclass(frozen=True, slots=True)
class _VariableInfo:
    """A variable's properties besides its value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    where: str  # the line of the script that made it
    layout: Sbp | None
    regularizer: Regularizer | None


@dataclass(slots=True)
class _RegistryData:
    """The registry's own data, kept apart so that it is no part of its state as a module."""

    made: dict[str, _VariableInfo] = field(default_factory=dict)
    minimizers: dict[str, Minimizer] = field(default_factory=dict)  # by job
    waiting: dict[str, Tensor] = field(default_factory=dict)  # loaded values of variables that do not exist yet
    later: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # job → loaded state of its future minimizer


class Registry(GrowingModule):
    """The variables of all first-generation jobs of this process, by name: parameters, or buffers if not trainable."""

    def __init__(self) -> None:
        super().__init__()
        self._book = _RegistryData()

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor | None = self._parameters.get(name)
        return self._of_buffers(name) if found is None else found

    def _of_buffers(self, name: str) -> Tensor:
        found = self._buffers[name]
        assert found is not None
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._book.made

    def names(self) -> tuple[str, ...]:
        """The names of all variables, in the order in which they were made."""
        return tuple(self._book.made)

    def layout(self, name: str) -> Sbp | None:
        """The layout that ``distribute=`` set for a variable; None if the job decides."""
        return self._book.made[name].layout

    def regularizer(self, name: str) -> Regularizer | None:
        """The regularizer of a variable, or None."""
        return self._book.made[name].regularizer

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set values of variables; one that does not exist yet starts with this value instead of its initializer's.

        Every rank must do the same.  Raises StateError, before anything is written, if a value's shape is not its
        variable's.
        """
        for name, value in values.items():
            made = self._book.made.get(name)
            if made is not None and tuple(value.shape) != made.shape:
                raise StateError(
                    f"a value of shape {list(value.shape)} was found for variable {name!r}; {list(made.shape)} was "
                    f"expected, as it was made at\n{made.where}\n  load the checkpoint of this network, or give the "
                    f"variable another name"
                )
        with torch.no_grad():
            for name, value in values.items():
                if name in self:
                    self[name].copy_(value)
                else:
                    self._book.waiting[name] = value

    def tensors(self) -> dict[str, Tensor]:
        """All variables, and the values that wait for variables that do not exist yet."""
        return {**self._book.waiting, **{name: self[name] for name in self.names()}}

    def values(self) -> dict[str, Tensor]:
        """Copies of all values, including those for variables that do not exist yet."""
        return {**self._book.waiting, **{name: real_value(self[name]).detach().clone() for name in self.names()}}

    def keep(self, minimizer: Minimizer) -> None:
        """Register a minimizer, which continues from the state that was loaded for its job, if any.

        Jobs of the same name are distinguished by the order of their first calls.
        """
        job, count = minimizer.job, 1
        while job in self._book.minimizers:
            count += 1
            job = f"{minimizer.job}_{count}"
        self._book.minimizers[job] = minimizer
        if job in self._book.later:
            minimizer.restore(self._book.later.pop(job))

    def saved(self) -> dict[str, Mapping[str, Any]]:
        """The state from which the minimizers of all jobs continue, by job."""
        return {**self._book.later, **{job: m.saved() for job, m in self._book.minimizers.items()}}

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Let minimizers continue from ``saved``; one that does not exist yet will do so when it is made."""
        for job, state in saved.items():
            if job in self._book.minimizers:
                self._book.minimizers[job].restore(state)
            else:
                self._book.later[job] = state

    def make(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype | None,
        initializer: Initializer | None,
        regularizer: Regularizer | None,
        trainable: bool | None,
        seed: int | None,
        layout: Sbp | None,
    ) -> None:
        """Make a variable of this name unless there is one; raises StateError if the existing one differs.

        It takes no memory until each rank makes the parts that its plan assigns to it.
        """
        known = self._book.made.get(name)
        if known is not None:
            _same(name, known, shape, dtype, trainable, layout)
            return
        where = user_line()
        dtype, trainable = dtype or torch.float32, trainable is not False
        if shape is None or initializer is None:
            missing = "shape" if shape is None else "initializer"
            raise StateError(
                f"{where}\n  get_variable({name!r}) without {missing} was found, and there is no variable of this "
                f"name yet; the first get_variable of a name makes it: give it a shape and an initializer"
            )
        with real_tensors(), torch.no_grad(), deferred_init():
            value = torch.empty(shape, dtype=dtype, device="cpu")
            waiting = self._book.waiting.pop(name, None)
            if waiting is None:
                initializer(value, _generator(name, seed))
            else:
                if tuple(waiting.shape) != shape:
                    raise StateError(
                        f"{where}\n  variable {name!r} has shape {list(shape)}, and the checkpoint that was loaded "
                        f"has one of shape {list(waiting.shape)}; the same shape was expected: load the checkpoint "
                        f"of this network, or give the variable another name"
                    )
                value.copy_(waiting)
            if trainable:
                self._parameters[name] = nn.Parameter(value)  # register_parameter refuses names with dots
            else:
                self._buffers[name] = value
        self._book.made[name] = _VariableInfo(shape, dtype, trainable, where, layout, regularizer)
        if layout is not None:
            try:
                distribute_model(self, {re.escape(name): layout})
            except LayoutError as error:
                del self._book.made[name], (self._parameters if trainable else self._buffers)[name]
                raise LayoutError(f"{where}\n  get_variable({name!r}, distribute={layout}): {error}") from error


REGISTRY = Registry()


def _same(name: str, known: _VariableInfo, *asked: Any) -> None:
    """Raise StateError unless a repeated request for a variable agrees with how the variable was made."""
    made = (known.shape, known.dtype, known.trainable, known.layout)
    for what, old, new in zip(("shape", "dtype", "trainable", "distribute"), made, asked, strict=True):
        if new is not None and old != new:
            raise StateError(
                f"{user_line()}\n  variable {name!r} with {what}={_plain(new)} was found; it was made with "
                f"{what}={_plain(old)} at\n{known.where}\n  the same was expected, or another name"
            )


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _generator(name: str, seed: int | None) -> torch.Generator:
    """The random generator for a variable's initial value; it depends only on the seed and the name."""
    start = seed if seed is not None else call_seeds.seed if call_seeds.seed is not None else torch.initial_seed()
    digest = hashlib.blake2b(f"{start} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
