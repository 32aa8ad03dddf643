"""Choose the data plane of each transfer: NCCL, shared memory, Gloo, or within the message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.plan.plan import Actor, Collective, Comm, Plan, Plane
from actorflow_compiler.plan.rank_location import RankLocation, replace_planes, with_planes
from actorflow_scheduler.call_order import order_calls

__all__ = [
    "RankLocation", "choose_planes", "computes_beside", "meet_groups", "numbered", "rank_locations", "share", "unshare",
]  # fmt: skip

NEVER = timedelta(days=1)  # the control plane notices ranks that do not come


def choose_planes(plan: Plan, spots: Sequence[RankLocation], hardware: Hardware = CPU_CORE) -> Plan:
    """A whole plan with a data plane for each communication, and the call order of planes that need one.

    They are those of ``plane_among``; else Gloo, or inline in the message for small tensors.
    """
    return order_calls(with_planes(plan, spots), Plane.NCCL, hardware)


def computes_beside(machines: Sequence[str], kinds: Sequence[str]) -> bool:
    """Whether ranks of these machines and kinds of devices compute while their collectives run.

    CPUs that share memory do not: their collectives are work of the thread that computes.
    """
    return "cuda" in kinds or not machines or not machines[0] or len({*machines}) > 1


def share(plan: Plan, machines: Sequence[str]) -> Plan:
    """Make ranks of one machine send through shared memory.

    ``machines[rank]`` is equal for ranks that can share memory, and empty for those that cannot.
    """
    return choose_planes(plan, [RankLocation(machine) for machine in machines])


def unshare(plan: Plan, rank: int, near: Collection[int], near_groups: Collection[tuple[int, ...]] = ()) -> Plan:
    """Make a rank do without shared memory with peers that are not ``near`` and in groups that are not ``near_groups``.

    Two ranks know of each other whether they are near.  The ranks of a group have to agree: see ``meet_groups``.
    """

    def plane(actor: Actor, comm: Comm) -> Plane:
        if comm.plane != Plane.SHARED or rank not in comm.ranks:
            return comm.plane
        shares = comm.ranks in near_groups if isinstance(comm, Collective) else set(comm.ranks) <= {rank, *near}
        return Plane.SHARED if shares else Plane.GLOO

    return replace_planes(plan, plane)


def meet_groups(plan: Plan, rank: int, near: Collection[int], store: Callable[[], Any]) -> set[tuple[int, ...]]:
    """The groups of a plan's collectives in shared memory in which this rank is, and whose ranks are all near others.

    Each rank tells the others of its groups, by the run's ``store``, whether all of them are ``near`` it, and all of
    them must call this; it blocks until they have.
    """
    groups = sorted({c.ranks for c in _collectives(plan) if c.plane == Plane.SHARED and rank in c.ranks})
    if not groups:
        return set()
    met = store()
    for group in groups:
        met.set(_key(group, rank), str(int(set(group) <= {rank, *near})))
    keys = {group: [_key(group, member) for member in group] for group in groups}
    met.wait([key for of in keys.values() for key in of], NEVER)
    return {group for group, of in keys.items() if all(met.get(key) == b"1" for key in of)}


def _key(group: tuple[int, ...], rank: int) -> str:
    return f"actorflow/near/{'.'.join(map(str, group))}/{rank}"


def _collectives(plan: Plan) -> Iterator[Collective]:
    return (actor.comm for actor in plan.actors if isinstance(actor.comm, Collective))


def rank_locations(
    machines: Sequence[str], kinds: Sequence[str], gpus: Sequence[str], nccl: Sequence[str]
) -> list[RankLocation]:
    """The locations of all ranks, from each one's machine, kind of device, GPU and version of NCCL."""
    return [
        RankLocation(machine, gpu if kind == "cuda" else "", kind == "cuda" and bool(version))
        for machine, kind, gpu, version in zip(machines, kinds, gpus, nccl, strict=True)
    ]


def numbered(locations: Sequence[RankLocation]) -> tuple[RankLocation, ...]:
    """The locations with numbers in place of ids, so that those of ranks that lie alike in two runs are equal."""
    machines: dict[str, str] = {"": ""}
    gpus: dict[str, str] = {"": ""}
    return tuple(
        [
            replace(
                one,
                machine=machines.setdefault(one.machine, str(len(machines))),
                gpu=gpus.setdefault(one.gpu, str(len(gpus))),
            )
            for one in locations
        ]
    )
