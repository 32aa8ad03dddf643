"""Rewrite a graph node by node: ops are added beside a node, and values are replaced by equal ones."""

from __future__ import annotations

from dataclasses import replace

from actorflow_compiler.core.ops import Arg, Meta, Ref
from actorflow_compiler.graph.graph import Graph, Node

__all__ = ["GraphRewriter"]


class GraphRewriter:
    """The nodes of a new graph so far; base class of passes over a graph.

    A pass takes each node of ``graph`` in order through ``reading_same``, and puts it, or others in its place.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.metas: dict[int, Meta] = dict(graph.metas)
        self.next = max(self.metas, default=0) + 1  # the next free value
        self.nodes: list[Node] = []
        self.same: dict[int, int] = {}  # value → an equal one that takes its place

    def reading_same(self, n: Node) -> Node:
        """The node over the values that have taken the place of those that it reads."""
        return n.reading(lambda v: Ref(self.same.get(v, v)))

    def put(self, n: Node) -> Node:
        """Add a node to the new graph."""
        self.nodes.append(n)
        return n

    def add(self, like: Node, op: str, args: tuple[Arg, ...], meta: Meta, **kwargs: Arg) -> int:
        """Put one more op beside ``like``; returns its value."""
        value = self.next
        self.next += 1
        self.metas[value] = meta
        self.put(replace(like, op=op, args=args, kwargs=tuple(kwargs.items()), outs=(value,)))
        return value

    def rewritten(self) -> Graph:
        """The new graph."""
        results = tuple(self.same.get(r, r) for r in self.graph.results)
        updates = tuple((old, self.same.get(new, new)) for old, new in self.graph.updates)
        return replace(self.graph, nodes=tuple(self.nodes), metas=self.metas, results=results, updates=updates)
