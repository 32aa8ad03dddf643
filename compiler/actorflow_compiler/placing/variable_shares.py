"""The part of a variable that a device of a pipeline stage holds, as far as a request says before layouts are found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from actorflow_compiler.hints.goal import Goal, ParallelMode
from actorflow_compiler.hints.hints import ZeroHint


@dataclass(frozen=True, slots=True)
class VariableShares:
    """How the devices of a stage share what it holds; by default each holds all of it.

    Layouts that hints give to single variables are not known here: such variables count as whole.
    """

    tensor: int = 1  # devices that split all variables
    mesh: tuple[int, ...] = ()
    zero: Mapping[str, ZeroHint] = field(default_factory=dict)  # parameter → how it is split in addition

    @staticmethod
    def of(goal: Goal, mesh: tuple[int, ...], zero: Mapping[str, ZeroHint]) -> VariableShares:
        """The shares on a mesh; along axes of the modes "tensor" and "auto" all variables may be split."""
        split = (ParallelMode.TENSOR, ParallelMode.AUTO)
        return VariableShares(math.prod(n for axis, n in enumerate(mesh) if goal.mode(axis) in split), mesh, zero)

    def parameter(self, name: str) -> float:
        """The part of a parameter that a device holds."""
        return self._part(name, 3)

    def gradient(self, name: str) -> float:
        """The part of a parameter's gradient that a device holds."""
        return self._part(name, 2)

    def state(self, name: str) -> float:
        """The part of the optimizer's state of a parameter that a device holds, and of its update that it does."""
        return self._part(name, 1)

    def _part(self, name: str, from_stage: int) -> float:
        hint = self.zero.get(name)
        split = hint is not None and hint.stage >= from_stage and hint.axis < len(self.mesh)
        return 1 / (self.tensor * (self.mesh[hint.axis] if split and hint is not None else 1))


WHOLE = VariableShares()
