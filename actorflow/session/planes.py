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
    """What of a rank's place decides how tensors are sent to it."""

    machine: str = ""  # equal for ranks that can share memory; empty for one that cannot
    gpu: str = ""  # what tells the GPU that it computes on from all others; empty where it computes on none
    nccl: bool = False  # it can use NCCL


def choose_planes(plan: Plan, spots: Sequence[RankLocation], hardware: Hardware = CPU_CORE) -> Plan:
    """A whole plan with a plane for each communication, and the order of the calls of those that need one.

    NCCL among GPUs, each of one rank; else shared memory between ranks of one machine; else Gloo, or inside of the
    message for what is small.  All but NCCL are staged through host memory where a GPU sends or receives.
    """

    def plane(actor: Actor, comm: Comm) -> Plane:
        of = [spots[rank] for rank in comm.ranks]
        if all(spot.gpu and spot.nccl for spot in of) and len({spot.gpu for spot in of}) == len(of):
            return Plane.NCCL
        near = isinstance(comm, Send) and bool(of[0].machine) and of[0].machine == of[1].machine
        return Plane.SHARED if near else comm.plane

    return order_calls(_with_planes(plan, plane), Plane.NCCL, hardware)


def share(plan: Plan, machines: Sequence[str]) -> Plan:
    """Let ranks of one machine send through shared memory.

    ``machines[rank]`` is equal for ranks that can share memory, and empty for those that cannot.
    """
    return choose_planes(plan, [RankLocation(machine) for machine in machines])


def unshare(plan: Plan, rank: int, near: Collection[int]) -> Plan:
    """Let a rank send to, and receive from, peers that are not ``near`` without shared memory."""

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
