"""A plan with slot counts enters; the same plan with a frozen order for every queue leaves.

One iteration is simulated with its collectives started jointly.  The order in which the firings
start is one topological order of the whole iteration, and each queue gets its part of it: no two
queues can then wait for each other, on whatever ranks, and all members of a group issue their
collectives in the same order.
"""

from __future__ import annotations

from dataclasses import replace

from actorflow_compiler.plan import Actor, Order, Plan
from actorflow_scheduler.cost import Hardware
from actorflow_scheduler.timeline import Policy, Timeline, short, simulate

# kind → class; lower goes first
BACKWARD_FIRST = {
    "optimizer": 0,
    "sink": 0,
    "boxing": 1,
    "send": 1,
    "backward": 2,
    "forward": 3,
    "source": 3,
    "weight": 4,
}
FORWARD_FIRST = BACKWARD_FIRST | {"forward": 2, "source": 2, "backward": 3}


def backward_first(actor: Actor, firing: int) -> tuple[int, int, int]:
    """Optimizer, backward, forward, weight; the oldest piece first; communication as it becomes ready.

    With 1F1B's slot counts this is the 1F1B schedule.
    """
    return _key(BACKWARD_FIRST, actor, firing)


def forward_first(actor: Actor, firing: int) -> tuple[int, int, int]:
    """As ``backward_first``, but forward goes before backward: GPipe where the slots allow it."""
    return _key(FORWARD_FIRST, actor, firing)


def _key(classes: dict[str, int], actor: Actor, firing: int) -> tuple[int, int, int]:
    if actor.comm is not None:
        return classes[actor.kind], int(actor.rate == 1), 0  # what pieces wait for goes before what steps wait for
    return classes[actor.kind], firing % actor.rate, actor.id


def order(plan: Plan, hardware: Hardware, policy: Policy = backward_first) -> Plan:
    """Freeze the order of every queue; raises DeadlockError if no order lets an iteration finish."""
    return freeze(plan, simulate(plan, 1, hardware, policy))


def freeze(plan: Plan, iteration: Timeline) -> Plan:
    """The plan whose queues fire as they did in this timeline of one iteration."""
    queues: dict[tuple[int, str], list[int]] = {}
    for span in iteration.spans:
        queues.setdefault((span.rank, span.queue), []).append(span.actor)
    orders = tuple(Order(rank, queue, tuple(queues[rank, queue])) for rank, queue in sorted(queues))
    return replace(plan, orders=orders)


def text(plan: Plan, queue: str = "compute") -> str:
    """The frozen orders of one queue of every rank, a line ``rank 0: 0F0 0F1 0B0`` for each."""
    lines = []
    for o in plan.orders:
        if o.queue == queue:
            fired = dict.fromkeys(o.actors, 0)
            words = []
            for actor in o.actors:
                words.append(short(plan.actor(actor), fired[actor]))
                fired[actor] += 1
            lines.append(f"rank {o.rank}: {' '.join(words)}")
    return "\n".join(lines)
