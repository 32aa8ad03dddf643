"""The goal of layout inference as users state it: ``parallel=`` (a mode for each mesh axis) and ``memory_budget=``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.sbp import B, Sbp
from actorflow_compiler.core.units import bytes_of


class ParallelMode(StrEnum):
    """How the devices along a mesh axis share the work."""

    DATA = "data"  # split the batch, and keep variables whole
    TENSOR = "tensor"  # keep the batch whole, and split weights
    SEQUENCE = "sequence"  # split the positions of each sample, and keep variables whole
    RING = "ring"  # as SEQUENCE, and pass keys and values around a ring where attention looks at all positions
    EXPERT = "expert"  # split the batch, and keep variables whole but for experts, of which each device has some
    AUTO = "auto"  # take what costs least


# modes in which inference splits no variable
WHOLE_VARIABLES = frozenset({ParallelMode.DATA, ParallelMode.SEQUENCE, ParallelMode.RING, ParallelMode.EXPERT})
ALONG_SEQUENCE = frozenset({ParallelMode.SEQUENCE, ParallelMode.RING})


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of layout inference.  Hints hold in all modes."""

    modes: tuple[ParallelMode, ...] = (ParallelMode.DATA,)  # for each mesh axis; the last holds for the rest
    budget: float | None = None  # bytes that one device may hold
    taken: float = 0.0  # bytes of it that variables of other jobs need
    mesh: tuple[int, ...] = ()  # of all devices, where no placement is given; (): one axis
    weights: tuple[tuple[int, ...], ...] = ()  # of the mesh's axes, by which unequal devices share; (): all alike
    mirrored: bool = False  # devices compute with values of their own (mirrored.py): nothing may be split
    search: bool = False  # meshes, stages and ZeRO are open, too: whole plans are compared before layouts are inferred
    stages: int | None = None  # of the pipeline that is asked for; EACH_DEVICE: one on each device

    def mode(self, axis: int) -> ParallelMode:
        """The mode of a mesh axis."""
        return self.modes[min(axis, len(self.modes) - 1)]

    def with_hints(self, axes: Collection[int]) -> Goal:
        """The goal where users split parameters along these mesh axes: beyond the first, weights are used as stored."""
        inner = [axis for axis in axes if axis > 0]
        if self.modes != (ParallelMode.DATA,) or not inner:
            return self
        modes = tuple(ParallelMode.TENSOR if axis in inner else ParallelMode.DATA for axis in range(max(inner) + 1))
        return replace(self, modes=(*modes, ParallelMode.DATA))

    def mesh_of(self, devices: int, world: int) -> tuple[int, ...]:
        """The mesh of the devices that compute.  Raises LayoutError where a run of ``world`` has another number."""
        if self.mesh and math.prod(self.mesh) != devices:
            product = " × ".join(map(str, self.mesh)) + f" = {math.prod(self.mesh)}" * (len(self.mesh) > 1)
            keep = world - devices
            less = f", {keep} of which only {'keep' if keep > 1 else 'keeps'} parameters" if keep else ""
            raise LayoutError(
                f"parallel= asks for a mesh of {product} devices; the run has {world}{less}. "
                f"Start it with --devices {math.prod(self.mesh) + keep}, or change the sizes"
            )
        return self.mesh or (devices,)

    def batch(self, cut: Sbp) -> tuple[Sbp | None, ...]:
        """The preferred layout of a batch for each axis; None, and axes beyond those named, are left open."""
        preferred = {ParallelMode.TENSOR: B, ParallelMode.SEQUENCE: None, ParallelMode.RING: None}
        return tuple(preferred.get(mode, cut) for mode in self.modes)


DATA = Goal()
PIPELINE = "pipeline"  # among the modes of ``parallel=``: into how many stages a step is cut, each of which is a mesh
EACH_DEVICE = 0  # as many stages as there are devices

PIPELINE_WORDS = ("pipelines", "pipe", "pp", "stage", "stages")  # as users of other systems call it
ZERO_WORDS = ("zero", "fsdp", "shard", "sharded")


def goal_of(parallel: object, memory_budget: object) -> Goal:
    """The goal that a user's ``parallel=`` and ``memory_budget=`` state.

    ``parallel``: "data", "tensor", "sequence", "ring", "expert", "pipeline", "auto", or a dictionary with the size of a
    mesh axis for each, such as ``{"data": 2, "tensor": 4}``, where "pipeline" has the number of stages, each of which
    is a mesh of the other axes; None is "data", and "auto" under a budget.  ``memory_budget``: what one device may
    hold, a number of bytes or "20GB" (powers of 1000; GiB for powers of 1024).

    Raises LayoutError for anything else.
    """
    budget = None if memory_budget is None else _bytes(memory_budget)
    if parallel is None:
        return DATA if budget is None else Goal((ParallelMode.AUTO,), budget, search=True)
    known = (*(mode.value for mode in ParallelMode), PIPELINE)
    if isinstance(parallel, str) and parallel == PIPELINE:
        return Goal(budget=budget, mesh=(1,), stages=EACH_DEVICE)
    if isinstance(parallel, str) and parallel in known:
        return Goal((ParallelMode(parallel),), budget, search=parallel == ParallelMode.AUTO)
    if isinstance(parallel, Mapping) and parallel and all(mode in known for mode in parallel):
        for mode, n in parallel.items():
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise LayoutError(
                    f"parallel={parallel!r} was found; a whole number from 1 on was expected for {mode!r}, not {n!r}"
                )
        axes = {ParallelMode(mode): n for mode, n in parallel.items() if mode != PIPELINE} or {ParallelMode.DATA: 1}
        return Goal(tuple(axes), budget, mesh=tuple(axes.values()), stages=parallel.get(PIPELINE))
    raise LayoutError(
        f"parallel={parallel!r} was found; one of {', '.join(map(repr, known))} was expected, or a dictionary with "
        f'the number of devices along each mesh axis, such as {{"data": 2, "tensor": 2}}{_advice(parallel)}'
    )


def _advice(parallel: object) -> str:
    """What to do for kinds of parallelism that are asked for in other ways, as the end of a message."""
    named = [parallel] if isinstance(parallel, str) else [*parallel] if isinstance(parallel, Mapping) else []
    words = {str(name).lower().rstrip("0123456789_ ") for name in named}
    if not words.isdisjoint(PIPELINE_WORDS):
        return '; a pipeline is {"pipeline": 2}, or flow.place(model, stages=2); other axes are those of each stage'
    if not words.isdisjoint(ZERO_WORDS):
        return "; to split the state of a model over the data axis call flow.zero(model, stage) with stage 1, 2 or 3"
    return ""


def _bytes(budget: object) -> float:
    count = None if isinstance(budget, bool) else bytes_of(str(budget))
    if count is not None:
        return count
    raise LayoutError(
        f'memory_budget={budget!r} was found; a number of bytes or a text such as "20GB" or "512MiB" was expected'
    )
