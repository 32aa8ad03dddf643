"""Find what is kept for the backward pass: copies of weights, and how much each device of a tensor axis holds whole."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.graph.flops import flops_of
from actorflow_compiler.graph.graph import Graph, InputKind, call_of
from actorflow_compiler.rewriting.model_parts import find_kept


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """What the forward pass keeps for the backward pass."""

    copies: float  # bytes of copies of weights, as autocast makes them: each micro-batch keeps its own
    whole: float  # of the other bytes, the share that each device of a tensor axis holds; 0 where there are none


def find_kept_bytes(graph: Graph) -> KeptBytes:
    """What is kept by a step on one device.

    The products of a model with its weights come in pairs, of which the first splits its result by columns, and the
    second adds up what it makes of these: what lies behind an even number of products is whole, such as the stream of
    residuals and what norms make of it.
    """
    products, weights = _products_before(graph)
    kept = find_kept(graph)
    others = {v: nbytes for v, nbytes in kept.items() if v not in weights}
    total = sum(others.values())
    whole = sum(nbytes for v, nbytes in others.items() if products.get(v, 0) % 2 == 0)
    return KeptBytes(sum(kept.values()) - total, whole / total if total else 0.0)


def _products_before(graph: Graph) -> tuple[dict[int, int], set[int]]:
    """Value of the forward pass → the products with weights on the longest way to it, if it depends on the batch.

    And the weights, with what is made of them alone.
    """
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
    return found, weights
