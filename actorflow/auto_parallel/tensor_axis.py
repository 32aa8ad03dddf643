"""Find how much of what is kept for the backward pass each device of a tensor axis holds whole."""

from __future__ import annotations

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.graph.flops import flops_of
from actorflow_compiler.graph.graph import Graph, InputKind, call_of
from actorflow_compiler.rewriting.model_parts import find_kept


def whole_share(graph: Graph) -> float:
    """The share of the kept bytes that each device of a tensor axis holds; 0 where nothing is kept.

    The products of a model with its weights come in pairs, of which the first splits its result by columns, and the
    second adds up what it makes of these: what lies behind an even number of products is whole, such as the stream of
    residuals and what norms make of it.
    """
    kept = find_kept(graph)
    total = sum(kept.values())
    if not total:
        return 0.0
    products = _products_before(graph)
    return sum(nbytes for v, nbytes in kept.items() if products.get(v, 0) % 2 == 0) / total


def _products_before(graph: Graph) -> dict[int, int]:
    """Value of the forward pass → the products with weights on the longest way to it, if it depends on the batch."""
    weights = {i.value for i in graph.inputs if i.kind == InputKind.VARIABLE}
    found = {i.value: 0 for i in graph.inputs if i.kind == InputKind.BATCH}
    for n in graph.nodes:
        if n.phase != Phase.FORWARD:
            continue
        reads, outs = n.reads(), [v for v in n.outs if v >= 0]
        before = [found[v] for v in reads if v in found]
        if before:
            multiplied = not weights.isdisjoint(reads) and flops_of(call_of(n, graph.metas)[0]) > 0
            found.update(dict.fromkeys(outs, max(before) + multiplied))
        elif not weights.isdisjoint(reads):  # a weight, as the product reads it: cast, or turned
            weights.update(outs)
    return found
