"""Find the shortest cycle in a graph of waits between ranks, actors or firings.

>>> shortest_cycle({0: [1], 1: [2], 2: [0, 1]})
[1, 2]
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from itertools import chain
from typing import TypeVar

__all__ = ["shortest_cycle"]

T = TypeVar("T", bound=Hashable)


def shortest_cycle(waits: Mapping[T, Collection[T]]) -> list[T]:
    """A shortest cycle, in which each node waits for the next and the last for the first; empty if there is none.

    ``waits`` maps each node to the nodes that it waits for.  Of several cycles with the same length, the result is one
    that contains the earliest key of ``waits``, and begins with that key.
    """
    import networkx as nx  # slow to import, and needed only if something may be stuck

    graph = nx.DiGraph([(one, other) for one, others in waits.items() for other in others])
    component = {node: number for number, nodes in enumerate(nx.strongly_connected_components(graph)) for node in nodes}
    graph.remove_edges_from([(u, v) for u, v in graph.edges if component[u] != component[v]])  # part of no cycle
    best: list[T] = []
    for start in waits:
        if start not in graph or not graph[start]:
            continue
        before = {start: start}  # node → its predecessor on a shortest path from the start
        most = len(best) - 2 if best else None  # edges of a path that closes a shorter cycle
        paths = () if most == 0 else nx.bfs_edges(graph, start, depth_limit=most)  # networkx 2 treats 0 like 1
        for one, other in chain([(start, start)], paths):
            before[other] = one
            if graph.has_edge(other, start):
                best = [other]
                while best[0] != start:
                    best.insert(0, before[best[0]])
                break
        if len(best) == 1:
            break
    return best
