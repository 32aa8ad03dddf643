"""Multiply the data-parallel replicas of a plan, for a forecast; only the ranks of the original plan are listed.

Ranks are replicas of each other if they hold the same parts of all variables.  The plan with n times as many replicas
consists of n copies of the plan, in which sums over replicas become sums over the replicas of all copies.  Each copy
has its own micro-batches, of the same size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.plan.plan import Actor, CollectiveKind, Comm, Plan, Send, Variable
from actorflow_scheduler.rank_classes import FoldedPlan


def replicated(plan: Plan, times: int) -> FoldedPlan:
    """The plan with ``times`` as many data-parallel replicas, for a forecast.

    Ranks with the same stages get consecutive numbers, followed by their copies.  Raises LayoutError if the plan has no
    replicas, or if replicas exchange parts of tensors, because the sizes of these would change.
    """
    parts = parts_of(plan)
    sets: dict[Hashable, int] = {}
    for part in parts.values():
        sets[part] = sets.get(part, 0) + 1
    if not plan.variables or min(sets.values()) < 2:
        alone = next((rank for rank in sorted(parts) if sets[parts[rank]] < 2), 0)
        raise LayoutError(
            f"plan {plan.name!r}: no other rank holds the same parts of all variables as rank {alone}, so there are no "
            "data-parallel replicas to multiply; expected at least two of each: plan for more devices, and without "
            "state split over replicas (flow.zero)"
        )
    numbers = _numbers(plan, times)

    def comm(actor: Actor, comm: Comm) -> Comm:
        mine = tuple(numbers[rank][0] for rank in comm.ranks)
        if isinstance(comm, Send):
            return replace(comm, from_rank=mine[0], to_rank=mine[1])
        if len({parts[rank] for rank in comm.ranks}) == len(comm.ranks):
            return replace(comm, ranks=mine)
        if comm.kind != CollectiveKind.ALL_REDUCE:
            raise LayoutError(
                f"plan {plan.name!r}: replicas {list(comm.ranks)} exchange parts of tensors in actor {actor.name} "
                f"({comm.kind}), whose sizes depend on their number; expected sums alone (all_reduce): plan for all "
                "devices instead"
            )
        return replace(comm, ranks=tuple(sorted(copy for rank in comm.ranks for copy in numbers[rank])))

    def variable(variable: Variable) -> Variable:
        place = variable.placement
        return replace(variable, placement=replace(place, ranks=tuple(numbers[rank][0] for rank in place.ranks)))

    copied = replace(
        plan,
        world=plan.world * times,
        actors=tuple(
            replace(a, rank=numbers[a.rank][0], comm=None if a.comm is None else comm(a, a.comm)) for a in plan.actors
        ),
        orders=tuple(replace(o, rank=numbers[o.rank][0]) for o in plan.orders),
        variables=tuple(variable(v) for v in plan.variables),
        ranks=tuple(sorted(numbers[rank][0] for rank in parts)),
        calls=(),  # this plan is never run
    )
    return FoldedPlan(copied, {numbers[rank][0]: numbers[rank] for rank in parts})


def parts_of(plan: Plan) -> dict[int, Hashable]:
    """Rank → which parts of the variables it holds, equal for replicas."""
    found: dict[int, list[Hashable]] = {rank: [] for rank in sorted({a.rank for a in plan.actors})}
    for v in plan.variables:
        for index, rank in enumerate(v.placement.ranks):
            inner, held = v.placement.size, []
            for entry, parts in zip(v.sbp, v.placement.hierarchy, strict=True):
                inner //= parts
                at, index = divmod(index, inner)
                held.append(at if isinstance(entry, Split) else None)
            if rank in found:
                found[rank].append((v.name, tuple(held)))
    return {rank: tuple(held) for rank, held in found.items()}


def _numbers(plan: Plan, times: int) -> Mapping[int, Sequence[int]]:
    """Rank → the numbers of its copies; the plan lists the first of them."""
    stages: dict[int, set[int]] = {}
    for a in plan.actors:
        if a.queue == "compute":
            stages.setdefault(a.rank, set()).add(a.stage)
    blocks: dict[Hashable, list[int]] = {}
    for rank in sorted({a.rank for a in plan.actors}):
        blocks.setdefault(frozenset(stages.get(rank, ())), []).append(rank)
    numbers: dict[int, Sequence[int]] = {}
    for block in blocks.values():
        first, size = len(numbers) * times, len(block)
        for i, rank in enumerate(block):
            numbers[rank] = range(first + i, first + i + size * times, size)
    return numbers
