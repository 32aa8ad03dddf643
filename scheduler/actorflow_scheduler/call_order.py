"""A scheduled plan and a data plane enter; the plan leaves with the order in which each rank makes its calls of it.

Some planes (NCCL) hang unless every rank makes the calls that it shares with others in one order, over all
communicators, receives included.  The order is that in which the communications of one iteration start
on a virtual clock: one run of the plan, so it puts each after all that must end before it, on whatever rank.
Every rank has its part of it.  What is issued in that order cannot deadlock, even if each call waits for
the one before it to end.
"""

from __future__ import annotations

from dataclasses import replace

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.plan.plan import Order, Plan, moves_by
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.timeline import nanoseconds, stuck

__all__ = ["order_calls"]


def order_calls(plan: Plan, plane: str, hardware: Hardware = CPU_CORE) -> Plan:
    """The whole plan with the calls of a plane in order; those of other planes stay as they are.

    Raises DeadlockError if the plan gets stuck.
    """
    others = tuple(order for order in plan.calls if order.queue != plane)
    moving = [a for a in plan.actors if moves_by(a, plane)]
    if not moving:
        return replace(plan, calls=others)
    firings = FiringTimes(plan, nanoseconds(plan, hardware))
    if not firings.run():
        raise stuck(plan, 1)
    # Firings take time, so what must come first starts earlier.  What starts at once is told apart by the number
    # of the communication, which its members share.
    starts: list[tuple[int, int, int, int, int]] = []  # start, communication, firing, rank, actor
    for actor in moving:
        assert actor.comm is not None
        ranks = actor.comm.group if actor.comm.kind == "send" else (actor.rank,)
        lasts = firings.lasts[actor.id]
        for n, end in enumerate(firings.ends[actor.id]):
            starts += [(end - lasts, actor.comm.id, n, rank, actor.id) for rank in ranks]
    mine: dict[int, list[int]] = {}
    for _, _, _, rank, id in sorted(starts):
        mine.setdefault(rank, []).append(id)
    ordered = tuple(Order(rank, plane, tuple(ids)) for rank, ids in sorted(mine.items()))
    return replace(plan, calls=(*others, *ordered))
