"""Prove that a scheduled plan never deadlocks, and that it stays within memory caps.

One run of the actor machines proves it for all runs: each register has one producer and queues have frozen orders, so
which actors can fire does not depend on which of two firings ends first.  If an iteration leaves as many tokens in each
register as it found, all later iterations run in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Actor, Collective, Plan
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler.cost import Durations, max_workspace_bytes
from actorflow_scheduler.rank_classes import fold
from actorflow_scheduler.simulated_cluster import SimulatedCluster
from actorflow_scheduler.timeline import simulate

WHAT_TO_DO = "use more ranks, or micro-batches of fewer samples"
ITERATIONS = 2  # the second one starts with the tokens that the first one left


def prove(plan: Plan, memory: Mapping[int, int] | None = None, hardware: Hardware = CPU_CORE) -> Plan:
    """Return the plan if it is consistent, cannot deadlock, and stays within the memory caps.

    Of ranks that do the same work one is run, for all of them.  A collective runs when all of its members have fired,
    as if it were a rendezvous.  ``memory`` (rank → bytes) caps, for some ranks, the peak bytes of live registers on
    this hardware plus the largest workspace.  Raises DeadlockError, whose message shows the cycle actor by actor, or
    PlanError.
    """
    prove_groups(verify(plan))
    _prove_live(fold(plan, Durations(dict.fromkeys((a.id for a in plan.actors), 0), {})).plan)
    if memory:
        _prove_memory(plan, memory, hardware)
    return plan


def prove_folded(folded: FoldedPlan, memory: Mapping[int, int], hardware: Hardware = CPU_CORE) -> FoldedPlan:
    """As ``prove``, of one rank of each class: what it does, all ranks of its class do at the same time.

    ``memory`` (listed rank → bytes) caps the peak bytes of live registers alone.
    """
    plan = verify(folded.plan)
    _prove_live(plan)
    peak = simulate(folded.on_planes, ITERATIONS, hardware).peak_bytes if memory else {}
    for rank, cap in memory.items():
        if peak[rank] > cap:
            raise PlanError(f"plan {plan.name!r}: {too_much(plan, rank, peak[rank], cap)}; {WHAT_TO_DO}")
    return folded


def prove_groups(plan: Plan) -> Plan:
    """Check that each collective has one actor on each rank of its group, and that these actors agree.

    Also check that on each rank all collectives of a group are on one queue.  Returns the plan; raises PlanError.
    """
    members: dict[int, list[Actor]] = {}
    queues: dict[tuple[int, int], Actor] = {}  # rank and number of a group → the first of its collectives
    group = _Numbers()
    for actor in plan.actors:
        if not isinstance(actor.comm, Collective):
            continue
        members.setdefault(actor.comm.id, []).append(actor)
        other = queues.setdefault((actor.rank, group.of(actor.comm.ranks)), actor)
        if other.queue != actor.queue:
            raise PlanError(
                f"plan {plan.name!r}: rank {actor.rank}: collectives {other.name} and {actor.name} of ranks "
                f"{actor.comm.ranks} are on queues {other.queue} and {actor.queue}; expected one queue, or their "
                "order is not fixed"
            )
    for id, actors in members.items():
        first = actors[0]
        assert isinstance(first.comm, Collective)
        where = f"plan {plan.name!r}: {first.comm.label} {id} ({first.name})"
        if sorted(a.rank for a in actors) != sorted(first.comm.ranks):
            raise PlanError(
                f"{where}: actors on ranks {[a.rank for a in actors]} were found, "
                f"expected one on each of {first.comm.ranks}"
            )
        part = _part(first)
        for a in actors:
            if _part(a) != part:
                raise PlanError(
                    f"{where}: its members disagree: {_text(first)} on rank {first.rank}, {_text(a)} on rank {a.rank}"
                )
    return plan


class _Numbers:
    """A number for each group of ranks; the ranks of one that many actors share are hashed once."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[int, int] = {}  # id of a group, which the plan keeps alive → its number

    def of(self, group: tuple[int, ...]) -> int:
        if id(group) not in self._known:
            self._known[id(group)] = self.numbers.setdefault(group, len(self.numbers))
        return self._known[id(group)]


def _part(member: Actor) -> tuple[object, ...]:
    """The properties that all members of a collective must share."""
    assert member.comm is not None
    return member.comm.label, member.comm.ranks, len(member.operands), member.rate


def _text(member: Actor) -> str:
    label, ranks, tensors, rate = _part(member)
    return f"{label} over {ranks} of {tensors} tensors at rate {rate}"


def _prove_live(plan: Plan) -> None:
    """Run the plan's machines, which get stuck if, for example, ranks order their shared collectives differently."""
    cluster = SimulatedCluster(plan)
    before = cluster.tokens()
    if not cluster.run(ITERATIONS):
        raise cluster.deadlock()
    after = cluster.tokens()
    for (rank, register), tokens in before.items():
        if after[rank, register] != tokens:
            raise PlanError(
                f"plan {plan.name!r}: register {register} on rank {rank} held {tokens[0]} tokens before an iteration "
                f"and {after[rank, register][0]} after {ITERATIONS}; expected the same: its rates do not balance"
            )


def _prove_memory(plan: Plan, memory: Mapping[int, int], hardware: Hardware) -> None:
    peak, firing = simulate(plan, ITERATIONS, hardware).peak_bytes, max_workspace_bytes(plan)
    for rank, cap in memory.items():
        if peak.get(rank, 0) + firing.get(rank, 0) > cap:
            raise PlanError(f"plan {plan.name!r}: {too_much(plan, rank, peak[rank], cap)}; {WHAT_TO_DO}")


def too_much(plan: Plan, rank: int, held: int, cap: int) -> str:
    """The error text for a rank whose registers need ``held`` bytes, if ``cap`` bytes are allowed."""
    mine = (r for r in plan.registers if plan.home(r) == rank)
    largest = max(mine, key=lambda r: r.nbytes * r.slots)
    firing = max((a for a in plan.actors if a.rank == rank), key=lambda a: a.workspace)
    moment = f", and {firing.name} {firing.workspace} more while it fires" if firing.workspace else ""
    return (
        f"rank {rank} needs {held} bytes for its registers{moment}, {cap} are allowed; the largest is register "
        f"{largest.id} of {plan.actor(largest.producer).name}, {largest.slots} slots of {largest.nbytes} bytes"
    )
