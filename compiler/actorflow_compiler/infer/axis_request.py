"""What inference decides along one mesh axis: a graph as the axes before have cut it, and what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import Parts, Sbp
from actorflow_compiler.graph.graph import Graph
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_compiler.infer.expert_axis import NO_EXPERTS, ExpertProducts
from actorflow_compiler.signatures import OpCall, Signature

InnerCost = Callable[[OpCall, Signature, Parts], tuple[float, int]]  # bytes moved by all devices, communications


@dataclass(frozen=True, slots=True)
class RequiredLayout:
    """A layout that a value must be boxed to in any case: a result that must be whole."""

    value: int
    sbp: Sbp
    placement: Placement


@dataclass(frozen=True, slots=True)
class CutGraph:
    """A graph as the axes before this one have cut it; sequences are node by node."""

    graph: Graph
    calls: Sequence[OpCall]  # as a device makes them
    reads: Sequence[tuple[int, ...]]  # the values of operands
    placement: Mapping[int, Placement]  # of every value
    metas: Mapping[int, Meta]  # value → the part that a device has
    ragged: Sequence[set[tuple[int, int]]]  # (operand or output, dim) of dims whose sizes differ between devices


@dataclass(frozen=True, slots=True)
class AxisRequest:
    """What is to be decided along one axis, and by what prices."""

    axis: int
    mode: ParallelMode
    variables: Mapping[int, tuple[Sbp, ...]]  # the layouts that each may have
    free: Mapping[int, Sbp | None]  # inputs that every rank has, and their best cut
    targets: Sequence[RequiredLayout]
    pieces: int = 1  # micro-batches
    hinted: bool = False  # hints split something
    mirrored: bool = False  # every op has its first signature
    hardware: Hardware = CPU_CORE  # with the links between devices
    inner_cost: InnerCost | None = None  # of signatures whose ops communicate inside; None: these are not used
    experts: ExpertProducts = NO_EXPERTS
    later: int = 1  # devices along further axes that split every weight, so that along this one less of it moves

    def parts(self, placement: Placement) -> Parts:
        """The devices of a placement along the axis: their number, or a weight for each."""
        return placement.axes[self.axis] if self.axis < len(placement.hierarchy) else 1
