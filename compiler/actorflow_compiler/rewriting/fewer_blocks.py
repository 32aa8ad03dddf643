"""Leave out some of the repeated blocks of a model, for a step that is quick to compile and tells what all would cost.

Neighbouring blocks (``blocks.3``, ``blocks.4``, …) whose ops are the same in the same order can be left out: what
follows them reads what the block before them makes, and what their backward pass would hand on comes from the block
after them.  Such a step computes something else, and never runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.core.ops import Phase, Ref
from actorflow_compiler.graph.graph import Graph, InputKind, Node, prune, verify, with_other_reads

PATTERNS = 4  # the most blocks that take turns, as dense ones and ones with experts do
LEAST = 6  # blocks of a container: with fewer, there is nothing to gain

_Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks of a container of modules, each like the one ``pattern`` blocks before it."""

    nodes: tuple[tuple[int, ...], ...]  # of each block of the container, in order: the numbers of its nodes
    first: int  # block of the run
    count: int  # blocks of the run
    pattern: int

    @property
    def spare(self) -> int:
        """How many blocks may be left out."""
        return max(0, self.count - 2 * self.pattern) // self.pattern * self.pattern


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """The runs of like blocks of a step."""

    runs: tuple[BlockRun, ...] = ()

    @property
    def count(self) -> int:
        """The blocks of the longest container."""
        return max((len(run.nodes) for run in self.runs), default=0)

    def cut(self, run: BlockRun, keep: int) -> int:
        """How many blocks of a run are left out where ``keep`` of the longest container are to be left."""
        total = len(run.nodes)
        wanted = max(1, -(-keep * total // self.count))
        return min(run.spare, max(0, total - wanted) // run.pattern * run.pattern)

    def left(self, keep: int) -> int:
        """How many blocks of the longest container are left where ``keep`` are to be: more, if too few are alike."""
        longest = max(self.runs, key=lambda run: len(run.nodes), default=None)
        return 0 if longest is None else len(longest.nodes) - self.cut(longest, keep)


def find_blocks(graph: Graph) -> RepeatedBlocks:
    """The runs of like blocks of a graph: of each container of modules, the longest."""
    owner = _owners(graph)
    containers: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for k, found in enumerate(owner):
        if found is not None:
            containers[found[0]][found[1]].append(k)
    runs = []
    for name, blocks in containers.items():
        nodes = tuple(tuple(blocks[k]) for k in sorted(blocks))
        like = [_signature(graph, name, block) for block in nodes]
        best = max((_longest(like, pattern) for pattern in range(1, PATTERNS + 1)), key=lambda r: r[1] - 2 * r[2])
        run = BlockRun(nodes, *best)
        if run.spare:
            runs.append(run)
    return RepeatedBlocks(tuple(runs))


def with_fewer_blocks(captured: Capture, blocks: RepeatedBlocks, keep: int) -> Capture:
    """The step with about ``keep`` of the blocks of the longest container, and as large a share of those of others.

    Variables of blocks that are left out are no inputs of it.
    """
    graph, same, left_out = captured.graph, {}, set()
    for run in blocks.runs:
        cut = blocks.cut(run, keep)
        begin = run.first + run.pattern
        for block in range(begin, begin + cut):
            turn = (block - begin) % run.pattern
            before, after = run.first + turn, begin + cut + turn
            for mine, earlier, later in zip(run.nodes[block], run.nodes[before], run.nodes[after], strict=True):
                n = graph.nodes[mine]
                like = graph.nodes[later if n.phase == Phase.BACKWARD else earlier]
                same.update({o: other for o, other in zip(n.outs, like.outs, strict=True) if o >= 0})
                left_out.add(mine)
    return replace(captured, graph=_without(captured, same, left_out))


# ---- inside


def _owners(graph: Graph) -> list[tuple[str, int] | None]:
    """The block of each node, as its container and number: the outermost of a container of many.

    An op that names no module, such as a sum of gradients, belongs to the block of the op before it.
    """
    inside = [list(_containers(n.where)) for n in graph.nodes]
    members: dict[str, set[int]] = defaultdict(set)
    for found in inside:
        for name, number in found:
            members[name].add(number)
    owners: list[tuple[str, int] | None] = []
    last: dict[Phase, tuple[str, int] | None] = {}
    for n, found in zip(graph.nodes, inside, strict=True):
        own = next((one for one in found if len(members[one[0]]) >= LEAST), None)
        if n.phase == Phase.OPTIMIZER:
            own = None
        elif not n.where:
            own = last.get(n.phase)
        last[n.phase] = own
        owners.append(own)
    return owners


def _containers(where: str) -> Iterator[tuple[str, int]]:
    """``("blocks", 3)`` of ``blocks.3.up``, from the outermost."""
    parts = where.split(".")
    yield from ((".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdigit())


def _signature(graph: Graph, container: str, block: Sequence[int]) -> _Signature:
    """What a block computes, in order, with its number left out where the container's name stands."""
    inside = re.compile(rf"(?<![^.\s]){re.escape(container)}\.\d+(?![^.\s])")

    def plain(arg: object) -> object:
        if isinstance(arg, tuple):
            return tuple(map(plain, arg))
        if isinstance(arg, str):
            return inside.sub("#", arg)
        return graph.metas[arg.index] if isinstance(arg, Ref) else (type(arg).__name__, arg)

    return tuple(
        (
            n.op, plain(n.args), plain(n.kwargs), n.phase, n.again, n.placement, plain(n.where),
            tuple(graph.metas[o] if o >= 0 else None for o in n.outs),
        )
        for n in (graph.nodes[k] for k in block)
    )  # fmt: skip


def _longest(like: Sequence[_Signature], pattern: int) -> tuple[int, int, int]:
    """(first, count, pattern) of the longest run in which each block is like the one ``pattern`` blocks before it."""
    first = best = at = 0
    for k in range(len(like)):
        if k - at >= pattern and like[k] != like[k - pattern]:
            at = k - pattern + 1
        if k + 1 - at > best:
            first, best = at, k + 1 - at
    return first, best, pattern


def _without(captured: Capture, same: Mapping[int, int], left_out: Collection[int]) -> Graph:
    """The graph without these nodes, in which ``same`` values stand for theirs, and without their variables."""
    graph = captured.graph
    before: set[int] = set()
    after: set[int] = set()
    nodes: list[Node] = []
    for k, n in enumerate(graph.nodes):
        if k in left_out:
            before.update(n.reads())
            continue
        nodes.append(with_other_reads(n, same))
        if n.phase != Phase.OPTIMIZER:
            after.update(nodes[-1].reads())
    named = {i.name: i.value for i in graph.inputs if i.kind == InputKind.VARIABLE}
    gone = {name for name, value in named.items() if value in before and value not in after}
    gone |= {name for name in named if captured.parameter.get(name) in gone}
    values = {named[name] for name in gone}
    return verify(prune(replace(
        graph,
        inputs=tuple(i for i in graph.inputs if i.value not in values),
        nodes=tuple(nodes),
        results=tuple(same.get(r, r) for r in graph.results),
        updates=tuple((old, same.get(new, new)) for old, new in graph.updates if old not in values),
    )))  # fmt: skip
