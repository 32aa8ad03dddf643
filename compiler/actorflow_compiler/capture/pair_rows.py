"""Rewrite ``x[arange(n), columns]`` as a ``gather`` along the rows, so that the rows may be split.

Such an index takes one element (or several) of every row.  Written as a ``gather``, each row is looked up with its own
columns.  Its gradient becomes a ``scatter_add`` in the same way.
"""

from __future__ import annotations

import math

from actorflow_compiler.capture.graph_rewriter import GraphRewriter
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.graph.graph import Graph, Node, prune, verify

SHAPES = frozenset({
    "aten.view.default", "aten.unsqueeze.default", "aten.expand.default", "aten.clone.default",
    "aten._to_copy.default",
})  # fmt: skip
PUTS = frozenset({"aten.index_put.default", "aten._unsafe_index_put.default"})
TAKES = frozenset({"aten.index.Tensor", "aten._unsafe_index.Tensor"})


def pair_rows(graph: Graph) -> Graph:
    """An equal graph with such indices rewritten; the same graph if it has none."""
    walk = _Walk(graph)
    found = walk.run()
    return verify(prune(found)) if walk.changed else graph


class _Walk(GraphRewriter):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.numbers: set[int] = set()  # values whose elements are their position along dim 0
        self.changed = False

    def run(self) -> Graph:
        for node in self.graph.nodes:
            n = self.reading_same(node)
            self.number(n)
            value = self.paired(n)
            if value is None:
                self.put(n)
            else:
                self.changed = True
                self.same[n.outs[0]] = value
        return self.rewritten()

    def number(self, n: Node) -> None:
        """Learn whether the elements of a node's output are their positions along dim 0."""
        counts = {"aten.arange.default": (), "aten.arange.start": (0,), "aten.arange.start_step": (0,)}
        if n.op in counts:
            first, step = counts[n.op], n.args[2:3]
            if n.args[: len(first)] == first and step in ((), (1,)):
                self.numbers.update(n.outs)
        elif n.op in SHAPES and isinstance(source := n.args[0], Ref) and source.index in self.numbers:
            before, after = self.metas[source.index].shape, self.metas[n.outs[0]].shape
            if after[:1] == before[:1]:
                self.numbers.update(n.outs)

    def paired(self, n: Node) -> int | None:
        """The value of a node's output as a lookup along the rows; None if the node has no such index."""
        if n.op not in TAKES | PUTS or len(n.args[1]) != 2 or None in n.args[1]:
            return None
        source, rows, places = (a.index for a in (n.args[0], *n.args[1]))
        x, at, counted = self.metas[source], self.metas[places], self.metas[rows].shape
        if rows not in self.numbers or at.dtype != "int64" or not x.shape[0] == at.shape[0] == counted[0]:
            return None
        if len(counted) != len(at.shape) or any(c not in (1, a) for c, a in zip(counted, at.shape, strict=True)):
            return None
        rest = x.shape[2:]
        index = self.along(n, places, x.shape[1], rest)
        whole = self.metas[index].shape
        if n.op in TAKES:
            taken = self.add(n, "aten.gather.default", (Ref(source), 1, Ref(index)), Meta(whole, x.dtype))
            return self.reshaped(n, taken, (*at.shape, *rest))
        given = n.args[2].index
        if self.metas[given].shape != (*at.shape, *rest):
            return None
        values = Ref(self.reshaped(n, given, whole))
        op = "aten.scatter_add.default" if len(n.args) > 3 and n.args[3] else "aten.scatter.src"
        return self.add(n, op, (Ref(source), 1, Ref(index), values), x)

    def along(self, n: Node, places: int, size: int, rest: tuple[int, ...]) -> int:
        """Column numbers as an index for ``gather``: negative ones made positive, expanded over the dims ``rest``."""
        meta = self.metas[places]
        below = self.add(n, "aten.lt.Scalar", (Ref(places), 0), Meta(meta.shape, "bool"))
        from_end = self.add(n, "aten.add.Scalar", (Ref(places), size), meta)
        index = self.add(n, "aten.where.self", (Ref(below), Ref(from_end), Ref(places)), meta)
        rows, each = meta.shape[0], math.prod(meta.shape[1:])
        index = self.reshaped(n, index, (rows, each, *(1 for _ in rest)))
        whole = (rows, each, *rest)
        return self.add(n, "aten.expand.default", (Ref(index), whole), Meta(whole, meta.dtype)) if rest else index

    def reshaped(self, n: Node, value: int, shape: tuple[int, ...]) -> int:
        """The same elements in another shape."""
        meta = self.metas[value]
        if meta.shape == shape:
            return value
        return self.add(n, "aten.view.default", (Ref(value), shape), Meta(shape, meta.dtype))
