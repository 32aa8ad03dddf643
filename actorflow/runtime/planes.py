"""A plan, and what ranks have in common, go in; the plan leaves with the fastest plane for each transfer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from actorflow_compiler.plan import Comm, Plan

__all__ = ["share", "unshare"]


def share(plan: Plan, machines: Sequence[str]) -> Plan:
    """Let ranks of one machine send through shared memory.

    ``machines[rank]`` is equal for ranks that can share memory, and empty for those that cannot.
    The plan must be one for CPU devices.
    """

    def near(comm: Comm) -> bool:
        source, home = comm.group
        return bool(machines[source]) and machines[source] == machines[home]

    return _with_planes(plan, lambda comm: "shared" if near(comm) else comm.plane)


def unshare(plan: Plan, rank: int, near: Collection[int]) -> Plan:
    """Let a rank send to, and receive from, peers that are not ``near`` without shared memory."""

    def plane(comm: Comm) -> str:
        far = rank in comm.group and not set(comm.group) <= {rank, *near}
        return "gloo" if far and comm.plane == "shared" else comm.plane

    return _with_planes(plan, plane)


def _with_planes(plan: Plan, plane: Callable[[Comm], str]) -> Plan:
    actors = tuple(
        replace(actor, comm=replace(actor.comm, plane=plane(actor.comm)))
        if actor.comm is not None and actor.comm.kind == "send" and actor.operands
        else actor
        for actor in plan.actors
    )
    return replace(plan, actors=actors)
