"""Give plans without orders some legal orders and slot counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.iteration_graph import IterationOrder
from actorflow_scheduler.portfolio import Portfolio
from actorflow_scheduler.slots import SlotPlanner
from actorflow_scheduler.timeline import nanoseconds

DEEPEST_FIRST = ("optimizer", "sink", "boxing", "send", "weight", "backward", "forward", "source")


def with_slots(plan: Plan, slots: Mapping[int, int]) -> Plan:
    """The plan with these slot counts and without orders."""
    return replace(plan, registers=tuple(replace(r, slots=slots[r.id]) for r in plan.registers), orders=())


def ordered(plan: Plan, hardware: Hardware = CPU_CORE) -> Plan:
    """The plan with the order that its slot counts and the rule "backward first" give."""
    portfolio = Portfolio(plan, nanoseconds(plan, hardware))
    graph = portfolio.graph
    limits = [graph.credits(r, r.slots) for r in plan.registers]
    run = graph.run(portfolio.priorities, [(u, v) for credits in limits for u, v, distance in credits if not distance])
    assert run is not None
    return replace(plan, orders=run.orders)


def least(plan: Plan) -> dict[int, int]:
    """Slot counts with which the plan is live: those that one firing at a time takes, each piece as far as it gets."""
    graph = Portfolio(plan, nanoseconds(plan, CPU_CORE)).graph
    kinds = [DEEPEST_FIRST.index(plan.actor(members[0]).kind) for members in graph.members]
    keys = [kind * len(kinds) + n for kind, n in zip(kinds, graph.firing, strict=True)]
    missing = graph.missing.copy()
    ready = {node for node, count in enumerate(missing) if not count}
    nodes: list[int] = []
    while ready:
        node = min(ready, key=lambda n: (keys[n], n))
        ready.remove(node)
        nodes.append(node)
        for after in (*graph.feeds[node], *graph.fetch[node]):
            missing[after] -= 1
            if not missing[after]:
                ready.add(after)
    starts = [0] * len(nodes)
    for turn, node in enumerate(nodes):
        starts[node] = turn
    graph.durations = [1] * len(nodes)
    found = SlotPlanner(graph, solved=0).slots(
        IterationOrder((), tuple(nodes), tuple(starts)), len(nodes), len(SlotPlanner.LEVELS) - 1
    )
    return {r.id: found[r.id] for r in plan.registers}
