"""A strategy: how a step is shared among devices and micro-batches, as far as layouts do not decide it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import Preferences
from actorflow_compiler.graph.graph import without
from actorflow_compiler.hints.constrain import CONSTRAIN
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_compiler.hints.hints import StagesHint, ZeroHint
from actorflow_compiler.hints.zero import GRADIENT
from actorflow_compiler.rewriting.compute_again import compute_again
from actorflow_compiler.rewriting.model_parts import NO_PARTS, DividedModel

ORIGIN = 'parallel="auto"'  # of the hints that a strategy gives
BY_SAMPLES = frozenset({ParallelMode.DATA, ParallelMode.AUTO, ParallelMode.EXPERT})  # axes that may split samples
NOTHING = (0, 0)  # is computed again
SPLIT = 4  # times as long it takes to compile a step if more than samples is split: ops have more layouts
Shape = tuple[int | None, tuple[int, ...] | None, tuple[str, ...]]
MARKED = 2  # the ZeRO stage from which gradients are marked while a step is captured


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """How a step is shared among devices and micro-batches.

    What is None is as the request for the step has it: the user has said it, or it is not to be changed.
    """

    stages: int | None = None  # of the pipeline; those that the user has asked for stay as they are asked for
    mesh: tuple[int, ...] | None = None  # of the devices of each stage
    modes: tuple[ParallelMode, ...] = ()  # of the mesh's axes; () where there is no mesh
    zero: int | None = None  # stage of ZeRO on the first axis, 0 to 3
    micro_batches: int = 1
    weights: tuple[tuple[int, ...], ...] = ()  # of the mesh's axes, by which unequal devices share; (): all alike
    again: tuple[int, int] = NOTHING  # parts of the forward pass that the backward pass computes again, and of how many

    def preferences(self, given: Preferences, parameters: Collection[str], budget: float | None) -> Preferences:
        """The request's preferences with this strategy in place of what they leave open.

        ``parameters`` are the names of those that ZeRO may split; ``budget`` is the bytes that a device may hold.
        """
        goal, hints = replace(given.goal, budget=budget, search=False), given.hints
        if self.mesh is not None:
            goal = replace(goal, mesh=self.mesh, modes=self.modes, weights=self.weights)
        if self.stages is not None and hints.stages is None:
            asked = StagesHint(self.stages, (), ORIGIN) if self.stages > 1 else None
            hints = replace(hints, stages=asked)
        if self.zero is not None:
            hints = replace(hints, zero=zero_hints(parameters, self.zero))
        return replace(given, goal=goal, hints=hints, micro_batches=self.micro_batches)

    def captured(self, marked: Capture, parts: DividedModel = NO_PARTS) -> Capture:
        """The step as it is compiled: it computes again what this says of its ``parts``.

        Marks on gradients that were made while it was captured are left out, unless they are needed.
        """
        graph = marked.graph
        if self.zero is not None and self.zero < MARKED:
            graph = without(graph, lambda n: n.op == CONSTRAIN and n.args[1].startswith(GRADIENT))
        if self.again[0]:
            graph = compute_again(graph, parts, parts.order[: self.again[0]])
        return marked if graph is marked.graph else replace(marked, graph=graph)

    @property
    def shape(self) -> Shape:
        """The number of stages, and the mesh with what its axes split."""
        return self.stages, self.mesh, tuple(map(str, self.modes))

    @property
    def devices(self) -> int | None:
        """The devices of all stages, as many as if none had two; None where the request says which there are."""
        return None if self.mesh is None else (self.stages or 1) * math.prod(self.mesh)

    @property
    def replicas(self) -> int:
        """Into how many parts the samples of a batch are split at the same time, as far as this says."""
        return math.prod(n for mode, n in zip(self.modes, self.mesh or (), strict=False) if mode in BY_SAMPLES)

    @property
    def effort(self) -> int:
        """How long it takes to compile a plan of this, by how long one takes that splits samples alone."""
        visits = self.micro_batches if (self.stages or 1) > 1 else 1  # each stage's of each micro-batch get an order
        splits = any(mode != ParallelMode.DATA for mode in self.modes)
        return (self.stages or 1) * visits * (SPLIT if splits else 1)

    def __str__(self) -> str:
        said = [f"{self.stages} stages"] if self.stages and self.stages > 1 else []
        if self.mesh is not None:
            said += [f"{mode} {size}" for mode, size in zip(self.modes, self.mesh, strict=True) if size > 1]
        if self.weights:
            said.append("shares by speed")
        if self.zero:
            said.append(f"ZeRO {self.zero}")
        if self.micro_batches > 1:
            said.append(f"{self.micro_batches} micro-batches")
        if self.again[0]:
            said.append("{} of {} parts computed again".format(*self.again))
        if self.mesh is None and not said:  # hints say the rest, or there is but one device
            return "1 micro-batch"
        return ", ".join(said) or "one device"


UNMARKED = Strategy(zero=0)  # as which a step is captured where ZeRO turns out not to be open


def zero_hints(parameters: Collection[str], stage: int) -> Mapping[str, ZeroHint]:
    """ZeRO of a stage for parameters, along the first axis of their mesh; none for stage 0."""
    return {name: ZeroHint(stage, 0, ORIGIN) for name in parameters} if stage else {}
