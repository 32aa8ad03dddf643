"""A graph whose ops have placements goes in; an SBP for every value and a signature for every op come out.

Each mesh axis is decided by itself, on the graph as the axes before it have cut it.  The start is a
walk in graph order that takes the cheapest signature for what came before; then every op is looked
at again, with all its neighbours, until nothing gets cheaper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.boxing import bytes_moved
from actorflow_compiler.flops import flops_of
from actorflow_compiler.graph import Graph, Node, call_of
from actorflow_compiler.ops import Meta, Ref, substitute
from actorflow_compiler.placement import Placement
from actorflow_compiler.sbp import B, NdSbp, PartialSum, Sbp, Split, local_shape
from actorflow_compiler.signatures import OpCall, Signature, localise, signatures

SWEEPS = 8
CASCADE = 24  # ops that are looked at together when one op is made whole earlier than it must be
BANDWIDTH = 2e9  # bytes/s between two devices
LATENCY = 1e-4  # s for each communication
ODD_CUT = 1.0  # s for cutting a batch along another dim than its first: data parallelism is where inference starts
REDUNDANT = (
    1e-6  # s for each floating-point operation done more than once: far above its price, so that it is the last resort
)
BYTE_HELD = 1e-14  # s for each byte of a copy that could have been a part; only breaks ties
FREE_KINDS = frozenset({"batch", "argument", "constant", "scalar", "piece"})  # every rank has all of these

Need = tuple[Sbp, Placement]


@dataclass(frozen=True, slots=True)
class Layouts:
    """How every value lies: one SBP for each axis of its placement, and the signatures that say so."""

    value: Mapping[int, NdSbp]
    placement: Mapping[int, Placement]
    operands: Sequence[tuple[NdSbp, ...]]  # node by node: the layout that each operand must have
    chosen: Sequence[tuple[Signature, ...]]  # node by node: one signature for each mesh axis


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is decided before inference."""

    variables: Mapping[str, tuple[Placement, tuple[Sbp, ...]]]  # where every variable lies
    batch: Mapping[str, tuple[Sbp, ...]]  # how an input is best taken; not a must, for every rank has it whole
    results: Mapping[int, Placement]  # values that must be whole on these ranks


def infer(graph: Graph, fixed: Fixed, everywhere: Placement, pieces: int) -> Layouts:
    """Choose; every op gets one signature for each axis of its placement."""
    names = {i.value: i for i in graph.inputs}
    axes = max((len(n.placement.hierarchy) for n in graph.nodes if n.placement), default=1)
    placement: dict[int, Placement] = {}
    for i in graph.inputs:
        placement[i.value] = fixed.variables[i.name][0] if i.kind == "variable" else everywhere
    for n in graph.nodes:
        assert n.placement is not None
        placement.update({o: n.placement for o in n.outs if o >= 0})
    calls = [call_of(n, graph.metas) for n in graph.nodes]
    local_calls = [c for c, _ in calls]
    value: dict[int, list[Sbp]] = {v: [] for v in placement}
    operands: list[list[list[Sbp]]] = [[[] for _ in reads] for _, reads in calls]
    chosen: list[list[Signature]] = [[] for _ in calls]
    shapes = dict(graph.metas)
    ragged: list[set[tuple[int, int]]] = [set() for _ in calls]
    for axis in range(axes):
        problem = _Axis(graph, local_calls, [r for _, r in calls], placement, shapes, axis, pieces)
        problem.ragged = ragged
        for i in graph.inputs:
            if i.kind == "variable":
                where, entries = fixed.variables[i.name]
                problem.fix(i.value, entries[axis] if axis < len(where.hierarchy) else B)
            else:
                entries = fixed.batch.get(i.name, ())
                problem.free(i.value, entries[axis] if axis < len(entries) else None)
        for old, new in graph.updates:
            where, entries = fixed.variables[names[old].name]
            if axis < len(where.hierarchy):
                problem.require(new, entries[axis], where)
        for result, where in fixed.results.items():
            problem.require(result, B, where)
        best = problem.solve()
        for k, signature in enumerate(best):
            node_placement = graph.nodes[k].placement
            assert node_placement is not None
            if axis >= len(node_placement.hierarchy):
                continue
            chosen[k].append(signature)
            ragged[k] |= _ragged(local_calls[k], signature, node_placement.hierarchy[axis])
            for j, need in enumerate(signature.ins):
                operands[k][j].append(need)
            for o, layout in zip(graph.nodes[k].outs, signature.outs, strict=True):
                if o >= 0:
                    assert layout is not None
                    value[o].append(layout)
            if axis + 1 < axes:
                local_calls[k] = _first_local(local_calls[k], signature, node_placement.hierarchy[axis])
        for i in graph.inputs:
            if axis < len(placement[i.value].hierarchy):
                entry = fixed.variables[i.name][1][axis] if i.kind == "variable" else B
                value[i.value].append(entry)
                if isinstance(entry, Split):
                    size = placement[i.value].hierarchy[axis]
                    shapes[i.value] = Meta(local_shape(shapes[i.value].shape, entry, size, 0), shapes[i.value].dtype)
        for n, call in zip(graph.nodes, local_calls, strict=True):
            made = zip(n.outs, call.outs, strict=True)
            shapes.update({o: meta for o, meta in made if o >= 0 and meta is not None})
    return Layouts(
        {v: tuple(s) for v, s in value.items()},
        placement,
        [tuple(tuple(s) for s in node) for node in operands],
        [tuple(s) for s in chosen],
    )


def _first_local(call: OpCall, signature: Signature, parts: int) -> OpCall:
    """The op as the first device along an axis sees it."""
    op, args, kwargs, metas = localise(call, signature, parts, 0)
    ins = tuple(Meta(local_shape(m.shape, s, parts, 0), m.dtype) for m, s in zip(call.ins, signature.ins, strict=True))
    rest = iter(metas)
    outs = tuple(next(rest) if m is not None else None for m in call.outs)
    return OpCall(op, substitute(args, Ref), tuple(kwargs), ins, outs)


def _ragged(call: OpCall, signature: Signature, parts: int) -> set[tuple[int, int]]:
    """(number of the operand or output, dim) for the dims that the devices of an axis have different numbers of."""
    tensors = zip((*call.ins, *call.outs), (*signature.ins, *signature.outs), strict=True)
    return {
        (i, layout.dim)
        for i, (meta, layout) in enumerate(tensors)
        if meta is not None and isinstance(layout, Split)
        if local_shape(meta.shape, layout, parts, 0) != local_shape(meta.shape, layout, parts, parts - 1)
    }


class _Axis:
    """One mesh axis: a choice for each node, priced by what has to move."""

    def __init__(
        self, graph: Graph, calls: Sequence[OpCall], reads: Sequence[tuple[int, ...]],
        placement: Mapping[int, Placement], metas: Mapping[int, Meta], axis: int, pieces: int,
    ) -> None:  # fmt: skip
        self.graph, self.calls, self.reads = graph, calls, reads
        self.placement, self.metas, self.axis = placement, metas, axis
        self.layout: dict[int, Sbp] = {}
        self.is_free: dict[int, Sbp | None] = {}  # inputs that every rank has, and how they are best taken
        self.starting = True
        self.ragged: Sequence[set[tuple[int, int]]] = [set() for _ in calls]  # node by node; see _ragged
        self.needs: dict[int, Counter[Need]] = {v: Counter() for v in placement}
        self.rate = {o: pieces if n.pieces else 1 for n in graph.nodes for o in n.outs}
        self.choice: list[Signature] = []
        self.options: list[tuple[Signature, ...]] = []
        self.work: list[float] = []
        self.readers: dict[int, list[int]] = {}
        for k, values in enumerate(reads):
            for v in set(values):
                self.readers.setdefault(v, []).append(k)
        self._edges: dict[tuple[int, Sbp, Need], float] = {}

    def size(self, placement: Placement) -> int:
        return placement.hierarchy[self.axis] if self.axis < len(placement.hierarchy) else 1

    def fix(self, value: int, sbp: Sbp) -> None:
        self.layout[value] = sbp

    def free(self, value: int, taken: Sbp | None) -> None:
        self.layout[value] = B
        self.is_free[value] = taken

    def require(self, value: int, sbp: Sbp, where: Placement) -> None:
        self.needs[value][(sbp, where)] += 1

    def edge(self, value: int, have: Sbp, need: Need) -> float:
        """Seconds to give a value that lies as ``have`` to a reader."""
        if value in self.is_free:
            return 0.0 if need[0] in (B, self.is_free[value]) or self.is_free[value] is None else ODD_CUT
        if self.starting and isinstance(have, PartialSum) and isinstance(need[0], Split):
            need = (B, need[1])  # most sums are wanted whole in the end: do not begin with half of the way
        key = (value, have, need)
        if key not in self._edges:
            self._edges[key] = self._edge(value, have, need)
        return self._edges[key]

    def _edge(self, value: int, have: Sbp, need: Need) -> float:
        source, (sbp, target) = self.placement[value], need
        p, c = self.size(source), self.size(target)
        same = source == target
        if same and have == sbp:
            return 0.0
        moved = bytes_moved(have, sbp, self.metas[value].nbytes, p, c, same)
        if not moved:
            return 1e-7  # a local op
        if not same and have == sbp and p == c and not isinstance(have, PartialSum) and have != B:
            moved *= 0.99  # one to one: no putting together
        rate = self.rate.get(value, 1)
        return rate * (moved / max(p, c) / BANDWIDTH + LATENCY)

    def solve(self) -> list[Signature]:
        for n, call, reads in zip(self.graph.nodes, self.calls, self.reads, strict=True):
            assert n.placement is not None
            parts = self.size(n.placement)
            wanted = {s for v in reads if isinstance(s := self.layout[v], Split)} if parts > 1 else set()
            found = signatures(call, parts, wanted=tuple(wanted)) if parts > 1 else signatures(call, parts)[:1]
            found = tuple(s for s in found if not self._splits_ragged(len(self.options), s))
            self.options.append(found)
            self.work.append(flops_of(call) * (self.rate.get(n.outs[0], 1)) * (1 - 1 / parts))
            costs = [self._inputs(n, reads, s) + self._own(n, s, self.work[-1]) for s in found]
            best = found[costs.index(min(costs))]
            self.choice.append(best)
            self._count(n, reads, best, 1)
            self._settle(n, best)
        self.starting = False
        self._sweep()
        if sum(self._cascade(k) for k in range(len(self.choice))):
            self._sweep()
        return self.choice

    def _splits_ragged(self, k: int, s: Signature) -> bool:
        """Whether a signature splits a dim whose size an earlier axis has made different on different devices."""
        tensors = enumerate((*s.ins, *s.outs))
        return any(isinstance(layout, Split) and (i, layout.dim) in self.ragged[k] for i, layout in tensors)

    def _sweep(self) -> None:
        for sweep in range(SWEEPS):
            order = range(len(self.choice)) if sweep % 2 else range(len(self.choice) - 1, -1, -1)
            if not sum(self._improve(k) < 0 for k in order):
                break

    def _improve(self, k: int, forced: Signature | None = None) -> float:
        """Give op k its best signature among unchanged neighbours, or a forced one; returns the change in seconds."""
        n, reads, old = self.graph.nodes[k], self.reads[k], self.choice[k]
        if len(self.options[k]) == 1:
            return 0.0
        self._count(n, reads, old, -1)
        work = self.work[k]

        def price(s: Signature) -> float:
            return self._inputs(n, reads, s) + self._outputs(n, s) + self._own(n, s, work)

        before = price(old)
        best = forced or min(self.options[k], key=price)
        change = price(best) - before
        if forced is None and change >= -1e-12:
            best, change = old, 0.0
        self.choice[k] = best
        self._count(n, reads, best, 1)
        self._settle(n, best)
        return change

    def _cascade(self, k: int) -> bool:
        """Try op k with whole outputs, and its readers after it.

        One sum for all of them may be cheaper than one for each, and what is cut here from a whole
        value may have to be gathered later.
        """
        whole, now = self.options[k][0], self.choice[k]
        cut = any(
            self.layout[v] == B and isinstance(s, Split) and v not in self.is_free
            for v, s in zip(self.reads[k], now.ins, strict=True)
        )
        if self.work[k] or now is whole or (not cut and not any(isinstance(o, PartialSum) for o in now.outs)):
            return False
        cone, seen = [k], {k}
        for j in cone:
            for o in self.graph.nodes[j].outs:
                for reader in self.readers.get(o, ()):
                    if reader not in seen and len(cone) < CASCADE and not self.work[reader]:
                        seen.add(reader)
                        cone.append(reader)
        before = [(j, self.choice[j]) for j in cone]
        change = self._improve(k, whole) + sum(self._improve(j) for j in sorted(cone[1:]))
        if change < -1e-9:
            return True
        for j, signature in before:
            if self.choice[j] is not signature:
                self._improve(j, signature)
        return False

    def _inputs(self, n: Node, reads: tuple[int, ...], s: Signature) -> float:
        assert n.placement is not None
        total = 0.0
        for v, need in {(v, sbp) for v, sbp in zip(reads, s.ins, strict=True)}:
            key = (need, n.placement)
            if not self.needs[v][key]:
                total += self.edge(v, self.layout[v], key)
        return total

    def _outputs(self, n: Node, s: Signature) -> float:
        total = 0.0
        for o, layout in zip(n.outs, s.outs, strict=True):
            if o >= 0 and layout is not None:
                total += sum(self.edge(o, layout, need) for need, count in self.needs[o].items() if count)
        return total

    def _own(self, n: Node, s: Signature, work: float) -> float:
        assert n.placement is not None
        if self.size(n.placement) == 1:
            return 0.0
        split = s.letter is not None
        held = sum(
            self.metas[o].nbytes
            for o, layout in zip(n.outs, s.outs, strict=True)
            if o >= 0 and not isinstance(layout, Split)
        )
        return (0.0 if split else work * REDUNDANT) + held * BYTE_HELD

    def _count(self, n: Node, reads: tuple[int, ...], s: Signature, by: int) -> None:
        assert n.placement is not None
        for v, need in {(v, sbp) for v, sbp in zip(reads, s.ins, strict=True)}:
            self.needs[v][(need, n.placement)] += by

    def _settle(self, n: Node, s: Signature) -> None:
        for o, layout in zip(n.outs, s.outs, strict=True):
            if o >= 0 and layout is not None:
                self.layout[o] = layout
