"""A captured graph, some of whose ops carry a placement, goes in; one where every op has its placement comes out.

Untagged forward ops go where the latest of their inputs are, gradient accumulations to the earliest,
optimizer ops to the owner of their parameter.  Ops that depend on no state and on nothing placed
(masks, positions) are repeated wherever they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.errors import LayoutError
from actorflow_compiler.graph import Graph, Node, verify
from actorflow_compiler.ops import Meta, Ref, substitute
from actorflow_compiler.placement import Placement


@dataclass(frozen=True, slots=True)
class Placed:
    """A graph whose every op has a placement."""

    graph: Graph
    stages: tuple[Placement, ...]  # distinct placements in forward order
    owners: Mapping[str, Placement]  # of variables


def place_ops(
    graph: Graph, everywhere: Placement, fixed: Mapping[str, Placement], parameter: Mapping[str, str]
) -> Placed:
    """Give every node and variable a placement.

    ``everywhere`` is that of all devices.  ``fixed`` holds the variables that an earlier plan has
    placed; ``parameter`` maps optimizer state to the parameter whose placement it shares.

    Raises LayoutError for a placement with ranks that the run does not have.
    """
    world = everywhere.size
    tagged = {n.placement for n in graph.nodes if n.placement is not None}
    for placement in tagged | set(fixed.values()):
        if max(placement.ranks) >= world:
            raise LayoutError(
                f"placement {placement} names rank {max(placement.ranks)}, "
                f"but this run has {world} device{'s' * (world > 1)} (ranks 0 to {world - 1}); "
                f"start more devices (--devices) or use fewer ranks"
            )
    chosen = _Chooser(graph, everywhere, fixed, parameter)
    nodes, metas = _repeat_free(graph, chosen.placement, everywhere)
    first: dict[Placement, None] = {}
    for n in nodes:
        if n.phase == "forward" and n.placement is not None:
            first.setdefault(n.placement)
    for n in nodes:
        first.setdefault(n.placement or everywhere)
    result = replace(graph, nodes=nodes, metas=metas)
    return Placed(verify(result), tuple(first), chosen.owner)


class _Chooser:
    """One forward walk that decides where each node goes; None means that it is free."""

    def __init__(
        self, graph: Graph, everywhere: Placement, fixed: Mapping[str, Placement], parameter: Mapping[str, str]
    ) -> None:
        self.graph = graph
        self.order: dict[Placement, int] = {}
        self.placement: list[Placement | None] = []
        self.at: dict[int, Placement | None] = {}  # value → placement
        self.owner: dict[str, Placement] = dict(fixed)
        self.everywhere = everywhere
        self.variables = {i.value: i.name for i in graph.inputs if i.kind == "variable"}
        self.updated = {new: self.variables[old] for old, new in graph.updates}
        for n in graph.nodes:
            if n.placement is not None and n.phase == "forward":
                self.order.setdefault(n.placement, len(self.order))
        self.parameter = parameter
        self.reach: dict[int, set[str]] = {
            v: {name} for v, name in self.variables.items()
        }  # value → variables that it is made of alone
        self._owners_of_parameters()
        for n in graph.nodes:
            p = self._of(n)
            self.placement.append(p)
            self.at.update((o, p) for o in n.outs)
            names = set().union(*(self.reach.get(v, set()) for v in n.reads()))
            if p is None:
                for o in n.outs:
                    self.reach[o] = names
            elif n.phase != "optimizer":
                for name in names:
                    self.owner.setdefault(name, p)
        for name in self.variables.values():
            self._owner_of(name)

    def _owners_of_parameters(self) -> None:
        """A variable belongs where its first tagged forward reader is, seen through views."""
        reach: dict[int, set[str]] = {v: {name} for v, name in self.variables.items()}
        for n in self.graph.nodes:
            names = set().union(*(reach.get(v, set()) for v in n.reads()))
            if not names or n.phase != "forward":
                continue
            if n.placement is None:
                for o in n.outs:
                    reach.setdefault(o, set()).update(names)
            else:
                for name in names:
                    self.owner.setdefault(name, n.placement)

    def _owner_of(self, name: str) -> Placement:
        """Where a variable lives, now that it must be known; optimizer state lives with its parameter."""
        if name not in self.owner:
            self.owner[name] = self._owner_of(self.parameter[name]) if name in self.parameter else self.everywhere
        return self.owner[name]

    def _of(self, n: Node) -> Placement | None:
        if n.placement is not None:
            return n.placement
        if n.phase == "optimizer":
            owned = [self._owner_of(self.updated[o]) for o in n.outs if o in self.updated]
            owned += [self._owner_of(self.variables[v]) for v in n.reads() if v in self.variables]
            if owned:
                return owned[0]
        inputs = [p for v in n.reads() if (p := self.at.get(v)) is not None]
        inputs = inputs or [self.owner[name] for v in n.reads() for name in self.reach.get(v, ()) if name in self.owner]
        if not inputs:
            return None
        pick = max if n.phase == "forward" else min
        return pick(inputs, key=lambda p: self.order.setdefault(p, len(self.order)))


def _repeat_free(
    graph: Graph, placement: list[Placement | None], everywhere: Placement
) -> tuple[tuple[Node, ...], dict[int, Meta]]:
    """Copy every free node to each placement that reads it."""
    wanted: dict[int, dict[Placement, None]] = {}
    for value in graph.roots():
        wanted.setdefault(value, {})
    plans: list[tuple[Node, list[Placement]]] = []
    for n, p in zip(reversed(graph.nodes), reversed(placement), strict=True):
        places = (
            [p] if p is not None else list(dict.fromkeys(q for o in n.outs for q in wanted.get(o, {}))) or [everywhere]
        )
        plans.append((n, places))
        for v in n.reads():
            wanted.setdefault(v, {}).update(dict.fromkeys(places))
    fresh = max(graph.metas, default=0) + 1
    copies: dict[tuple[int, Placement], int] = {}
    nodes: list[Node] = []
    for n, places in reversed(plans):
        for i, p in enumerate(places):
            outs = list(n.outs)
            if i:
                outs = [o if o < 0 else fresh + k for k, o in enumerate(n.outs)]
                fresh += len(outs)
                copies.update({(o, p): c for o, c in zip(n.outs, outs, strict=True)})

            def here(v: int, p: Placement = p) -> Ref:
                return Ref(copies.get((v, p), v))

            kwargs = tuple((k, substitute(v, here)) for k, v in n.kwargs)
            nodes.append(replace(n, args=substitute(n.args, here), kwargs=kwargs, outs=tuple(outs), placement=p))
    return tuple(nodes), {**graph.metas, **{c: graph.metas[o] for (o, _), c in copies.items()}}
