"""Estimate the time and memory of a step under a strategy from sums over its graph, before anything is compiled.

The estimate orders what is worth compiling; ``StrategyEstimate.least`` is what no plan of the strategy undercuts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actorflow.auto_parallel.space import SpecialAxes
from actorflow.auto_parallel.special_axes import (
    LEAST_POSITIONS,
    NO_EXPERTS,
    NO_SEQUENCE,
    ExpertFacts,
    SequenceFacts,
    find_experts,
    find_sequence,
)
from actorflow.auto_parallel.strategy import BY_SAMPLES, Strategy
from actorflow.auto_parallel.tensor_axis import find_kept_bytes
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.core.ops import ITEM_BYTES, Phase
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.graph.flops import dtype_of_flops, flops_of
from actorflow_compiler.graph.graph import InputKind, call_of
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_compiler.placing.automatic_stages import VisitCosts
from actorflow_compiler.placing.partition import PartitionUnit, least_longest
from actorflow_compiler.rewriting.model_parts import NO_PARTS, DividedModel

FIRINGS = 3  # of a stage for each micro-batch: forward, backward, and what they hand on
BACKWARD = 2 / 3  # of a micro-batch's time that the backward pass takes
BEHIND = 0.8  # of the time of the backward pass, behind which its gradients may be reduced
BESIDE = 0.5  # of the time in which activations are exchanged that something else is computed in
IN_DOUBT = 4.0  # by which estimates of memory may be too small
KEYS_MOVED = 4  # times that keys and values, or their gradients, move in a step: forward, and thrice in backward
ROWS_MOVED = 2  # times that rows of experts move in a step: in the forward pass, and in the backward pass
FILL = 1 - BACKWARD  # of a micro-batch's time, for which later stages wait under any schedule: its forward pass


@dataclass(frozen=True, slots=True)
class PartCosts:
    """What it costs to compute parts of the model again, and what that saves, on one device with all samples."""

    seconds: float
    arithmetic: float  # seconds of its floating-point operations, which no device undercuts
    kept: float  # bytes that are kept without
    saved: float  # bytes of these that are not kept with it
    largest: float = 0.0  # bytes that are kept without, of the part that keeps most


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a step costs as a whole, on one device and with one micro-batch."""

    batch: int  # samples, that is dim 0 of what is cut into micro-batches; 1: nothing is
    seconds: float  # of forward and backward
    arithmetic: float  # seconds of these that no device undercuts: those of their floating-point operations
    update: float  # seconds of the optimizer
    products: float  # bytes of the results of matrix products, in the forward pass
    parameters: float  # bytes of what is trained, as many as of its gradients added up
    gradients: float  # bytes of the gradients of a micro-batch, as the backward pass makes them (under autocast)
    state: float  # bytes of the optimizer's state
    activations: float  # bytes that forward keeps for backward, but for copies of weights
    units: tuple[PartitionUnit, ...]  # that can be shared among stages
    parts: tuple[PartCosts, ...] = ()  # that may be computed again, in the order in which they are
    kept: float = 0.0  # bytes that forward keeps of all parts
    batched: bool = True  # whether arguments have the samples; else the step makes or keeps what it works on
    whole: float = 0.0  # of the activations, the share that the devices of a tensor axis do not split
    copies: float = 0.0  # bytes of copies of weights, which forward makes and keeps for backward in each micro-batch
    experts: ExpertFacts = NO_EXPERTS
    sequence: SequenceFacts = NO_SEQUENCE

    @staticmethod
    def of(captured: Capture, hardware: Hardware, parts: DividedModel = NO_PARTS) -> StepProfile:
        """The profile of a captured step on devices like those of ``hardware``; ``parts`` may be computed again."""
        graph, costs = captured.graph, VisitCosts(captured, 1, 1.0, hardware)
        size = dict.fromkeys(("parameter", "optimizer"), 0.0)
        updated, items = {old for old, _ in graph.updates}, 0
        for i in graph.inputs:
            kind = captured.kinds.get(i.name, "") if i.kind == InputKind.VARIABLE else ""
            if kind in size and (kind == "optimizer" or i.value in updated):
                size[kind] += graph.metas[i.value].nbytes
                items += numel(graph.metas[i.value].shape) if kind == "parameter" else 0
        seconds = arithmetic = update = products = multiplied = narrow = 0.0
        forward = {part: [0.0, 0.0] for part in parts.order}  # seconds, and seconds of arithmetic
        for n, took in zip(graph.nodes, costs.work, strict=True):
            if n.phase == Phase.OPTIMIZER:
                update += took or 0.0
            else:
                seconds += took or 0.0
            part = parts.part_of(n) if n.phase == Phase.FORWARD else None
            again = None if part is None else forward.get(part)
            if again is not None:
                again[0] += took or 0.0
            call = call_of(n, graph.metas)[0]
            if flops := flops_of(call):
                dtype = dtype_of_flops(call)
                least = flops / hardware.flops_on({dtype: 1})
                arithmetic += least
                multiplied += flops
                narrow += flops * ITEM_BYTES.get(dtype, 0)
                if again is not None:
                    again[1] += least
                if n.phase == Phase.FORWARD and n.outs[0] >= 0:
                    products += graph.metas[n.outs[0]].nbytes
        kept = find_kept_bytes(graph)
        batches = [graph.metas[i.value].shape[0] for i in graph.inputs if i.kind == InputKind.BATCH]
        return StepProfile(
            math.gcd(*batches) or 1,
            seconds,
            arithmetic,
            update,
            products,
            size["parameter"],
            min(size["parameter"], items * narrow / multiplied) if multiplied else size["parameter"],
            size["optimizer"],
            max(0.0, sum(unit.activations for unit in costs.costs) - kept.copies),
            tuple(costs.costs),
            tuple(
                PartCosts(forward[k][0], forward[k][1], parts.parts[k].kept, parts.parts[k].saved) for k in parts.order
            ),
            parts.kept,
            bool(batches),
            kept.whole,
            kept.copies,
            find_experts(graph, captured.parameter),
            find_sequence(graph),
        )

    @property
    def samples(self) -> int:
        """The samples that arguments have; 0: none has any."""
        return self.batch if self.batched else 0

    def again(self, strategy: Strategy) -> PartCosts:
        """What a strategy computes again as a whole."""
        chosen = self.parts[: strategy.again[0]]
        return PartCosts(
            sum(part.seconds for part in chosen),
            sum(part.arithmetic for part in chosen),
            sum(part.kept for part in chosen),
            sum(part.saved for part in chosen),
            max((part.kept for part in chosen), default=0.0),
        )

    def special_axes(self, world: int, budget: float | None) -> SpecialAxes:
        """The special mesh axes that are worth trying on ``world`` devices that may hold ``budget`` bytes each.

        A sequence is split where there are fewer samples than devices, or where one sample hardly fits.
        """
        large = budget is not None and self.activations / self.batch > budget / 2
        demanded = large or (self.batched and self.batch < world)
        return SpecialAxes(self.experts.count, self.sequence.positions // LEAST_POSITIONS if demanded else 0)

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
        speeds = [hardware.speed(rank) for rank in range(world)]
        self._mean_speed, self._least_speed = sum(speeds) / max(1, world), min(speeds, default=1.0)
        self._unevenness: dict[int, float] = {}
        self._again: dict[int, PartCosts] = {}
        self._links: dict[tuple[int, int], Link] = {}
        self._shares: dict[tuple[int, object, object], _Shares] = {}

    def unevenness(self, stages: int) -> float:
        """See ``StepProfile.unevenness``."""
        if stages not in self._unevenness:
            self._unevenness[stages] = self.profile.unevenness(stages)
        return self._unevenness[stages]

    def again(self, strategy: Strategy) -> PartCosts:
        """See ``StepProfile.again``; thousands of strategies compute one of a few numbers of parts again."""
        count = strategy.again[0]
        if count not in self._again:
            self._again[count] = self.profile.again(strategy)
        return self._again[count]

    def link(self, devices: int, apart: int = 1) -> Link:
        """The link for collectives among ``devices`` of a stage that are so far apart."""
        if (devices, apart) not in self._links:
            ranks = tuple(range(0, devices * apart, apart))
            self._links[devices, apart] = self.hardware.link(ranks, collective=True)
        return self._links[devices, apart]

    def of(self, strategy: Strategy) -> StrategyEstimate:
        """The estimate for a strategy."""
        p, hardware, profile = self._stages(strategy), self.hardware, self.profile
        at = self._shares_of(strategy, max(1, self.world // p))
        pieces, again = strategy.micro_batches, self.again(strategy)
        skew, crowded = self.unevenness(p), self._crowding(strategy, at)
        work = (profile.seconds + again.seconds) * skew * crowded / (p * at.width) / self._pace(strategy)
        busy = work + self._inside(strategy, at, skew) + pieces * FIRINGS * hardware.fire_overhead_s
        shared = 1.0 if hardware.cores is None else max(1.0, hardware.cores.threads / hardware.cores.share)
        period = busy * max((pieces + p - 1) / pieces, shared) + 2 * (p - 1) * hardware.latency_s
        exposed = self._exchanged(strategy, at, work)
        update = profile.update / (p * at.tensor * (at.zero if strategy.zero else 1))
        arithmetic = profile.arithmetic + again.arithmetic
        least = arithmetic / (p * at.width) / self._pace() * (1 + FILL * (p - 1) / pieces)
        return StrategyEstimate(period + (exposed + update) * shared, least, self._held(strategy, at, crowded))

    def _shares_of(self, strategy: Strategy, width: int) -> _Shares:
        key = (width, strategy.mesh, strategy.modes)
        if key not in self._shares:
            self._shares[key] = _Shares.of(strategy, width)
        return self._shares[key]

    def _stages(self, strategy: Strategy) -> int:
        """The devices that the stages of a strategy are on one after the other; more stages go round these."""
        return min(strategy.stages or 1, self.world)

    def _exchanged(self, strategy: Strategy, at: _Shares, work: float) -> float:
        """Seconds in which gradients and parameters are exchanged over replicas, and nothing is computed.

        Gradients are reduced behind the backward pass that makes the last of them.  Stage 2 of ZeRO reduces those of
        each micro-batch while the next one is computed, unless products wait for collectives that come in between;
        stage 3 also gathers parameters twice for each.
        """
        profile, p, pieces, zero = self.profile, self._stages(strategy), strategy.micro_batches, strategy.zero or 0
        far = self.link(at.width // at.tensor, at.tensor)
        experts = profile.experts.parameters * (1 - 1 / at.experts)  # bytes of gradients that are on one device only
        moved = (profile.parameters - experts) / (p * at.tensor) * (at.replicas - 1) / at.replicas
        once = moved / far.bytes_per_s  # seconds to reduce or to gather all
        narrow = once * profile.gradients / profile.parameters if profile.parameters else 0.0  # of one micro-batch
        each = work / pieces
        if zero == 3:
            exchanged, behind = pieces * (2 * once + narrow), work
        elif zero == 2 and pieces > 1:
            hidden = 0.0 if at.tensor > 1 else min(narrow, each)  # a device has one collective at a time
            exchanged, behind = once + pieces * narrow, (pieces - 1) * hidden
        else:  # added up over micro-batches, and reduced in the last one
            half = once if pieces > 1 else narrow
            exchanged, behind = half + (once if zero else half), BEHIND * BACKWARD * each
        exposed = max(0.0, exchanged - behind) if self.beside else exchanged
        if at.free:
            exposed = min(exposed, profile.products * 2 / p / at.width * (at.width - 1) / far.bytes_per_s)
        return exposed

    def _inside(self, strategy: Strategy, at: _Shares, skew: float) -> float:
        """Seconds in which activations are exchanged among the devices of a stage that share samples or experts."""
        profile, p, found = self.profile, self._stages(strategy), 0.0
        for size, nbytes in (
            (at.tensor, profile.products),
            (at.sequence, KEYS_MOVED * profile.sequence.keys),
            (at.experts, ROWS_MOVED * profile.experts.rows),
        ):
            if size > 1:
                near = self.link(size)
                moved = nbytes * skew / (p * at.width / size) * (size - 1) / size
                repeated = self.again(strategy).seconds / profile.seconds if profile.seconds else 0.0
                shown = 1 - BESIDE if self.beside else 1.0
                found += shown * moved * (1 + repeated) / near.bytes_per_s
                found += 2 * strategy.micro_batches * near.latency_s
        return found

    def _crowding(self, strategy: Strategy, at: _Shares) -> float:
        """How many times as many samples as on average the device with most has.

        It is 1 where layouts are free, and where nobody knows which samples there are, as no argument has them.
        """
        piece = self.profile.batch / strategy.micro_batches
        return 1.0 if at.free or not self.profile.batched else math.ceil(piece / at.samples) * at.samples / piece

    def _pace(self, strategy: Strategy | None = None) -> float:
        """How fast the devices are by as many of speed 1: where they wait for the slowest, or are balanced.

        They are where the strategy has weights or stages; without a strategy as fast as can be.
        """
        balanced = strategy is None or strategy.weights or (strategy.stages or 1) > 1
        return self._mean_speed if balanced else self._least_speed

    def _held(self, strategy: Strategy, at: _Shares, crowded: float) -> float:
        """Bytes that a device of the first stage holds."""
        profile, stages, pieces = self.profile, self._stages(strategy), strategy.micro_batches
        zero = 3 if at.free else strategy.zero or 0
        once = 1 - 1 / at.experts  # of experts, that this device does not hold
        state = profile.state - once * profile.experts.state
        parameters = profile.parameters - once * profile.experts.parameters
        held = 0.0
        for nbytes, from_stage in ((state, 1), (parameters, 2), (parameters, 3)):
            held += nbytes / (at.zero if zero >= from_stage else 1)
        again, split = self.again(strategy), profile.whole + (1 - profile.whole) / at.tensor
        of_all = 1.0 / profile.kept if profile.kept else 0.0
        copies = profile.copies * (1 - again.kept * of_all) * parameters / (profile.parameters or 1.0)
        held += copies * min(pieces, stages) / (at.zero if zero == 3 else 1)
        begins = (again.kept - again.saved) * of_all  # what parts that are computed again begin with: residuals
        left = (1 - again.kept * of_all) * split + begins
        kept = crowded * profile.activations / (at.replicas * pieces) * min(pieces, stages) * left
        largest = crowded * again.largest / (at.replicas * pieces) * stages * split  # one at a time, in each stage
        return (held / at.tensor + kept + largest) / stages


@dataclass(frozen=True, slots=True)
class _Shares:
    """Among how many devices of a stage what is shared."""

    width: int  # devices of a stage
    tensor: int  # that split weights
    sequence: int
    experts: int
    zero: int  # among which ZeRO splits state
    samples: int
    free: bool  # layouts are chosen for each op

    @staticmethod
    def of(strategy: Strategy, width: int) -> _Shares:
        mesh, modes = strategy.mesh or (width,), strategy.modes or (ParallelMode.DATA,)
        axes = [*zip(mesh, modes, strict=False)]
        of = {mode: math.prod(size for size, one in axes if one == mode) for mode in ParallelMode}
        free = ParallelMode.AUTO in modes
        samples = math.prod(size for size, mode in axes if mode in BY_SAMPLES)
        first = mesh[0] if modes[0] != ParallelMode.TENSOR else 1
        return _Shares(
            math.prod(mesh),
            of[ParallelMode.TENSOR],
            of[ParallelMode.SEQUENCE],
            of[ParallelMode.EXPERT],
            first,
            samples,
            free,
        )

    @property
    def replicas(self) -> int:
        """Devices that share the samples and their positions, with a copy of each dense parameter."""
        return self.width // self.tensor
