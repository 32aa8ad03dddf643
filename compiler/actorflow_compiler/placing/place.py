"""The placing pass: give every op a placement and a stage, from scopes, ``flow.place`` and automatic stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.mirrored import refuse_parallel
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.graph.graph import Graph
from actorflow_compiler.hints.tags import OUTSIDE_SCOPES
from actorflow_compiler.placing.automatic_stages import AutomaticStages, cut_automatically
from actorflow_compiler.placing.stages import computing, place_ops
from actorflow_compiler.placing.variable_shares import VariableShares

SHOWN = 3  # lines of the script in a note


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step whose ops and variables all have a placement."""

    graph: Graph
    owners: Mapping[str, Placement]  # of variables
    everywhere: Placement  # all ranks: the placement of arguments, and of results that every rank gets
    notes: tuple[str, ...]


def place(captured: Capture, request: StepRequest) -> PlacedStep:
    """Apply scopes and ``flow.place``, cut into stages where asked, and place all other ops on all devices.

    Raises LayoutError for placements, meshes or stages that the devices do not have, and CaptureError for hints in a
    step of the mirrored view.
    """
    devices, asked, fixed = request.devices, request.preferences, request.history.fixed
    hints, world = asked.hints, devices.world
    homes = {name: home for name, home in hints.homes.items() if name in captured.kinds}
    ranks = computing(world, homes, captured.graph, hints)
    # with automatic stages each of them is the mesh that is asked for
    mesh = (len(ranks),) if hints.stages else asked.goal.mesh_of(len(ranks), world)
    unplaced = Placement(devices.type, ranks, mesh, () if hints.stages else asked.goal.weights)
    several = mesh if len(ranks) == world else (world,)
    everywhere = Placement(devices.type, tuple(range(world)), several)
    if request.mirrored:
        refuse_parallel(request.step.name, captured.graph, hints, fixed, everywhere)
    owners = {n: v.placement for n, v in fixed.items() if captured.parameter.get(n, n) not in homes}
    automatic = AutomaticStages(captured.graph)
    if hints.stages is not None:
        hardware, budget = devices.hardware, asked.goal.budget
        if hardware.memory_bytes is None and budget is not None:
            hardware = replace(hardware, memory_bytes=int(budget))
        automatic = cut_automatically(
            captured,
            hints.stages,
            unplaced,
            owners,
            elsewhere=homes.keys(),
            pieces=asked.micro_batches,
            mesh=asked.goal.mesh,
            schedule=asked.schedule,
            hardware=hardware,
            shares=VariableShares.of(asked.goal, asked.goal.mesh or (max(1, world // hints.stages.count),), hints.zero),
        )
    placed = place_ops(automatic.graph, unplaced, owners, captured.parameter, automatic.begins, homes, world)
    by_scopes = hints.stages is None and not hints.places and any(n.placement for n in captured.graph.nodes)
    outside = _outside_of_scopes(automatic.graph, placed.graph, unplaced) if by_scopes else ()
    return PlacedStep(placed.graph, placed.owners, everywhere, (*automatic.notes, *outside))


def _outside_of_scopes(graph: Graph, placed: Graph, everywhere: Placement) -> tuple[str, ...]:
    """A note if ops of no scope are not on all devices, as they are with what they are computed from or for."""
    outside = {n.outs for n in graph.nodes if n.placement is None and n.phase == Phase.FORWARD and n.line}
    found: dict[Placement, dict[str, None]] = {}  # → the lines of the ops
    for n in placed.nodes:
        if n.outs in outside and n.placement is not None and set(n.placement.ranks) != set(everywhere.ranks):
            found.setdefault(n.placement, {})[n.line] = None
    if not found:
        return ()
    where = "; ".join(
        f"{', '.join(list(lines)[:SHOWN])}{', …' * (len(lines) > SHOWN)} on {placement}"
        for placement, lines in found.items()
    )
    return (
        f"{OUTSIDE_SCOPES}: {where}, with what they are computed from or for (OneFlow: on all devices); a scope "
        f"of their own moves them: flow.scope.placement({everywhere.type!r}, {list(everywhere.ranks)})",
    )
