"""Find what backward passes compute again (checkpoints), and order it so that few regions of it are in memory.

What a checkpoint computes again needs no gradient.  Where it is an actor of its own, as beside collectives, a queue
that waits could run all of it already in the forward pass, and keep what checkpoints are there not to keep.  So a
region is computed again only when gradients have used the one before the last: one is used, one is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

from actorflow_compiler.plan.plan import ActorKind
from actorflow_scheduler.iteration_graph import Dependency, IterationGraph, IterationOrder

REGIONS = 2  # that are in memory at a time
Home = tuple[int, int]  # rank, stage


def recomputed_late(graph: IterationGraph, run: IterationOrder) -> tuple[Dependency, ...]:
    """Edges that delay what is computed again; ``run`` is any order of the graph.  Together they form no cycle.

    A region's consumers are the firings outside of it that read what it computes.  It waits only for consumers of an
    earlier region that come before its own first one in ``run``: these cannot depend on it.
    """
    return tuple(_Recomputation(graph, run).edges())


class _Recomputation:
    """What the backward passes of the first micro-batch compute again; those of others are alike."""

    def __init__(self, graph: IterationGraph, run: IterationOrder) -> None:
        self.graph = graph
        self.position = {node: i for i, node in enumerate(run.nodes)}
        self.nodes = [node for node in run.nodes if not graph.firing[node]]  # those of the first micro-batch
        self.home: dict[int, Home] = {}  # of what computes in a backward pass
        for node in self.nodes:
            actor = graph.plan.actor(graph.members[node][0])
            if actor.kind is ActorKind.BACKWARD and actor.comm is None:
                self.home[node] = (actor.rank, actor.stage)
        self.bit = {node: 1 << i for i, node in enumerate(self.home)}
        self.before: dict[int, int] = {}  # node → what it depends on of backward passes, as bits
        for node in self.nodes:
            found = 0
            for need in graph.needs[node]:
                if not graph.firing[need]:
                    found |= self.before[need] | self.bit.get(need, 0)
            self.before[node] = found

    def edges(self) -> Iterator[Dependency]:
        graph = self.graph
        homes: dict[Home, list[int]] = {}
        for node, home in self.home.items():
            homes.setdefault(home, []).append(node)
        for stage in dict.fromkeys(stage for _, stage in homes):
            alike = [here for (_, of), here in homes.items() if of == stage]  # of all ranks of the stage
            mine = sum(self.bit[node] for here in alike for node in here)
            gradients = self.begun(alike, mine)
            for here in alike:
                found = self.regions(here, mine, gradients)
                ordered = sorted((min(map(self.position.__getitem__, after)), roots, after) for roots, after in found)
                for (_, _, used), (first, roots, _) in zip(ordered, ordered[REGIONS:], strict=False):
                    for consumer in used:
                        rate = graph.plan.actor(graph.members[consumer][0]).rate
                        for root in roots if self.position[consumer] < first else ():
                            if graph.plan.actor(graph.members[root][0]).rate == rate:
                                yield from ((consumer + n, root + n) for n in range(rate))

    def begun(self, alike: list[list[int]], mine: int) -> int:
        """The firings of a stage's ranks with which their gradients begin, as bits; none if they come from others.

        Of those that depend on no other backward pass, it is the one on which most of its rank's depends.
        """
        if any(self.before[node] & ~mine for here in alike for node in here):
            return 0
        found = 0
        for here in alike:
            roots = [node for node in here if not self.before[node]]
            if roots:
                below = {root: sum(bool(self.before[node] & self.bit[root]) for node in here) for root in roots}
                found |= self.bit[max(roots, key=lambda root: (below[root], -self.position[root]))]
        return found

    def regions(self, here: list[int], mine: int, gradients: int) -> Iterator[tuple[list[int], list[int]]]:
        """For each region of a rank's backward pass, what it begins with, and its consumers."""
        again: dict[int, int] = {}  # what is computed again → the root of its region
        for node in here:
            if self.before[node] & ~mine or (self.before[node] | self.bit[node]) & gradients:
                continue
            own = {again[other] for other in again if self.before[node] & self.bit[other]}
            again[node] = min(own, key=self.position.__getitem__) if own else node
            for other, root in again.items():
                again[other] = again[node] if root in own else root
        members: dict[int, list[int]] = {}
        for node, root in again.items():
            members.setdefault(root, []).append(node)
        for region in members.values():
            bits = sum(self.bit[node] for node in region)
            consumers = [node for node in here if node not in again and self.before[node] & bits]
            if consumers:
                first = min(consumers, key=self.position.__getitem__)
                readers = [node for node in consumers if self.reads(node, bits)]
                yield [node for node in region if not self.before[node] & bits], readers or [first]

    def reads(self, node: int, bits: int) -> bool:
        """Whether a firing reads what firings with these bits compute, directly or as it comes out of a collective."""
        seen: set[int] = set()
        waiting = [need for need in self.graph.needs[node] if not self.graph.firing[need]]
        for need in waiting:
            if self.bit.get(need, 0) & bits:
                return True
            if self.graph.is_comm[need] and need not in seen:
                seen.add(need)
                waiting += [more for more in self.graph.needs[need] if not self.graph.firing[more]]
        return False
