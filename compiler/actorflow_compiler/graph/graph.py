"""The logical graph: ops over whole tensors, in an order that could run; its verifier and clean-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Arg, Meta, Phase, Ref, refs, show, substitute_all
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.signatures import OpCall

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)  # of a node


class InputKind(StrEnum):
    """Where a graph's input gets its value from."""

    VARIABLE = "variable"  # state that stays on the devices between calls
    BATCH = "batch"  # an argument that is cut into micro-batches
    ARGUMENT = "argument"
    SCALAR = "scalar"  # a number of the script, anew in each call
    CONSTANT = "constant"
    PIECE = "piece"  # the number of the micro-batch
    LOST = "lost"  # a gradient of an earlier call that was not kept


CALL_INPUTS = (InputKind.BATCH, InputKind.ARGUMENT)  # arguments of the call


@dataclass(frozen=True, slots=True)
class Node:
    """One op."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int, ...]  # value numbers; -1 where nobody uses the output
    phase: Phase = Phase.FORWARD
    placement: Placement | None = None  # None: not yet decided
    where: str = ""  # the user's module or line, for people
    pieces: bool = False  # fires once for each micro-batch, not once in an iteration
    visit: int = -1  # of a module or scope, in program order (``hints/tags.py``); a backward op has its forward op's
    stage: int = 0  # the virtual pipeline stage, once ops are placed
    again: bool = False  # a forward op that a user's activation checkpoint recomputes in the backward pass
    line: str = ""  # of the user's script, "train.py:31", for people; a backward op has its forward op's

    def reads(self) -> list[int]:
        """The values that the node reads, one entry for each occurrence in its arguments."""
        found = refs(self.args)
        for _, value in self.kwargs:
            found += refs((value,))
        return found

    def reading(self, change: Callable[[int], Arg]) -> Node:
        """A copy of the node in which each value that it reads is replaced by ``change(value)``."""
        args, kwargs = substitute_all(self.args, self.kwargs, change)
        return replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class Input:
    """A value that comes from outside the graph."""

    value: int
    name: str
    kind: InputKind


@dataclass(frozen=True, slots=True)
class Graph:
    """A step.  ``updates`` says which variable input gets which new value when the step is done."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    metas: Mapping[int, Meta]
    results: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]  # (variable's value, its new value)

    def roots(self) -> Iterator[int]:
        """The values that must be computed: results, and new values of variables."""
        yield from self.results
        for _, new in self.updates:
            yield new

    def __str__(self) -> str:
        lines = [f"%{i.value} = {i.kind} {i.name} : {self.metas[i.value]}" for i in self.inputs]
        for n in self.nodes:
            outs = ", ".join(f"%{o}" if o >= 0 else "_" for o in n.outs)
            args = ", ".join([*map(show, n.args), *(f"{k}={show(v)}" for k, v in n.kwargs)])
            metas = ", ".join(str(self.metas[o]) for o in n.outs if o >= 0)
            lines.append(f"{outs} = {n.op}({args}) : {metas}  # {n.phase} {n.placement or ''} {n.where}")
        lines.append(f"return {', '.join(f'%{r}' for r in self.results)}")
        lines += [f"%{old} <- %{new}" for old, new in self.updates]
        return "\n".join(lines)


def verify(graph: Graph) -> Graph:
    """Return the graph if every value is made once, before it is read, and has a Meta; raise PlanError otherwise."""
    known: set[int] = set()

    def make(value: int, what: str) -> None:
        if value in known:
            raise PlanError(f"graph: %{value} is made twice, the second time by {what}")
        if value not in graph.metas:
            raise PlanError(f"graph: nothing is known of %{value}, made by {what}")
        known.add(value)

    for i in graph.inputs:
        make(i.value, f"input {i.name}")
    for node in graph.nodes:
        for value in node.reads():
            if value not in known:
                raise PlanError(f"graph: {node.op} reads %{value} before it is made")
        if node.phase not in PHASES:
            raise PlanError(f"graph: {node.op} has phase {node.phase!r}; one of {tuple(map(str, PHASES))} was expected")
        for out in node.outs:
            if out >= 0:
                make(out, node.op)
    for value in graph.roots():
        if value not in known:
            raise PlanError(f"graph: the result %{value} is never made")
    return graph


def call_of(node: Node, metas: Mapping[int, Meta]) -> tuple[OpCall, tuple[int, ...]]:
    """The node as an ``OpCall``, and the values that are its operands, in order."""
    operands: list[int] = []

    def number(index: int) -> Ref:
        operands.append(index)
        return Ref(len(operands) - 1)

    args, kwargs = substitute_all(node.args, node.kwargs, number)
    outs = tuple(metas[o] if o >= 0 else None for o in node.outs)
    return OpCall(node.op, args, kwargs, tuple(metas[v] for v in operands), outs), tuple(operands)


def prune(graph: Graph) -> Graph:
    """Drop every node that no result and no update needs, and the outputs that nobody reads."""
    needed = set(graph.roots())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(o in needed for o in node.outs):
            kept.append(node)
            needed.update(node.reads())
    nodes = tuple(replace(n, outs=tuple(o if o in needed else -1 for o in n.outs)) for n in reversed(kept))
    inputs = tuple(i for i in graph.inputs if i.kind in (InputKind.VARIABLE, *CALL_INPUTS) or i.value in needed)
    alive = {i.value for i in inputs} | {o for n in nodes for o in n.outs if o >= 0}
    return Graph(inputs, nodes, {v: graph.metas[v] for v in alive}, graph.results, graph.updates)


def without(graph: Graph, gives_back: Callable[[Node], bool]) -> Graph:
    """The same step with the ops that only give back what they read, their first argument, left out."""
    same: dict[int, int] = {}

    def at(value: int) -> Ref:
        return Ref(same.get(value, value))

    nodes: list[Node] = []
    for n in graph.nodes:
        n = with_other_reads(n, same)
        if gives_back(n):
            same[n.outs[0]] = n.args[0].index
        else:
            nodes.append(n)
    results = tuple(at(r).index for r in graph.results)
    updates = tuple((old, at(new).index) for old, new in graph.updates)
    return replace(graph, nodes=tuple(nodes), results=results, updates=updates)


def with_other_reads(n: Node, same: Mapping[int, int]) -> Node:
    """The node with the values that it reads renumbered by ``same``."""
    if not same.keys() & set(n.reads()):
        return n
    return n.reading(lambda value: Ref(same.get(value, value)))


def merge_equal(graph: Graph, is_random: Callable[[Node], bool] = lambda _: False) -> Graph:
    """Common subexpressions: of nodes that compute the same thing in the same place, keep the first.

    Ops that a checkpoint recomputes in the backward pass are kept, since recomputing is how it saves memory.
    """
    same: dict[int, int] = {}
    seen: dict[object, int] = {}  # what is computed → its node
    nodes: list[Node] = []

    def new(index: int) -> Ref:
        return Ref(same.get(index, index))

    for n in graph.nodes:
        n = n.reading(new)
        key = (
            n.op,
            _typed(n.args),
            _typed(n.kwargs),
            n.placement,
            n.stage,
            n.phase == Phase.OPTIMIZER,
            n.pieces,
            n.again,
        )
        if key in seen and not is_random(n):
            first = nodes[seen[key]]
            same.update({v: kept for v, kept in zip(n.outs, first.outs, strict=True) if kept >= 0})
            outs = tuple(v if kept < 0 else kept for v, kept in zip(n.outs, first.outs, strict=True))
            nodes[seen[key]] = replace(first, outs=outs)
            continue
        seen[key] = len(nodes)
        nodes.append(n)
    final = [same.get(r, r) for r in graph.results]
    updates = tuple((old, same.get(v, v)) for old, v in graph.updates)
    return Graph(graph.inputs, tuple(nodes), graph.metas, tuple(final), updates)


def _typed(arg: Arg) -> object:
    """Arguments as a key that keeps 1, 1.0 and True apart."""
    if isinstance(arg, tuple):
        return tuple(_typed(a) for a in arg)
    return (type(arg).__name__, arg)
