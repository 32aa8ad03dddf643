"""Fix the order in which each rank makes its communication calls on a data plane such as NCCL.

NCCL hangs unless all ranks make their shared calls in the same order, over all communicators and including receives.
This module uses the order in which the communications of one iteration start in a simulation of the plan.  It is a
topological order of the whole iteration: each call comes after everything that must end before it, on any rank.  Every
rank gets its own part of this order.  Calls made in it cannot deadlock, even if each waits for the end of the call
before it.
"""

from __future__ import annotations

from dataclasses import replace

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.plan.plan import Order, Plan, Plane, Send, moves_by
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.timeline import nanoseconds, stuck

__all__ = ["order_calls"]


def order_calls(plan: Plan, plane: Plane, hardware: Hardware = CPU_CORE) -> Plan:
    """Return the plan with new ``calls`` for one data plane; the calls of other planes stay as they are.

    Raises DeadlockError if the plan gets stuck.
    """
    others = tuple(order for order in plan.calls if order.queue != plane)
    moving = [a for a in plan.actors if moves_by(a, plane)]
    if not moving:
        return replace(plan, calls=others)
    firings = FiringTimes(plan, nanoseconds(plan, hardware))
    if not firings.run():
        raise stuck(plan, 1)
    # Every firing takes time, so a firing starts later than all that it depends on.  Communications that start at the
    # same instant are sorted by their id, which all members share.
    starts: list[tuple[int, int, int, int, int]] = []  # start, communication, firing, rank, actor
    for actor in moving:
        assert actor.comm is not None
        ranks = actor.comm.ranks if isinstance(actor.comm, Send) else (actor.rank,)
        duration = firings.durations[actor.id]
        for n, end in enumerate(firings.ends[actor.id]):
            starts += [(end - duration, actor.comm.id, n, rank, actor.id) for rank in ranks]
    mine: dict[int, list[int]] = {}
    for _, _, _, rank, id in sorted(starts):
        mine.setdefault(rank, []).append(id)
    ordered = tuple(Order(rank, plane, tuple(ids)) for rank, ids in sorted(mine.items()))
    return replace(plan, calls=(*others, *ordered))
