"""Random plans: after schedule() they are live, keep within their slots and fire every actor as often as asked."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow_compiler.plan import Plan, verify
from actorflow_scheduler import Hardware, schedule
from actorflow_scheduler.cluster import Cluster
from actorflow_scheduler.events import Fire, Instruction, Release
from actorflow_scheduler.timeline import simulate
from plans import Sketch, pipeline

ITERATIONS = 3


@st.composite
def pipelines(draw: st.DrawFn) -> Plan:
    stages = draw(st.integers(1, 4))
    replicas = draw(st.integers(1, 3))
    return pipeline(
        stages,
        pieces=draw(st.integers(1, 6)),
        replicas=replicas,
        weights=draw(st.booleans()),
        statistics=draw(st.lists(st.integers(0, stages - 1), unique=True)) if replicas > 1 else (),
        flops=draw(st.sampled_from((1.0, 1e6, 1e9))),
    )


@st.composite
def meshes(draw: st.DrawFn) -> Plan:
    """Random directed acyclic graphs over some ranks: sends, collectives of any groups, packs and unpacks."""
    ranks, pieces = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    s = Sketch(pieces)
    heads: dict[int, list[int]] = {}  # rank → actors to read from
    for rank in range(ranks):
        heads[rank] = [s.actor(f"batch{rank}", "source", rank, "source", rate=draw(st.sampled_from((1, pieces))))]

    def read(rank: int, reader: int) -> None:
        made = draw(st.sampled_from(heads[rank]))
        produced, consumed = s.actors[made].rate, s.actors[reader].rate
        tokens = min(produced, consumed)
        s.join(made, (reader, consumed // tokens), fill=produced // tokens)

    for n in range(draw(st.integers(1, 10))):
        what = draw(st.sampled_from(("compute", "compute", "send", "collective")))
        rank = draw(st.integers(0, ranks - 1))
        rate = draw(st.sampled_from((1, pieces)))
        kind = draw(st.sampled_from(("forward", "backward", "weight")))
        if what == "compute":
            actor = s.actor(f"x{n}", kind, rank, rate=rate, stage=rank, flops=draw(st.sampled_from((0.0, 1e6))))
            read(rank, actor)
            read(rank, actor)
            heads[rank].append(actor)
        elif what == "send":
            to = draw(st.sampled_from([r for r in range(ranks) if r != rank]))
            made = draw(st.sampled_from(heads[rank]))
            reader = s.actor(f"x{n}", kind, to, rate=s.actors[made].rate, stage=to)
            s.send(made, reader, to=to)
            heads[to].append(reader)
        else:
            group = draw(st.permutations(range(ranks)))[: draw(st.integers(2, ranks))]
            for r, member in zip(group, s.collective(group, f"c{n}", rate=rate), strict=True):
                read(r, member)
                heads[r].append(member)
    for rank in range(ranks):
        step = s.actor(f"O{rank}", "optimizer", rank)
        for made in heads[rank][1:]:
            s.join(made, step, fill=s.actors[made].rate)
        first = heads[rank][0]
        s.join(step, (first, s.actors[first].rate), initial=1, nbytes=0)
    return s.plan()


def run_in_any_order(plan: Plan, seed: int, parts: dict[int, Plan] | None = None) -> Counter[int]:
    """Fire a plan's actors for some iterations, finishing them in a random order; counts the firings.

    With ``parts`` every machine knows only its rank's.
    """
    cluster = Cluster(plan, parts=parts)
    chance = random.Random(seed)
    taken = {r.id: r.initial for r in plan.registers}
    fired: Counter[int] = Counter()
    running: list[Fire] = []

    def carry_out(instructions: list[Instruction]) -> None:
        for i in instructions:
            if isinstance(i, Fire):
                for register, _, _ in i.writes:
                    taken[register] += i.firing % plan.register(register).fill == 0
                    assert taken[register] <= plan.register(register).slots
                running.extend(cluster.meet(i))
            elif isinstance(i, Release):
                taken[i.register] -= 1

    for _ in range(ITERATIONS):
        carry_out(cluster.issue())
    while running:
        fire = running.pop(chance.randrange(len(running)))
        fired[fire.actor] += 1
        carry_out(cluster.finish(fire))
    assert cluster.idle()
    assert taken == {r.id: r.initial for r in plan.registers}
    return fired


def expected(plan: Plan) -> Counter[int]:
    return Counter({a.id: a.rate * ITERATIONS for a in plan.actors})


@settings(max_examples=25, deadline=None)
@given(pipelines(), st.integers(0, 1000))
def test_random_pipelines_run_to_the_end_whatever_finishes_first(plan: Plan, seed: int) -> None:
    plan = schedule(plan)
    assert run_in_any_order(plan, seed) == expected(plan)


@settings(max_examples=60, deadline=None)
@given(meshes(), st.integers(0, 1000))
def test_random_graphs_with_random_collectives_run_to_the_end_whatever_finishes_first(plan: Plan, seed: int) -> None:
    plan = schedule(verify(plan))
    assert run_in_any_order(plan, seed) == expected(plan)


@settings(max_examples=25, deadline=None)
@given(meshes())
def test_the_timeline_keeps_within_slots_and_fires_everything(plan: Plan) -> None:
    plan = schedule(plan)
    timeline = simulate(plan, ITERATIONS, Hardware())
    assert Counter(span.actor for span in timeline.spans) == expected(plan)
    assert all(timeline.peak_slots[r.id] <= r.slots for r in plan.registers)
    assert all(0 <= share <= 1 for share in timeline.busy.values())


@settings(max_examples=15, deadline=None)
@given(pipelines(), st.integers(0, 1000))
def test_the_parts_of_a_plan_drive_their_ranks_as_the_whole_does(plan: Plan, seed: int) -> None:
    plan = schedule(plan)
    parts = {rank: plan.for_rank(rank) for rank in range(plan.world)}
    assert run_in_any_order(plan, seed, parts) == expected(plan)
