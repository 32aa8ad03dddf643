"""Track the gradients of a step's parameters: how the step expects them when it begins, and how it leaves them.

A gradient that a step leaves for a later call is a variable with the layout of its parameter.  It is not kept if an
optimizer has used it and the step clears it before it computes it again: scripts hardly ever read such a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.errors import CaptureError, StateError
from actorflow_compiler.core.step_watchers import watching_steps
from actorflow_compiler.graph.graph import Graph, InputKind
from actorflow_compiler.plan.plan import VariableKind
from actorflow_compiler.values.variables import ScriptState

LOST_GRADIENT = InputKind.LOST  # kind of an input: a gradient of an earlier call that was not kept
KEPT_GRADIENT = VariableKind.GRADIENT  # kind of a variable: a gradient that calls keep
GRADIENT_SUFFIX = ".grad"  # appended to the name of the parameter, it names the variable


@dataclass(frozen=True, slots=True)
class GradientState:
    """Gradients between two calls, by the names of their parameters; those of all others are None."""

    kept: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()  # gradients that exist in the script, but were not kept


NO_GRADIENTS = GradientState()


@dataclass(frozen=True, slots=True)
class GradientEffects:
    """What a step expects of gradients as it begins, and how it leaves them, by the names of their parameters."""

    none: frozenset[str] = frozenset()  # must be None as it begins
    kept: frozenset[str] = frozenset()  # must have been kept
    lost: frozenset[str] = frozenset()  # must be lost
    cleared: frozenset[str] = frozenset()  # are None afterwards
    keeps: frozenset[str] = frozenset()  # are left for later calls
    loses: frozenset[str] = frozenset()  # are left, and not kept

    def fit(self, standing: GradientState) -> bool:
        """Whether gradients are as the step expects them."""
        return (
            self.kept <= standing.kept
            and self.lost <= standing.lost
            and self.none.isdisjoint(standing.kept)
            and self.none.isdisjoint(standing.lost)
        )

    def after(self, before: GradientState) -> GradientState:
        """The state of gradients after the step."""
        gone = self.cleared | self.keeps | self.loses
        return GradientState((before.kept - gone) | self.keeps, (before.lost - gone) | self.loses)


class _GradientEnd(Enum):
    """How a step leaves a gradient of another call."""

    AS_IT_WAS = auto()
    NONE = auto()
    KEPT = auto()  # for later calls
    LOST = auto()


class GradientTracker:
    """Tracks the gradients of a step while it is traced.

    Gradients that no plan keeps are first assumed to exist, as tensors that the step may only clear.  If it does
    anything else with one, the step is traced again with that gradient as it really is.  ``sure`` names these
    parameters, each with whether the step accumulates into its gradient (True) or begins by zeroing it (False).
    """

    def __init__(
        self,
        state: ScriptState,
        fakes: Mapping[str, Tensor],
        before: GradientState,
        sure: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self._standing, self._sure = before, sure
        self._parameters: dict[str, Tensor] = {}  # the parameters
        self._first: dict[str, Tensor | None] = {}  # their gradients as the step begins
        self.variables: dict[str, Tensor] = {}  # their gradients as variables, whether they are used or not
        self.inputs: dict[str, Tensor] = {}  # stand-ins for lost gradients in ``sure``
        self._added_to: set[str] = set()  # assumed to be None when a backward pass added to them
        self._grown: set[str] = {name for name, goes_on in sure.items() if goes_on}  # accumulated into
        self._stepped: set[str] = set()  # an optimizer has used their gradients
        self._read_by_user: set[str] = set()  # the user's code has read their earlier gradients
        self._inside = False  # a backward pass is under way
        for h in state.held.values():
            fake = fakes[h.name]
            stands = h.name in before.kept or h.name in before.lost  # also if it is frozen by now
            if fake.is_leaf and (fake.requires_grad or stands):
                self._parameters[h.name], self.variables[h.name] = fake, torch.zeros_like(fake).detach()
                fake.grad = self._first[h.name] = self._stand_in_gradient(h.name)
        self._names = {id(fake): name for name, fake in self._parameters.items()}
        self._end_only = self._parameters.keys() - before.kept - sure.keys()  # assumed to be cleared or left alone

    def _stand_in_gradient(self, name: str) -> Tensor | None:
        if name in self._standing.kept:
            return self.variables[name]
        if name in self._sure and name not in self._standing.lost:
            return None
        stands_in = torch.zeros_like(self.variables[name])
        if name in self._sure:
            self.inputs[name] = stands_in
        return stands_in

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Use while the step is traced."""
        names = self._names

        def steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            held = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
            self._stepped |= {name for name in held if self._parameters[name].grad is not None}

        with watching_steps(steps):
            yield

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped so far."""
        return bool(self._stepped)

    def effects_so_far(self) -> GradientEffects:
        """What the step has done to gradients of other calls so far; its own gradients are lost if it ends here."""
        ends = {name: self._end_so_far(name) for name in self._parameters}
        return GradientEffects(
            cleared=frozenset(name for name, end in ends.items() if end is _GradientEnd.NONE),
            loses=frozenset(name for name, end in ends.items() if end is _GradientEnd.LOST),
        )

    def _end_so_far(self, name: str) -> _GradientEnd:
        grad = self._parameters[name].grad
        if self._goes_on(name) or (grad is self._first[name] and not self._inside):
            return _GradientEnd.AS_IT_WAS
        return _GradientEnd.NONE if grad is None and not self._inside else _GradientEnd.LOST

    def _goes_on(self, name: str) -> bool:
        """Whether a gradient is still the variable in which another call has left it."""
        return name in self._standing.kept and self._parameters[name].grad is self.variables[name]

    def variables_now(self) -> dict[str, Tensor]:
        """Gradients of other calls that are still there, as variables."""
        return {name + GRADIENT_SUFFIX: self.variables[name] for name in self._parameters if self._goes_on(name)}

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Use around a backward pass; restores gradients that it does not reach."""
        cleared = []
        self._inside = True
        for name, fake in self._parameters.items():
            if fake.grad is None or fake.grad is not self._first[name]:
                continue
            if name in self._end_only:
                fake.grad = None
                cleared.append(name)
            else:
                self._grown.add(name)
        yield
        self._inside = False
        for name in cleared:
            if self._parameters[name].grad is None:
                self._parameters[name].grad = self._first[name]
            else:
                self._added_to.add(name)

    def gradient_read(self, fake: Tensor) -> None:
        """Note that the user's code reads ``.grad``, perhaps only to see whether there is one."""
        name = self._names.get(id(fake), "")
        if name and fake.grad is self._first[name]:
            self._read_by_user.add(name)

    def write_kept(self) -> None:
        """At the end of the step: write gradients that are kept into their variables."""
        with torch.no_grad():
            for name, fake in self._parameters.items():
                grad, variable = fake.grad, self.variables[name]
                if self._end_of(name) is _GradientEnd.KEPT and grad is not None and grad is not variable:
                    if grad.dtype != variable.dtype:
                        raise CaptureError(
                            f"the step leaves a gradient of {name} of {grad.dtype} for calls after it; expected: "
                            f"{variable.dtype}, as the parameter"
                        )
                    variable.copy_(grad.detach())

    def _end_of(self, name: str) -> _GradientEnd:
        grad = self._parameters[name].grad
        if name in self._end_only and grad is self._first[name]:
            return _GradientEnd.AS_IT_WAS
        if grad is None:
            return _GradientEnd.NONE
        if name in self.inputs:
            return _GradientEnd.LOST
        goes_on = grad is self.variables[name] or name in self._added_to or name in self._grown
        return _GradientEnd.KEPT if goes_on or name not in self._stepped else _GradientEnd.LOST

    def result(self, trace: torch.fx.GraphModule, known: Mapping[str, str]) -> tuple[GradientEffects, dict[str, bool]]:
        """The effects of the step on gradients, from its finished trace.

        ``known`` maps placeholders of the trace to names of variables.  The second result maps parameters whose
        gradients of earlier calls the step may depend on, as ``sure`` does: if there are new ones, the step must be
        traced again with these in ``sure``, too.
        """
        constants: dict[int, torch.fx.Node] = {}
        for n in trace.graph.find_nodes(op="get_attr"):
            constants.setdefault(id(getattr(trace, str(n.target))), n)
        read = {name: constants[id(self._first[name])] for name in self._end_only if id(self._first[name]) in constants}
        used = {known.get(n.name, "") for n in trace.graph.find_nodes(op="placeholder") if _is_read(n)}
        kept, lost = self._standing.kept & self._parameters.keys(), self._standing.lost & self._parameters.keys()
        idle = {known.get(n.name, "") for n in trace.graph.find_nodes(op="placeholder") if not n.users}
        ends = {
            name: self._end_of(name)
            for name, fake in self._parameters.items()
            if fake.grad is not self.variables[name]
            or name + GRADIENT_SUFFIX not in idle  # else the step has not touched it
        }
        gradients = GradientEffects(
            none=frozenset((self._added_to | self._sure.keys()) - kept - lost),
            kept=frozenset(name for name in kept if name + GRADIENT_SUFFIX in used or name in self._read_by_user),
            lost=frozenset(lost & self._sure.keys()),
            cleared=frozenset(name for name, end in ends.items() if end is _GradientEnd.NONE),
            keeps=frozenset(name for name, end in ends.items() if end is _GradientEnd.KEPT),
            loses=frozenset(name for name, end in ends.items() if end is _GradientEnd.LOST),
        )
        return gradients, {
            **dict.fromkeys(self._read_by_user & self._end_only, False),
            **dict.fromkeys(self._added_to & lost, True),
            **{name: not _is_zeroed_first(constant) for name, constant in read.items()},
        }


def _is_read(placeholder: torch.fx.Node) -> bool:
    """Whether a trace does more with a placeholder than overwriting it."""
    return any(n.target is not torch.ops.aten.copy_.default or n.args[0] is not placeholder for n in placeholder.users)


def _is_zeroed_first(constant: torch.fx.Node) -> bool:
    """Whether the first use of a tensor in a trace overwrites it, so that its values make no difference."""
    first = next(n for n in constant.graph.nodes if constant in n.all_input_nodes)
    return str(first.target).split(".")[1] in ("zero_", "fill_", "copy_") and first.args[0] is constant


def refuse_lost(graph: Graph) -> None:
    """Raise StateError if something that the step computes depends on gradients that were not kept."""
    names = [i.name for i in graph.inputs if i.kind == LOST_GRADIENT]
    if names:
        raise StateError(
            f"the step depends on gradients that a call before it has left (those of {some(names)}) and that were not "
            f"kept: an optimizer's step had used them, and the job that left them begins by clearing them. Call "
            f"optimizer.zero_grad() at the end of that job, after optimizer.step(), or here before backward"
        )


def some(names: Collection[str]) -> str:
    """The first three names, as text."""
    return ", ".join([*names][:3]) + (", …" if len(names) > 3 else "")
