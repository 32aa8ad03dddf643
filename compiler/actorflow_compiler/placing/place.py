"""The placing pass: give every op a placement and a stage, from scopes, ``flow.place`` and automatic stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.mirrored import refuse_parallel
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.graph.graph import Graph
from actorflow_compiler.placing.automatic_stages import AutomaticStages, cut_automatically
from actorflow_compiler.placing.stages import computing, place_ops


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
        )
    placed = place_ops(automatic.graph, unplaced, owners, captured.parameter, automatic.begins, homes, world)
    return PlacedStep(placed.graph, placed.owners, everywhere, automatic.notes)
