"""Divide the forward pass of a captured step into parts, each of which may be computed again in the backward pass.

A part that is computed again keeps only what it reads of parts before it.  Parts begin between modules, where little
is read by what follows: between the blocks of a model, and not inside of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.views import CHEAP_OPS, may_be_view
from actorflow_compiler.graph.graph import Graph, Node

IN_MEMORY = 2  # parts whose values are in memory at a time while they are computed again
DIVISIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of what is kept, as the most that a part may keep
WORTH = 0.01  # of all that is kept: a part that saves less is not computed again


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of the forward pass: the visits (``Node.visit``) from ``begin`` until that of the next part."""

    begin: int
    kept: float  # bytes that the backward pass reads of what it makes
    saved: float  # bytes of these that are not kept if it is computed again
    name: str = ""  # of the first module in it, for people


@dataclass(frozen=True, slots=True)
class DividedModel:
    """The parts of a step in order, and the numbers of those that are worth computing again."""

    parts: tuple[ModelPart, ...] = ()
    order: tuple[int, ...] = ()  # first those that save most; neighbours of equal ones far apart

    def part_of(self, node: Node) -> int | None:
        """The part that a node belongs to, a backward op to that of its forward op; None for one without a visit."""
        if node.visit < 0 or not self.parts:
            return None
        return max(0, bisect.bisect(self.parts, node.visit, key=lambda part: part.begin) - 1)

    @property
    def kept(self) -> float:
        """Bytes that the backward pass reads of what the forward pass makes."""
        return sum(part.kept for part in self.parts)


NO_PARTS = DividedModel()


def find_parts(graph: Graph) -> DividedModel:
    """The parts of a step's forward pass, divided so that computing all of them again needs little memory."""
    found = _KeptValues(graph)
    if not found.visits:
        return DividedModel()
    begins = found.divided()
    ends = (*begins[1:], len(found.visits))
    parts = []
    for begin, end in zip(begins, ends, strict=True):
        kept = sum(found.kept[begin:end])
        handed_on = found.crossing[end] if end < len(found.visits) else 0.0
        visit = found.visits[begin]
        parts.append(ModelPart(visit, kept, max(0.0, kept - handed_on), found.names.get(visit, "")))
    least = WORTH * sum(found.kept)
    worth = [k for k, part in enumerate(parts) if part.saved > least]
    return DividedModel(tuple(parts), tuple(_spread(worth, [parts[w].saved for w in worth])))


def find_kept(graph: Graph) -> Mapping[int, int]:
    """Value → bytes, of what the backward pass reads of the forward pass; views count as what they are views of."""
    return {v: graph.metas[v].nbytes for v in sorted(_KeptValues(graph).read_again)}


def _spread(numbers: Sequence[int], saved: Sequence[float]) -> list[int]:
    """The numbers by what they save, in steps of a factor of two; equal ones so that the first few are far apart."""
    most = max(saved, default=0.0)
    steps: dict[int, list[int]] = {}
    for number, one in zip(numbers, saved, strict=True):
        steps.setdefault(int(most / one).bit_length(), []).append(number)
    return [alike[k] for _, alike in sorted(steps.items()) for k in _far_apart(len(alike))]


def _far_apart(count: int) -> list[int]:
    """The numbers below ``count`` with those first that have their bits set from the lowest one of 2, 4, 8 … parts."""
    bits = max(1, (count - 1).bit_length())
    turned = (int(f"{k:0{bits}b}"[::-1], 2) for k in range(1 << bits))
    return [k for k in turned if k < count]


class _KeptValues:
    """What the forward pass keeps for the backward pass, by visit, and what crosses from visit to visit."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        forward = [n for n in graph.nodes if n.phase == Phase.FORWARD and n.visit >= 0]
        self.visits = sorted({n.visit for n in forward})
        self.names: dict[int, str] = {}
        self.base: dict[int, int] = {}  # value → the value whose memory it is, or that it is made of without work
        self.at: dict[int, int] = {}  # value of the forward pass → the number of its visit
        number = {visit: k for k, visit in enumerate(self.visits)}
        outside = {i.value for i in graph.inputs}
        for n in forward:
            self.names.setdefault(n.visit, n.where)
            reads = {self.base.get(v, v) for v in n.reads()}
            if len(reads) == 1 and (n.op in CHEAP_OPS or may_be_view(n.op)):
                self.base.update(dict.fromkeys((o for o in n.outs if o >= 0), next(iter(reads))))
            elif reads or n.op not in CHEAP_OPS:
                self.at.update(dict.fromkeys((o for o in n.outs if o >= 0), number[n.visit]))
        for v in outside:
            self.at.pop(v, None)
        self.read_again: set[int] = set()  # values that the backward pass reads
        self.kept = [0.0] * len(self.visits)
        self.crossing = self._sums(self._last_reads(number))

    def _last_reads(self, number: Mapping[int, int]) -> Mapping[int, int]:
        """Value → the last visit that reads it; it counts what is kept, too."""
        last: dict[int, int] = {}
        for n in self.graph.nodes:
            for v in {self.base.get(v, v) for v in n.reads()} & self.at.keys():
                if n.phase == Phase.BACKWARD:
                    self.read_again.add(v)
                if n.visit in number and n.phase != Phase.OPTIMIZER:
                    last[v] = max(last.get(v, 0), number[n.visit])
        for v in self.read_again:
            self.kept[self.at[v]] += self.graph.metas[v].nbytes
        return last

    def _sums(self, last: Mapping[int, int]) -> list[float]:
        """Bytes that are made before each visit and read in it or later."""
        change = [0.0] * (len(self.visits) + 1)
        for v, at in last.items():
            if at > self.at[v]:
                change[self.at[v] + 1] += self.graph.metas[v].nbytes
                change[at + 1] -= self.graph.metas[v].nbytes
        return list(accumulate(change[:-1]))

    def divided(self) -> list[int]:
        """The numbers of the visits with which parts begin, the first being 0."""
        total = sum(self.kept)
        every = (self._within(total / division) for division in DIVISIONS)
        return min(every, key=lambda begins: (self._needed(begins), len(begins)))

    def _needed(self, begins: Sequence[int]) -> float:
        """Bytes that are in memory if all parts are computed again."""
        ends = (*begins[1:], len(self.visits))
        largest = max(sum(self.kept[a:b]) for a, b in zip(begins, ends, strict=True))
        return sum(self.crossing[b] for b in begins) + IN_MEMORY * largest

    def _within(self, most: float) -> list[int]:
        """The begins of parts that keep no more than this, unless there is nowhere to cut; where least crosses."""
        places = [0, *self._narrow(), len(self.visits)]
        before = [0.0, *accumulate(self.kept)]
        best = [0.0] * len(places)  # bytes that cross the begins of the parts before a place
        came = [0] * len(places)
        for k in range(1, len(places)):
            here = self.crossing[places[k]] if places[k] < len(self.visits) else 0.0
            best[k], came[k] = best[k - 1] + here, k - 1
            for j in range(k - 2, -1, -1):
                if before[places[k]] - before[places[j]] > most:
                    break
                if best[j] + here <= best[k]:
                    best[k], came[k] = best[j] + here, j
        begins = [came[-1]]
        while begins[-1]:
            begins.append(came[begins[-1]])
        return [places[k] for k in reversed(begins)]

    def _narrow(self) -> list[int]:
        """The visits before which no more crosses than before their neighbours."""
        c = self.crossing
        return [k for k in range(1, len(c)) if c[k] <= c[k - 1] and (k + 1 == len(c) or c[k] <= c[k + 1])]
