"""Compute parts of the forward pass again in the backward pass, as checkpoints in the model would.

The ops of such a part are repeated just before the first op of the backward pass that reads what they make.  Random
numbers are functions of a counter, hence the same when drawn again; running statistics do not move on a second time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from actorflow_compiler.core.ops import Meta, Phase
from actorflow_compiler.graph.graph import Graph, Node, prune, verify, with_other_reads
from actorflow_compiler.hints.packing import MARKERS
from actorflow_compiler.rewriting.model_parts import DividedModel
from actorflow_compiler.substitutes.random_table import is_random

WITH_STATISTICS = "aten._native_batch_norm_legit_functional.default"  # the last two outputs are the new statistics
TRAINING = 5  # of the arguments


def compute_again(graph: Graph, parts: DividedModel, chosen: Collection[int]) -> Graph:
    """The graph in which the backward pass computes the ``chosen`` parts (by number) again, where it reads them."""
    if not chosen:
        return graph
    return verify(prune(_Again(graph, parts, frozenset(chosen)).run()))


class _Again:
    def __init__(self, graph: Graph, parts: DividedModel, chosen: frozenset[int]) -> None:
        self.graph, self.chosen = graph, chosen
        self.part = [parts.part_of(n) for n in graph.nodes]
        trained = {o for n in graph.nodes if n.phase == Phase.OPTIMIZER for o in n.outs}
        self.moving = {old for old, new in graph.updates if new not in trained}  # before the backward pass has ended
        self.maker: dict[int, int] = {}  # value → the node that makes it, if that may be repeated
        for k, n in enumerate(graph.nodes):
            if self.part[k] in chosen and self.may_repeat(n):
                self.maker.update({o: k for o in n.outs if o >= 0})
        self.kept: set[int] = set()  # values that are kept in any case
        self.again = self.wanted()
        self.metas: dict[int, Meta] = dict(graph.metas)
        self.next = 1 + max(self.metas, default=-1)
        self.new: dict[int, int] = {}  # value → its number where it is computed again
        self.nodes: list[Node] = []

    def may_repeat(self, n: Node) -> bool:
        """Whether a node may be repeated: a forward op that draws no numbers from elsewhere and updates nothing."""
        if n.phase != Phase.FORWARD or n.op in MARKERS or is_random(n):
            return False
        return self.moving.isdisjoint(n.reads()) or _is_batch_norm(n)

    def wanted(self) -> list[int]:
        """The nodes that are repeated, in order; it fills ``kept``, too."""
        readers = [k for k, n in enumerate(self.graph.nodes) if n.phase != Phase.FORWARD]
        here: dict[int, set[int]] = {}  # part → values of it that its backward pass reads
        for k in readers:
            for v in self.graph.nodes[k].reads():
                maker = self.maker.get(v)
                if maker is None:
                    continue
                if self.reads_again(k, v):
                    here.setdefault(self.part[maker] or 0, set()).add(v)
                else:
                    self.kept.add(v)
        found: list[int] = []
        for part in sorted(self.chosen, reverse=True):  # those before it keep what it reads
            waiting = list(here.get(part, ()))
            repeated: set[int] = set()
            while waiting:
                v = waiting.pop()
                maker = self.maker.get(v)
                if v in self.kept or maker is None or maker in repeated:
                    continue
                if self.part[maker] != part:
                    self.kept.add(v)
                    continue
                repeated.add(maker)
                waiting += self.graph.nodes[maker].reads()
            found += repeated
        return sorted(found)

    def reads_again(self, reader: int, value: int) -> bool:
        """Whether a node of the backward pass reads a value as its own part computes it again."""
        maker = self.maker[value]
        n = self.graph.nodes[reader]
        return n.phase == Phase.BACKWARD and self.part[reader] == self.part[maker]

    def run(self) -> Graph:
        """The graph with the repeated nodes."""
        waiting = {part: [k for k in self.again if self.part[k] == part] for part in self.chosen}
        again = {o for k in self.again for o in self.graph.nodes[k].outs if o >= 0} - self.kept
        for k, n in enumerate(self.graph.nodes):
            part = self.part[k]
            reads = {v for v in n.reads() if v in again and self.reads_again(k, v)} if n.phase != Phase.FORWARD else ()
            if reads:
                due = [m for m in waiting[part or 0] if m < k]
                waiting[part or 0] = [m for m in waiting[part or 0] if m >= k]
                self.repeat(due)
                n = with_other_reads(n, {v: self.new[v] for v in reads})
            self.nodes.append(n)
        return replace(self.graph, nodes=tuple(self.nodes), metas=self.metas)

    def repeat(self, due: Collection[int]) -> None:
        for k in due:
            n = self.graph.nodes[k]
            n = with_other_reads(n, {v: self.new[v] for v in n.reads() if v in self.new and v not in self.kept})
            outs = tuple(o if o < 0 else self.number(o) for o in n.outs)
            self.nodes.append(replace(n, outs=outs, phase=Phase.BACKWARD, again=True))

    def number(self, value: int) -> int:
        """A new number for a value that is computed again."""
        self.new[value] = number = self.next
        self.metas[number] = self.metas[value]
        self.next += 1
        return number


def _is_batch_norm(n: Node) -> bool:
    """Whether a node is a batch norm in training, of which all but the last two results ignore running statistics."""
    return n.op == WITH_STATISTICS and n.args[TRAINING] is True
