"""StrategyEstimate the time and memory of a step under a strategy from a few sums over its graph.

The estimate orders what is worth compiling; ``StrategyEstimate.least`` is what no plan of the strategy undercuts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actorflow.auto_parallel.strategy import Strategy
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.ops import Phase
from actorflow_compiler.graph.flops import dtype_of_flops, flops_of
from actorflow_compiler.graph.graph import InputKind, call_of
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_compiler.placing.automatic_stages import VisitCosts
from actorflow_compiler.placing.partition import PartitionUnit, least_longest

FIRINGS = 3  # of a stage for each micro-batch: forward, backward, and what they hand on
BEHIND = 0.5  # of the time of computing, behind which sums over replicas may go on
FILL = 1 / 3  # of a micro-batch's time that the forward pass takes, for which later stages wait under any schedule


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a step costs as a whole, on one device and with one micro-batch."""

    batch: int  # samples, that is dim 0 of what is cut into micro-batches; 1: nothing is
    seconds: float  # of forward and backward
    arithmetic: float  # seconds of these that no device undercuts: those of their floating-point operations
    update: float  # seconds of the optimizer
    products: float  # bytes of the results of matrix products, in the forward pass
    parameters: float  # bytes of what is trained, as many as of its gradients
    state: float  # bytes of the optimizer's state
    activations: float  # bytes that forward keeps for backward
    units: tuple[PartitionUnit, ...]  # that can be shared among stages

    @staticmethod
    def of(captured: Capture, hardware: Hardware) -> StepProfile:
        """The profile of a captured step on devices like those of ``hardware``."""
        graph, costs = captured.graph, VisitCosts(captured, 1, 1.0, hardware)
        size = dict.fromkeys(("parameter", "optimizer"), 0.0)
        updated = {old for old, _ in graph.updates}
        for i in graph.inputs:
            kind = captured.kinds.get(i.name, "") if i.kind == InputKind.VARIABLE else ""
            if kind in size and (kind == "optimizer" or i.value in updated):
                size[kind] += graph.metas[i.value].nbytes
        seconds = arithmetic = update = products = 0.0
        for n, took in zip(graph.nodes, costs.work, strict=True):
            if n.phase == Phase.OPTIMIZER:
                update += took or 0.0
            else:
                seconds += took or 0.0
            call = call_of(n, graph.metas)[0]
            if flops := flops_of(call):
                arithmetic += flops / hardware.flops_on({dtype_of_flops(call): 1})
                if n.phase == Phase.FORWARD and n.outs[0] >= 0:
                    products += graph.metas[n.outs[0]].nbytes
        batches = [graph.metas[i.value].shape[0] for i in graph.inputs if i.kind == InputKind.BATCH]
        return StepProfile(
            math.gcd(*batches) or 1,
            seconds,
            arithmetic,
            update,
            products,
            size["parameter"],
            size["optimizer"],
            sum(unit.activations for unit in costs.costs),
            tuple(costs.costs),
        )

    def unevenness(self, stages: int) -> float:
        """The seconds of the longest stage by those of the mean one; infinite with fewer parts than stages."""
        seconds = [unit.seconds for unit in self.units]
        if stages == 1 or not sum(seconds):
            return 1.0 if stages == 1 else math.inf
        return least_longest(seconds, stages) * stages / sum(seconds)


@dataclass(frozen=True, slots=True)
class StrategyEstimate:
    """What a step takes under a strategy, about."""

    seconds: float
    least: float  # seconds that no plan of this strategy undercuts
    nbytes: float  # that a device holds


class Estimator:
    """Estimates strategies of one step on ``world`` devices.

    ``beside`` says whether devices compute while they communicate.
    """

    def __init__(self, profile: StepProfile, hardware: Hardware, world: int, beside: bool) -> None:
        self.profile, self.hardware, self.world, self.beside = profile, hardware, world, beside
        self._unevenness: dict[int, float] = {}

    def unevenness(self, stages: int) -> float:
        """See ``StepProfile.unevenness``."""
        if stages not in self._unevenness:
            self._unevenness[stages] = self.profile.unevenness(stages)
        return self._unevenness[stages]

    def of(self, strategy: Strategy) -> StrategyEstimate:
        """The estimate for a strategy."""
        p, hardware, profile = strategy.stages or 1, self.hardware, self.profile
        mesh, modes = strategy.mesh or (max(1, self.world // p),), strategy.modes or (ParallelMode.DATA,)
        width, pieces, zero = math.prod(mesh), strategy.micro_batches, strategy.zero or 0
        split = math.prod(size for size, mode in zip(mesh, modes, strict=False) if mode == ParallelMode.TENSOR)
        free = ParallelMode.AUTO in modes
        replicas = width // split
        skew = self.unevenness(p)
        work = profile.seconds * skew / (p * width) / self._pace(bool(strategy.weights) or p > 1)
        near, far = hardware.link(tuple(range(split))), hardware.link(tuple(range(0, width, split)))
        inside = 0.0
        if split > 1:
            inside = profile.products * skew / (p * replicas) * (split - 1) / split / near.bytes_per_s
            inside += 2 * pieces * near.latency_s
        busy = work + inside + pieces * FIRINGS * hardware.fire_overhead_s
        period = busy * (pieces + p - 1) / pieces + 2 * (p - 1) * hardware.latency_s
        shared = (replicas - 1) / replicas / far.bytes_per_s
        gradients = profile.parameters / (p * split)
        sums = 2.0 if zero < 2 else 1.0 + pieces
        gathers = {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}[zero]
        exchanged = gradients * (sums + gathers) * shared
        exposed = max(0.0, exchanged - BEHIND * work) if self.beside else exchanged
        if free:
            exposed = min(exposed, profile.products * 2 / p / width * (width - 1) / far.bytes_per_s)
        update = profile.update / (p * split * (replicas if zero else 1))
        least = profile.arithmetic / (p * width) / self._pace(True) * (1 + FILL * (p - 1) / pieces)
        held = self._held(p, split, replicas, pieces, 3 if free else zero)
        return StrategyEstimate(period + exposed + update, least, held)

    def _pace(self, balanced: bool) -> float:
        """How fast the devices are by as many of speed 1: where they wait for the slowest, or are ``balanced``."""
        speeds = [self.hardware.speed(rank) for rank in range(self.world)]
        return sum(speeds) / len(speeds) if balanced else min(speeds)

    def _held(self, stages: int, split: int, replicas: int, pieces: int, zero: int) -> float:
        """Bytes that a device of the first stage holds."""
        profile = self.profile
        held = 0.0
        for nbytes, from_stage in ((profile.state, 1), (profile.parameters, 2), (profile.parameters, 3)):
            held += nbytes / (replicas if zero >= from_stage else 1)
        kept = profile.activations / (replicas * pieces) * min(pieces, stages)
        return (held + kept) / (stages * split)
