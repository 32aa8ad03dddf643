"""The machine and device of a rank, and the data plane that the locations of ranks allow among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.plan.plan import Actor, Collective, Comm, Plan, Plane


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The properties of a rank's machine and device that decide how tensors are sent to it."""

    machine: str = ""  # equal for ranks that can share memory; empty for one that cannot
    gpu: str = ""  # an id of the GPU that it computes on; empty without one
    nccl: bool = False  # whether it can use NCCL


def plane_among(spots: Sequence[RankLocation], collective: bool) -> Plane | None:
    """The plane of a collective, or of a send, among ranks at these locations; None: Gloo, or inline for a small send.

    NCCL among GPUs, if each belongs to one rank; else shared memory among ranks of one machine.  All but NCCL stage
    tensors of GPUs through host memory; collectives with any on a GPU then use Gloo.
    """
    if all(spot.gpu and spot.nccl for spot in spots) and len({spot.gpu for spot in spots}) == len(spots):
        return Plane.NCCL
    near = len(spots) > 1 and bool(spots[0].machine) and len({spot.machine for spot in spots}) == 1
    here = not collective or not any(spot.gpu for spot in spots)
    return Plane.SHARED if near and here else None


def with_planes(plan: Plan, spots: Sequence[RankLocation]) -> Plan:
    """A plan of some or all ranks with the data plane of ``plane_among`` for each communication, and no call orders."""
    groups: dict[int, Plane | None] = {}  # by the id of a group's ranks, which many actors share

    def plane(actor: Actor, comm: Comm) -> Plane:
        if not isinstance(comm, Collective):
            return plane_among([spots[rank] for rank in comm.ranks], collective=False) or comm.plane
        if id(comm.ranks) not in groups:
            groups[id(comm.ranks)] = plane_among([spots[rank] for rank in comm.ranks], collective=True)
        return groups[id(comm.ranks)] or comm.plane

    return replace_planes(plan, plane)


def replace_planes(plan: Plan, plane: Callable[[Actor, Comm], Plane]) -> Plan:
    """A plan whose communications have these data planes."""
    actors = tuple(
        replace(actor, comm=replace(actor.comm, plane=plane(actor, actor.comm)))
        if actor.comm is not None and (actor.operands or isinstance(actor.comm, Collective))
        else actor
        for actor in plan.actors
    )
    return replace(plan, actors=actors)
