"""Choose the data plane of each transfer: NCCL, shared memory, Gloo, or within the message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.plan.plan import Actor, Collective, Comm, Plan, Plane, Send
from actorflow_scheduler.call_order import order_calls

__all__ = ["RankLocation", "choose_planes", "share", "rank_locations", "unshare"]


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The properties of a rank's machine and device that decide how tensors are sent to it."""

    machine: str = ""  # equal for ranks that can share memory; empty for one that cannot
    gpu: str = ""  # an id of the GPU that it computes on; empty without one
    nccl: bool = False  # whether it can use NCCL


def choose_planes(plan: Plan, spots: Sequence[RankLocation], hardware: Hardware = CPU_CORE) -> Plan:
    """A whole plan with a data plane for each communication, and the call order of planes that need one.

    NCCL among GPUs, if each belongs to one rank; else shared memory between ranks of one machine; else Gloo, or inline
    in the message for small tensors.  All but NCCL stage tensors of GPUs through host memory.
    """

    def plane(actor: Actor, comm: Comm) -> Plane:
        of = [spots[rank] for rank in comm.ranks]
        if all(spot.gpu and spot.nccl for spot in of) and len({spot.gpu for spot in of}) == len(of):
            return Plane.NCCL
        near = isinstance(comm, Send) and bool(of[0].machine) and of[0].machine == of[1].machine
        return Plane.SHARED if near else comm.plane

    return order_calls(_with_planes(plan, plane), Plane.NCCL, hardware)


def share(plan: Plan, machines: Sequence[str]) -> Plan:
    """Make ranks of one machine send through shared memory.

    ``machines[rank]`` is equal for ranks that can share memory, and empty for those that cannot.
    """
    return choose_planes(plan, [RankLocation(machine) for machine in machines])


def unshare(plan: Plan, rank: int, near: Collection[int]) -> Plan:
    """Make a rank send to, and receive from, peers that are not ``near`` without shared memory."""

    def plane(actor: Actor, comm: Comm) -> Plane:
        far = rank in comm.ranks and not set(comm.ranks) <= {rank, *near}
        return Plane.GLOO if far and comm.plane == Plane.SHARED else comm.plane

    return _with_planes(plan, plane)


def rank_locations(
    machines: Sequence[str], kinds: Sequence[str], gpus: Sequence[str], nccl: Sequence[str]
) -> list[RankLocation]:
    """The locations of all ranks, from each one's machine, kind of device, GPU and version of NCCL."""
    return [
        RankLocation(machine, gpu if kind == "cuda" else "", kind == "cuda" and bool(version))
        for machine, kind, gpu, version in zip(machines, kinds, gpus, nccl, strict=True)
    ]


def _with_planes(plan: Plan, plane: Callable[[Actor, Comm], Plane]) -> Plan:
    actors = tuple(
        replace(actor, comm=replace(actor.comm, plane=plane(actor, actor.comm)))
        if actor.comm is not None and (actor.operands or isinstance(actor.comm, Collective))
        else actor
        for actor in plan.actors
    )
    return replace(plan, actors=actors)
