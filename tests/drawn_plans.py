"""Hypothesis strategies for plans without slot counts and orders: pipelines, and graphs of sends and collectives."""

from __future__ import annotations

from hypothesis import strategies as st

from actorflow_compiler.plan.plan import Plan
from plans import Sketch, pipeline


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
