"""Keep to what an earlier plan has chosen: where its variables are decides meshes and stages of later plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actorflow.auto_parallel.strategy import ORIGIN
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_compiler.hints.hints import StagesHint
from actorflow_compiler.infer.expert_axis import expert_dims
from actorflow_compiler.plan.plan import Variable, VariableKind


def following(captured: Capture, request: StepRequest) -> StepRequest:
    """The request, with the mesh and the stages that earlier plans have given the step's variables, if they have.

    Only where the request leaves these to the compiler.
    """
    asked, fixed = request.preferences, request.history.fixed
    places = dict.fromkeys(fixed[name].placement for name in captured.kinds if name in fixed)
    open_here = asked.goal.search and not request.mirrored
    if not open_here or not places or asked.hints.placements or asked.hints.stages or asked.hints.homes:
        return request
    goal, hints = asked.goal, asked.hints
    if len(places) > 1:
        stages = tuple(sorted(places, key=lambda place: place.ranks))
        if not _are_stages(stages):
            return request
        hints = replace(hints, stages=StagesHint(len(stages), stages, ORIGIN))
    else:
        (place,) = places
        if place.size != request.devices.world:
            return request
        goal = replace(goal, mesh=place.hierarchy, weights=place.weights)
    goal = replace(goal, modes=_modes(captured, fixed, goal.modes))
    return replace(request, preferences=replace(asked, goal=goal, hints=hints))


def _modes(
    captured: Capture, fixed: Mapping[str, Variable], asked: tuple[ParallelMode, ...]
) -> tuple[ParallelMode, ...]:
    """The modes of the mesh's axes: as ``asked``, but for an axis along which experts are split, and no other weight.

    On the axis of a plan for experts, rows go to the devices of their experts, whose weights are never gathered.
    """
    experts, _ = expert_dims(captured.graph)
    held = [fixed[name] for name, kind in captured.kinds.items() if kind == VariableKind.PARAMETER and name in fixed]
    if not experts or not held:
        return asked
    along: list[ParallelMode] = []
    for axis in range(len(held[0].sbp)):
        split = {v.name for v in held if v.sbp[axis] != B}
        whole = (
            any(v.sbp[axis] == Split(experts[v.name]) for v in held if v.name in experts) and split <= experts.keys()
        )
        along.append(ParallelMode.EXPERT if whole else asked[min(axis, len(asked) - 1)])
    return tuple(along) if ParallelMode.EXPERT in along else asked


def _are_stages(places: tuple[Placement, ...]) -> bool:
    """Whether no rank is in two of these placements, and all have the same mesh."""
    ranks = [rank for place in places for rank in place.ranks]
    return len(set(ranks)) == len(ranks) and len({place.hierarchy for place in places}) == 1
