"""Predicate the updates of variables on checks: where a check raises, variables keep their values of that point.

Optimizers with a flag that makes them do nothing (``found_inf``) are given the condition instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.core.ops import Arg, Meta, Phase, Ref, Symbol
from actorflow_compiler.custom_ops.optimizers import IN_PLACE, arguments
from actorflow_compiler.graph.graph import Graph, Node

__all__ = ["predicate_updates"]

FOUND_INF = "found_inf"  # operand of optimizers: where it is 1, they do nothing


def predicate_updates(graph: Graph, checks: Sequence[tuple[int, Mapping[str, int]]]) -> Graph:
    """Predicate all updates on ``checks``, in order: for each, whether it raises, and the values of variables there."""
    return _Predication(graph, checks).run() if checks else graph


class _Predication:
    def __init__(self, graph: Graph, checks: Sequence[tuple[int, Mapping[str, int]]]) -> None:
        self.graph = graph
        self.nodes = [*graph.nodes]
        self.metas = dict(graph.metas)
        self.names = {i.value: i.name for i in graph.inputs}
        self.checks = checks
        self.any: dict[tuple[int, ...], int] = {}  # conditions → the value that says whether one of them holds
        self.maker = {out: at for at, node in enumerate(graph.nodes) for out in node.outs if out >= 0}

    def run(self) -> Graph:
        """The predicated graph."""
        alternatives = {old: self.alternatives(old, new) for old, new in self.graph.updates}
        predicated = self.predicate_optimizers(alternatives)
        updates = []
        for old, new in self.graph.updates:
            way = alternatives[old]
            for conditions, stays in reversed(way[:-1] if old in predicated else way):
                where = Node("aten.where.self", (Ref(self.either(conditions)), Ref(stays), Ref(new)), (), ())
                new = self.add(where, self.metas[new])
            updates.append((old, new))
        self.in_order()
        return replace(self.graph, nodes=tuple(self.nodes), metas=self.metas, updates=tuple(updates))

    def alternatives(self, old: int, new: int) -> list[tuple[tuple[int, ...], int]]:
        """In program order: conditions under which a variable keeps an earlier value, and that value."""
        found: list[tuple[tuple[int, ...], int]] = []
        for raises, there in self.checks:
            stays = there.get(self.names[old], old)
            if stays == new:  # the variable does not change after this check, nor after later ones
                break
            if found and found[-1][1] == stays:
                found[-1] = (*found[-1][0], raises), stays
            else:
                found.append(((raises,), stays))
        return found

    def predicate_optimizers(self, alternatives: Mapping[int, list[tuple[tuple[int, ...], int]]]) -> set[int]:
        """Let ops of optimizers do nothing where a check raises; returns the variables that this predicates."""
        made: dict[int, list[tuple[int, int]]] = {}  # node → (variable, its new value)
        for old, new in self.graph.updates:
            if new in self.maker and self.nodes[self.maker[new]].op in IN_PLACE and alternatives[old]:
                made.setdefault(self.maker[new], []).append((old, new))
        predicated: set[int] = set()
        for at, updated in made.items():
            node = self.nodes[at]
            names = [name for name in arguments(node.op) if name != "group"]
            given: dict[str, Arg] = dict(zip(names, node.args, strict=True))
            before = dict(zip(node.outs, IN_PLACE[node.op][2], strict=False))
            last = {alternatives[old][-1] for old, _ in updated}
            conditions = {one for one, _ in last}
            kept = all(given[before[new]] == Ref(alternatives[old][-1][1]) for old, new in updated)
            if given[FOUND_INF] is not None or len(conditions) != 1 or not kept:
                continue
            args = {**given, FOUND_INF: Ref(self.number(conditions.pop()))}
            self.nodes[at] = replace(node, args=tuple(args.values()))
            predicated.update(old for old, _ in updated)
        return predicated

    def in_order(self) -> None:
        """Move the added nodes, which are at the end, before those that read them."""
        added = {out: node for node in self.nodes[len(self.graph.nodes) :] for out in node.outs}
        ordered: list[Node] = []

        def put(node: Node) -> None:
            for value in node.reads():
                if value in added:
                    put(added.pop(value))
            ordered.append(node)

        for node in self.nodes[: len(self.graph.nodes)]:
            put(node)
        self.nodes = [*ordered, *added.values()]

    def either(self, conditions: tuple[int, ...]) -> int:
        """The value that says whether one of some conditions holds."""
        if len(conditions) == 1:
            return conditions[0]
        if conditions not in self.any:
            rest = self.either(conditions[:-1])
            node = Node("aten.logical_or.default", (Ref(rest), Ref(conditions[-1])), (), ())
            self.any[conditions] = self.add(node, Meta((), "bool"))
        return self.any[conditions]

    def number(self, conditions: tuple[int, ...]) -> int:
        """The value that says whether one of some conditions holds, as a float32 number (1 or 0)."""
        dtype = (("dtype", Symbol("torch.float32")),)
        node = Node("aten._to_copy.default", (Ref(self.either(conditions)),), dtype, ())
        return self.add(node, Meta((), "float32"))

    def add(self, node: Node, meta: Meta) -> int:
        """Add a node; returns its value."""
        value = len(self.metas)
        assert value not in self.metas
        self.metas[value] = meta
        self.nodes.append(replace(node, outs=(value,), phase=Phase.OPTIMIZER))
        return value
