"""A graph with layouts goes in; the same comes out, with ops that have inner signatures written out in simpler ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

from actorflow_compiler.core.sbp import NdSbp
from actorflow_compiler.graph.graph import Graph, Node, call_of, verify
from actorflow_compiler.infer import Layouts
from actorflow_compiler.infer.inner_signatures import body_of
from actorflow_compiler.rewriting.expand import instantiate
from actorflow_compiler.signatures import Signature


def write_out(graph: Graph, layouts: Layouts) -> tuple[Graph, Layouts]:
    """Replace every op one of whose signatures is inner by its body; values keep their numbers.

    What such an op made may lie otherwise afterwards (as a sum of terms, say); boxing sees to it.
    """
    metas = dict(graph.metas)
    fresh = itertools.count(max(metas, default=0) + 1)
    value, placement = dict(layouts.value), dict(layouts.placement)
    nodes: list[Node] = []
    operands: list[tuple[NdSbp, ...]] = []
    chosen: list[tuple[Signature, ...]] = []
    for n, needs, signatures in zip(graph.nodes, layouts.operands, layouts.chosen, strict=True):
        if not any(s.inner for s in signatures):
            nodes.append(n)
            operands.append(needs)
            chosen.append(signatures)
            continue
        assert n.placement is not None
        call, reads = call_of(n, graph.metas)
        body = body_of(call, signatures, n.placement.hierarchy)
        number = {i.value: v for i, v in zip(body.graph.inputs, reads, strict=True)}
        number |= dict(zip(body.graph.results, (o for o in n.outs if o >= 0), strict=True))
        made = instantiate(body.graph, n, number, metas, fresh)
        for m, found in zip(made, body.chosen, strict=True):
            operands.append(tuple(zip(*(s.ins for s in found), strict=True)))
            for k, o in enumerate(m.outs):
                if o >= 0:
                    value[o] = tuple(layout for s in found if (layout := s.outs[k]) is not None)
                    placement[o] = n.placement
        nodes += made
        chosen += body.chosen
    out = replace(layouts, value=value, placement=placement, operands=operands, chosen=chosen)
    return verify(replace(graph, nodes=tuple(nodes), metas=metas)), out
