"""Insert stores, so that variables are written only after their old values were read.

In a plan, an actor that writes a variable waits for all actors that read its old value.  If one of these depends on
the actor that makes the new value, the two would wait for each other.  There a *store* is inserted: an actor that only
writes the variable, and on which nothing depends.  A store is also inserted where a variable becomes the value of
another variable that changes as well; it copies, so that two variables can be swapped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from actorflow_compiler.core.ops import Phase, Ref
from actorflow_compiler.core.views import may_be_view
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.cutting.segment import Segment, SegmentedProgram
from actorflow_compiler.graph.graph import InputKind
from actorflow_compiler.plan.plan import Step

Node = object  # a segment, or the key of communications that leave at the same time


def views_of_variables(program: LoweredProgram) -> dict[int, frozenset[str]]:
    """Local value → the variables whose memory it may share: it is one of them, or may be a view of them."""
    found = {v: frozenset({name}) for v, (name, kind) in program.inputs.items() if kind == InputKind.VARIABLE}
    nothing: frozenset[str] = frozenset()
    for item in program.items:
        if item.kind is ItemKind.COMM:
            continue
        for steps in item.steps.values():
            for step in steps:
                if may_be_view(step.op):
                    names = nothing.union(*(found.get(v, nothing) for v in step.reads()))
                    found.update({o: found.get(o, nothing) | names for o in step.outs if o >= 0 and names})
        if not item.steps or not all(item.steps.values()):  # on some ranks its results are what it reads
            names = nothing.union(*(found.get(v, nothing) for v in item.reads))
            found.update({o: found.get(o, nothing) | names for o in item.writes if names})
    return found


def insert_stores(segmented: SegmentedProgram) -> SegmentedProgram:
    """Insert stores for variables whose old values are read after the new ones are made, or that become another's."""
    program, flow = segmented.program, SegmentGraph(segmented)
    held, updated = views_of_variables(program), {name for name, _ in program.updates}
    readers: dict[str, set[Node]] = {name: set() for name in updated}
    for value, nodes in flow.readers.items():
        for name in held.get(value, frozenset()) & updated:
            readers[name] |= nodes
    nothing: frozenset[str] = frozenset()
    taken = {value for name, value in program.updates if held.get(value, nothing) & updated - {name}}
    late = [value for name, value in program.updates if value in taken or flow.after(value) & readers[name]]
    if not late:
        return segmented
    levels = [s.level for s in segmented.segments if s is not None] + [level for level, _ in segmented.comm_level]
    last = max(levels) + 1
    program, stores = _with_stores(program, list(dict.fromkeys(late)), taken)
    updates = tuple((n, stores[v] if v in taken or flow.after(v) & readers[n] else v) for n, v in program.updates)
    items = program.items[len(segmented.segments) :]
    own = [Segment(Phase.OPTIMIZER, i.placement, i.pieces, last, stage=i.stage) for i in items]
    return SegmentedProgram(
        replace(program, updates=updates),
        (*segmented.segments, *own),
        (*segmented.comm_level, *((last, 0) for _ in own)),
    )


def _with_stores(
    program: LoweredProgram, values: Sequence[int], taken: Collection[int]
) -> tuple[LoweredProgram, dict[int, int]]:
    """Append a store item for each value, which gives it a new number; also returns value → that number.

    Values that are ``taken`` may share memory with other variables, so their stores copy.
    """
    maker = {v: item for item in program.items for v in item.writes}
    metas, names, sbp = dict(program.metas), dict(program.names), dict(program.sbp)
    first = 1 + max(*names, *(v for v, _ in metas))
    stores = {value: first + k for k, value in enumerate(values)}
    items = []
    for value, out in stores.items():
        names[out], sbp[out] = names.get(value, ""), sbp.get(value, "")
        here = {rank: meta for (v, rank), meta in metas.items() if v == value}
        metas.update({(out, rank): meta for rank, meta in here.items()})
        op = "aten.clone.default" if value in taken else "actorflow.identity"
        steps = {rank: (Step(op, (Ref(value),), (), (out,)),) for rank in here}
        of = maker[value]
        items.append(
            ProgramItem(
                ItemKind.COMPUTE,
                Phase.OPTIMIZER,
                of.placement,
                of.pieces,
                (value,),
                (out,),
                steps,
                where=of.where,
                stage=of.stage,
            )
        )
    return replace(program, items=(*program.items, *items), metas=metas, names=names, sbp=sbp), stores


class SegmentGraph:
    """The dependency graph of segments and communications."""

    def __init__(self, segmented: SegmentedProgram) -> None:
        self._makers: dict[int, frozenset[Node]] = {}  # value → the nodes that make it, or what it is an alias of
        self.next: dict[Node, set[Node]] = {}  # node → the nodes that read what it makes
        self.readers: dict[int, set[Node]] = {}  # value → the nodes that read it
        every = zip(segmented.program.items, segmented.segments, segmented.comm_level, strict=True)
        for item, segment, level in every:
            comm = ("comm", item.phase, item.pieces, item.stage, level) if item.kind is ItemKind.COMM else None
            own = comm or (segment if any(item.steps.values()) else None)
            before = self._read((*item.reads, *item.after), own)
            passed = own is None or (comm is None and not all(item.steps.values()))
            makers = (before if passed else frozenset()) | (frozenset() if own is None else {own})
            self._makers.update(dict.fromkeys(item.writes, makers))
        for value, *_ in segmented.program.results:
            self._read((value,), ("sink", value))

    def _read(self, values: Iterable[int], own: Node | None) -> frozenset[Node]:
        """Record that a node reads these values; return the nodes that make them."""
        before: frozenset[Node] = frozenset()
        for v in values:
            before |= self._makers.get(v, frozenset())
            if own is not None:
                self.readers.setdefault(v, set()).add(own)
        for node in before - {own} if own is not None else ():
            self.next.setdefault(node, set()).add(own)
        return before

    def after(self, value: int) -> set[Node]:
        """All nodes that depend on the nodes that make a value."""
        found: set[Node] = set()
        todo = [n for maker in self._makers.get(value, ()) for n in self.next.get(maker, ())]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo.extend(self.next.get(node, ()))
        return found
