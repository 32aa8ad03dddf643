"""The strategies that are possible for a step, where its hints and its request leave them open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from actorflow.auto_parallel.strategy import MARKED, Strategy, zero_hints
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import Preferences, StepRequest
from actorflow_compiler.core.hardware import Hardware, balanced_weights
from actorflow_compiler.graph.graph import InputKind
from actorflow_compiler.hints.goal import WHOLE_VARIABLES, ParallelMode
from actorflow_compiler.hints.packing import MARKERS, uneven
from actorflow_compiler.hints.zero import is_constrained
from actorflow_compiler.plan.plan import VariableKind
from actorflow_compiler.rewriting.model_parts import NO_PARTS, DividedModel, find_parts

ZERO = (0, 1, 2, 3)
LEVELS = 4  # of how much is computed again


@dataclass(frozen=True, slots=True)
class OpenChoices:
    """What of a strategy is to be chosen for a step."""

    mesh: bool
    stages: bool
    zero: bool
    micro_batches: bool
    again: bool = False  # what the backward pass computes again, where memory demands it

    @property
    def any(self) -> bool:
        """Whether there is something to choose."""
        return self.mesh or self.stages or self.zero or self.micro_batches or self.again


def open_choices(
    captured: Capture, request: StepRequest, micro_batches: bool, budget: float | None = None
) -> OpenChoices:
    """What is open: what neither hints, nor earlier plans, nor arguments of the job have decided.

    ``micro_batches`` says whether their number is left to the compiler, ``budget`` how many bytes a device may hold.
    """
    asked, graph = request.preferences, captured.graph
    placed = bool(asked.hints.placements or asked.hints.homes) or any(n.placement is not None for n in graph.nodes)
    hinted = asked.hints.any_layouts or is_constrained(graph)
    decided = placed or hinted or any(v in request.history.fixed for v in captured.kinds)
    several = request.devices.world > 1
    free = asked.goal.search and several and not request.mirrored and not decided
    markers = any(n.op in MARKERS for n in graph.nodes)
    batched = any(i.kind == InputKind.BATCH for i in graph.inputs)
    return OpenChoices(
        mesh=free,
        stages=free and asked.hints.stages is None,
        zero=free and may_split_state(asked, request),
        micro_batches=micro_batches and batched and not markers and not request.mirrored,
        again=budget is not None and asked.goal.search and request.step.train and not request.mirrored,
    )


def may_split_state(asked: Preferences, request: StepRequest) -> bool:
    """Whether ZeRO is open for a step, as far as that is known before it is captured."""
    return (
        asked.goal.search
        and request.devices.world > 1
        and request.step.train
        and not request.mirrored
        and not (asked.hints.zero or asked.hints.any_layouts or asked.hints.placements or request.history.fixed)
    )


def marked_for_zero(request: StepRequest) -> StepRequest:
    """The request to capture a step with: gradients are marked where ZeRO, which the marks are for, is open."""
    asked = request.preferences
    if not may_split_state(asked, request):
        return request
    hints = replace(asked.hints, zero=zero_hints(parameters_of(request), MARKED))
    return replace(request, preferences=replace(asked, hints=hints))


def parameters_of(request: StepRequest) -> tuple[str, ...]:
    """The names of the step's parameters, which ZeRO may split."""
    return tuple(n for n, held in request.step.state.held.items() if held.kind == VariableKind.PARAMETER)


@dataclass(frozen=True, slots=True)
class SpecialAxes:
    """The mesh axes beside those for data and tensors that are worth trying for a step, and their most devices."""

    experts: int = 0  # of the step; 0: none
    sequence: int = 0  # devices that its longest sequence is enough for; 0: there is none, or samples need no splitting

    def sizes(self, each: int) -> Iterator[tuple[ParallelMode, int]]:
        """The special axes on ``each`` devices."""
        for mode, most in ((ParallelMode.EXPERT, self.experts), (ParallelMode.SEQUENCE, self.sequence)):
            yield from ((mode, size) for size in divisors(each)[1:] if size <= most)


NO_AXES = SpecialAxes()


def strategies(
    choices: OpenChoices,
    asked: Preferences,
    hardware: Hardware,
    world: int,
    batch: int,
    parts: int,
    special: SpecialAxes = NO_AXES,
) -> Iterator[Strategy]:
    """All strategies that the open choices allow, but for what is computed again.

    ``batch`` is the number of samples that are cut into micro-batches, 0 where no argument has any; ``parts`` the
    number of the parts of the model that stages may be made of.
    """
    pieces = divisors(batch) if choices.micro_batches else (asked.micro_batches,)
    given = asked.hints.stages
    if not choices.mesh:
        yield from (Strategy(None if given is None else given.count, micro_batches=m) for m in pieces)
        return
    for stages in divisors(world) if given is None else (given.count,):
        if given is None and stages > max(1, parts):
            continue
        each = max(1, world // stages)
        for mesh, modes in _meshes(each, hardware, special):
            zero = ZERO if choices.zero and modes[0] in WHOLE_VARIABLES and mesh[0] > 1 else (0,)
            shares = {(), _weights(mesh, hardware)} if stages == 1 else {()}
            for weights, z, m in itertools.product(sorted(shares), zero, pieces):
                found = Strategy(stages, mesh, modes, z if choices.zero else None, m, weights)
                if not batch or (m == 1 and ParallelMode.SEQUENCE not in modes) or batch // m >= found.replicas:
                    yield found


def why_none(asked: Preferences, hardware: Hardware, world: int, batch: int) -> str:
    """The text of an error where there are no ``strategies``: the samples of a micro-batch are too few."""
    if batch % asked.micro_batches:
        return uneven(f"micro_batches={asked.micro_batches}: the batch", batch, asked.micro_batches)
    given, pieces, node = asked.hints.stages, asked.micro_batches, hardware.node_size or world
    each = world // (given.count if given is not None else 1)
    return (
        f"the step cannot be shared among {world} devices: each of the {pieces} micro-batches has {batch // pieces} of "
        f"the {batch} samples, fewer than the {each} devices of a stage, which share them (tensors could be split "
        f"within a node, which has {node} of them); take fewer micro-batches, a larger batch, or more stages"
    )


def _meshes(
    each: int, hardware: Hardware, special: SpecialAxes
) -> Iterator[tuple[tuple[int, ...], tuple[ParallelMode, ...]]]:
    """The meshes of ``each`` devices, and what their axes share; tensors are split within a node."""
    yield (each,), (ParallelMode.DATA,)
    if each == 1:
        return
    yield (each,), (ParallelMode.AUTO,)
    node = hardware.node_size or each
    for inner in divisors(each)[1:]:
        if inner > node or node % inner:
            continue
        if inner == each:
            yield (inner,), (ParallelMode.TENSOR,)
        else:
            yield (each // inner, inner), (ParallelMode.DATA, ParallelMode.TENSOR)
    for mode, inner in special.sizes(each):
        if inner == each:
            yield (inner,), (mode,)
        else:
            yield (each // inner, inner), (ParallelMode.DATA, mode)


def _weights(mesh: tuple[int, ...], hardware: Hardware) -> tuple[tuple[int, ...], ...]:
    """Weights of the mesh's first axis by the speeds of the devices along it, of which the slowest count; () if alike.

    The first axis has groups of neighbouring ranks, which share what one of its parts is.
    """
    each = math.prod(mesh[1:])
    groups = [range(k * each, (k + 1) * each) for k in range(mesh[0])]
    slowest = [min(group, key=hardware.speed) for group in groups]
    weights = balanced_weights(hardware, slowest)
    return () if weights is None else (weights, *((1,) * size for size in mesh[1:]))


def parts_if(again: bool, captured: Capture) -> DividedModel:
    """The parts of a captured step that may be computed again, if any may be."""
    return find_parts(captured.graph) if again else NO_PARTS


def levels(parts: DividedModel) -> tuple[tuple[int, int], ...]:
    """How many parts may be computed again: about a fourth, a half, three fourths, and all that are worth it."""
    most = len(parts.order)
    counts = sorted({math.ceil(most * k / LEVELS) for k in range(1, LEVELS + 1)} - {0})
    return tuple((count, len(parts.parts)) for count in counts)


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
