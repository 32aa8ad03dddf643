"""Give every op a placement and a virtual pipeline stage, where only some ops of the graph carry a placement.

Untagged forward ops go where the latest of their inputs are, gradient accumulations to the earliest,
optimizer ops to the owner of their parameter.  Ops that depend on no state and on nothing placed
(masks, positions) are repeated wherever they are used.  A parameter with a home is owned there, and
does not attract ops of the forward or backward pass.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.ops import Meta, Phase, Ref
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.graph.graph import Graph, InputKind, Node, verify
from actorflow_compiler.hints.hints import ResolvedHints


@dataclass(frozen=True, slots=True)
class StagedGraph:
    """A graph whose every op has a placement and a stage."""

    graph: Graph
    stages: tuple[Placement, ...]  # of each virtual stage; several may have the same
    owners: Mapping[str, Placement]  # of variables


def place_ops(
    graph: Graph,
    everywhere: Placement,
    fixed: Mapping[str, Placement],
    parameter: Mapping[str, str],
    begins: Sequence[int] = (),
    homes: Mapping[str, Placement] | None = None,
    world: int = 0,
) -> StagedGraph:
    """Give every node and variable a placement, and every node its virtual stage.

    A stage is a longest run of forward ops, in program order, that carry the same placement; ops without one
    do not end it.  So neighbouring modules on one placement are one stage, and a program that comes back to a
    placement opens a new stage there, because the ops in between have to run first.  Stages are the depth of the
    pipeline, not a number of devices: modules that alternate between two placements n times make 2n stages, as many as
    a sample passes through.  ``begins`` are visits that open a stage in any case.

    ``everywhere`` is the placement of ops without a hint.  ``fixed`` holds the variables that an earlier plan has
    placed; ``parameter`` maps optimizer state to the parameter whose placement it shares.  ``homes`` are those of
    parameters that do not live with their ops, ``world`` is the number of devices, if not all are ``everywhere``.

    Raises LayoutError for a placement with ranks that the run does not have.
    """
    world, homes = world or everywhere.size, homes or {}
    tagged = {n.placement for n in graph.nodes if n.placement is not None}
    for placement in tagged | {*fixed.values(), *homes.values()}:
        if max(placement.ranks) >= world:
            raise LayoutError(
                f"placement {placement} names rank {max(placement.ranks)}, "
                f"but this run has {world} device{'s' * (world > 1)} (ranks 0 to {world - 1}); "
                f"start more devices (--devices) or use fewer ranks"
            )
    chosen = _StageChooser(graph, everywhere, fixed, parameter, _TaggedStages(graph, begins), homes)
    graph = _repeat_free(graph, chosen.stage, chosen.stage_on(everywhere))
    graph, stages = _with_placements(graph, chosen.stages)
    return StagedGraph(verify(graph), stages, chosen.owner)


def computing(world: int, homes: Mapping[str, Placement], graph: Graph, hints: ResolvedHints) -> tuple[int, ...]:
    """The ranks of ops without a placement: all except those that are only homes; all ranks, if none is left."""
    kept = {rank for home in homes.values() for rank in home.ranks}
    named = hints.placements | {n.placement for n in graph.nodes if n.placement is not None}
    kept -= {rank for placement in named for rank in placement.ranks}
    return tuple(rank for rank in range(world) if rank not in kept) or tuple(range(world))


class _TaggedStages:
    """The stages formed by the tagged forward ops, in program order."""

    def __init__(self, graph: Graph, begins: Sequence[int]) -> None:
        opened = sorted(begins)
        self.first: list[int] = []  # the visit that each stage begins with
        self.placements: list[Placement] = []
        tagged = [(n.visit, n.placement) for n in graph.nodes if n.phase == Phase.FORWARD and n.placement is not None]
        for visit, placement in sorted(tagged, key=lambda t: t[0]):
            new = not self.first or bisect.bisect(opened, visit) != bisect.bisect(opened, self.first[-1])
            if new or placement != self.placements[-1]:
                self.first.append(visit)
                self.placements.append(placement)

    def stage(self, n: Node) -> int | None:
        """The stage of a node; None where it carries no placement, or one that no forward op carries.

        A backward op belongs to the stage of its visit, or to the nearest one before on its placement.
        """
        at = bisect.bisect(self.first, n.visit) - 1
        if n.placement is None:
            return None
        before = (k for k in range(at, -1, -1) if self.placements[k] == n.placement)
        after = (k for k in range(at + 1, len(self.first)) if self.placements[k] == n.placement)
        return next(before, next(after, None))


class _StageChooser:
    """Decides the stage of each node in one forward walk; None for nodes that may run anywhere."""

    def __init__(
        self,
        graph: Graph,
        everywhere: Placement,
        fixed: Mapping[str, Placement],
        parameter: Mapping[str, str],
        runs: _TaggedStages,
        homes: Mapping[str, Placement],
    ) -> None:
        self.graph = graph
        self.runs = runs
        self.stages = list(runs.placements)
        self.stage: list[int | None] = []
        self.at: dict[int, int | None] = {}  # value → stage
        self.owner: dict[str, Placement] = {**fixed, **homes}
        self.homes = homes
        self.at_home: set[int] = set()  # values that the optimizer computes at a parameter's home
        self.first: dict[str, int] = {}  # variable → stage of its first tagged forward reader
        self.everywhere = everywhere
        self.variables = {i.value: i.name for i in graph.inputs if i.kind == InputKind.VARIABLE}
        self.updated = {new: self.variables[old] for old, new in graph.updates}
        self.parameter = parameter
        self.for_homes = self._gradients_for_homes() if homes else {}
        self.reach: dict[int, set[str]] = {
            v: {name} for v, name in self.variables.items()
        }  # value → variables, if it depends on nothing else
        self._owners_of_parameters()
        for n in graph.nodes:
            stage = self._stage_of(n)
            self.stage.append(stage)
            self.at.update((o, stage) for o in n.outs)
            if n.phase == Phase.OPTIMIZER and self._stage_at_home(n) is not None:
                self.at_home.update(n.outs)
            names = set().union(*(self.reach.get(v, set()) for v in n.reads()))
            if stage is None:
                for o in n.outs:
                    self.reach[o] = names
            elif n.phase != Phase.OPTIMIZER:
                for name in names:
                    self.owner.setdefault(name, self.stages[stage])
                    self.first.setdefault(name, stage)
        for name in self.variables.values():
            self._owner_of(name)

    def stage_on(self, placement: Placement) -> int:
        """The first stage on a placement; a new one, after all others, where there is none."""
        if placement not in self.stages:
            self.stages.append(placement)
        return self.stages.index(placement)

    def _owners_of_parameters(self) -> None:
        """A variable belongs where its first tagged forward reader is, seen through views."""
        reach: dict[int, set[str]] = {v: {name} for v, name in self.variables.items()}
        for n in self.graph.nodes:
            names = set().union(*(reach.get(v, set()) for v in n.reads()))
            if not names or n.phase != Phase.FORWARD:
                continue
            stage = self.runs.stage(n)
            if stage is None:
                for o in n.outs:
                    reach.setdefault(o, set()).update(names)
            else:
                for name in names:
                    self.owner.setdefault(name, self.stages[stage])
                    self.first.setdefault(name, stage)

    def _owner_of(self, name: str) -> Placement:
        """Where a variable lives, decided now if it was not before; optimizer state lives with its parameter."""
        if name not in self.owner:
            self.owner[name] = self._owner_of(self.parameter[name]) if name in self.parameter else self.everywhere
        return self.owner[name]

    def _home_stage(self, name: str) -> int:
        """The stage that a variable belongs to; it is on the variable's placement."""
        owner = self._owner_of(name)
        first = self.first.get(self.parameter.get(name, name))
        return first if first is not None and self.stages[first] == owner else self.stage_on(owner)

    def _stage_of_use(self, name: str) -> int:
        """The stage of an untagged op whose only placed operand is a variable."""
        if name not in self.homes:
            return self._home_stage(name)
        return self.first[name] if name in self.first else self.stage_on(self.everywhere)

    def _gradients_for_homes(self) -> dict[int, str]:
        """Gradients that go to the home of a variable: value that the optimizer reads beside it → the variable."""
        found: dict[int, str] = {}
        for n in self.graph.nodes:
            if n.phase == Phase.OPTIMIZER:
                names = [self.variables[v] for v in n.reads() if v in self.variables]
                name = next((x for x in names if self.parameter.get(x, x) in self.homes), None)
                found.update({v: name for v in n.reads() if name is not None and v not in self.variables})
        return found

    def _stage_at_home(self, n: Node) -> int | None:
        """The stage of an op of the optimizer that works where a parameter's home is; None for all others.

        Such an op reads a variable of that home, a value computed from one there, or only gradients that go there.
        """
        reads = list(n.reads())
        names = [self.variables[v] for v in reads if v in self.variables]
        names = [x for x in names if self.parameter.get(x, x) in self.homes]
        if not names and reads and all(v in self.for_homes for v in reads):
            names = [self.for_homes[v] for v in reads]
        stages = [self._home_stage(x) for x in names] + [
            s for v in reads if v in self.at_home and (s := self.at[v]) is not None
        ]
        return stages[0] if stages else None

    def _stage_of(self, n: Node) -> int | None:
        if n.placement is not None:
            stage = self.runs.stage(n)
            return self.stage_on(n.placement) if stage is None else stage
        if n.phase == Phase.OPTIMIZER:
            owned = [self._home_stage(self.updated[o]) for o in n.outs if o in self.updated]
            owned += [self._home_stage(self.variables[v]) for v in n.reads() if v in self.variables]
            if owned:
                return owned[0]
            if (home := self._stage_at_home(n)) is not None:
                return home
        inputs = [s for v in n.reads() if (s := self.at.get(v)) is not None]
        names = [name for v in n.reads() for name in self.reach.get(v, ()) if name in self.owner]
        inputs = inputs or [self._stage_of_use(name) for name in names]
        if not inputs:
            return None
        return max(inputs) if n.phase == Phase.FORWARD else min(inputs)


def _repeat_free(graph: Graph, stage: list[int | None], nowhere: int) -> Graph:
    """Copy every free node to each stage that reads it, or to the stage ``nowhere`` if none does."""
    wanted: dict[int, dict[int, None]] = {}
    for value in graph.roots():
        wanted.setdefault(value, {})
    plans: list[tuple[Node, list[int]]] = []
    for n, s in zip(reversed(graph.nodes), reversed(stage), strict=True):
        readers = dict.fromkeys(q for o in n.outs for q in wanted.get(o, {}))
        places = [s] if s is not None else list(readers) or [nowhere]
        plans.append((n, places))
        for v in n.reads():
            wanted.setdefault(v, {}).update(dict.fromkeys(places))
    fresh = max(graph.metas, default=0) + 1
    copies: dict[tuple[int, int], int] = {}
    nodes: list[Node] = []
    metas: dict[int, Meta] = dict(graph.metas)
    for n, places in reversed(plans):
        for i, s in enumerate(places):
            outs = list(n.outs)
            if i:
                outs = [o if o < 0 else fresh + k for k, o in enumerate(n.outs)]
                fresh += len(outs)
                copies.update({(o, s): c for o, c in zip(n.outs, outs, strict=True)})
                metas.update({c: graph.metas[o] for o, c in zip(n.outs, outs, strict=True) if o >= 0})

            def here(v: int, s: int = s) -> Ref:
                return Ref(copies.get((v, s), v))

            nodes.append(replace(n.reading(here), outs=tuple(outs), stage=s))
    return replace(graph, nodes=tuple(nodes), metas=metas)


def _with_placements(graph: Graph, stages: Sequence[Placement]) -> tuple[Graph, tuple[Placement, ...]]:
    """The graph with the placement of each node's stage, and the stages that have a node, numbered anew."""
    used = sorted({n.stage for n in graph.nodes})
    number = {s: k for k, s in enumerate(used)}
    nodes = tuple(replace(n, placement=stages[n.stage], stage=number[n.stage]) for n in graph.nodes)
    return replace(graph, nodes=nodes), tuple(stages[s] for s in used)
