"""What may be split along a mesh axis that users want for the sequence: the dims that positions of the batch run along.

Dims of the batch's tensors are followed through the graph by the signatures of its ops.  Those that meet in one op
are one dim of the batch.  A dim is a *sequence* if attention looks along it; in a model without attention, if
it is the second dim of what is looked up in an embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.op_call import argument
from actorflow_compiler.core.ops import Meta, Phase
from actorflow_compiler.core.sbp import Sbp, Split
from actorflow_compiler.graph.graph import CALL_INPUTS, Graph, InputKind
from actorflow_compiler.signatures import OpCall, Signature

Dims = frozenset[tuple[str, int]]  # (input of the batch, dim)
Cut = tuple[int, Split]  # of a value
Options = Sequence[tuple[Signature, ...]]  # of each node

SOFTMAXES = frozenset({"aten._softmax.default", "aten._safe_softmax.default"})
EMBEDDING = "aten.embedding.default"
BATCHED = frozenset({"aten.bmm.default", "aten.baddbmm.default"})
HEADS: Dims = frozenset({("", 0)})  # stands for the heads of attention, which are no dim of the batch
PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default"})  # of weights, also those that make their gradients
SAME_DIMS = frozenset({  # the dims of their outputs are those of their operands, also where they cannot be split
    "aten.slice.Tensor", "aten.slice_backward.default", "aten.constant_pad_nd.default", "aten.cat.default",
    "aten.flip.default", "aten.roll.default", "aten.slice_scatter.default", "aten.select_scatter.default",
})  # fmt: skip
SEQUENCE_START, RING_START, HEADS_START = "sequence", "ring", "heads"  # names of what a search begins with
POSITIONS = 2  # the dim of attention's queries and keys that is the sequence


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """The options of an op, and which of them (by number) split the sequence, or heads of attention instead."""

    options: tuple[Signature, ...]
    sequence: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    attends: bool = False  # it is a product of attention, which looks at all positions

    @property
    def ring(self) -> tuple[int, ...]:
        """The options by which attention goes around a ring."""
        return tuple(o for o in self.sequence if self.attends and self.options[o].inner)

    def first(self, start: str) -> tuple[int, ...]:
        """The options from which a search begins: along the sequence, but in attention as the ``start`` says.

        That is "sequence" (keys are gathered), "ring" or "heads".
        """
        if start == RING_START and self.ring:
            return self.ring
        if start == HEADS_START and self.attends and self.heads:
            return self.heads
        whole = tuple(o for o, s in enumerate(self.options) if s.letter is None)
        if start == HEADS_START or not self.sequence:
            return tuple(range(len(self.options)))
        gathers = tuple(o for o in self.sequence if o not in self.ring)
        return (*whole, *gathers) if gathers else self.ring


def along_sequence(
    graph: Graph, calls: Sequence[OpCall], reads: Sequence[tuple[int, ...]], metas: Mapping[int, Meta],
    options: Options, weights: Iterable[int], parts: int, ragged: bool = False, asked: str = SEQUENCE_START,
) -> list[SequenceOptions]:  # fmt: skip
    """The options of every op, without those that split something else where the sequence can be split.

    What attention does may be split by heads, what depends on no sequence as it is cheapest, but never by samples.
    ``ragged`` is whether another axis has cut dims unevenly, ``asked`` how users call the axis.  Raises LayoutError
    if no tensor of the batch has a sequence of ``parts`` positions at least.
    """
    dims = _BatchDims(graph, calls, reads, metas, options)
    _check(graph, metas, dims.sequence, parts, ragged, asked)
    held = set(weights)
    dims.follow_heads(held)
    kept: list[SequenceOptions] = []
    for n, call, values, legal in zip(graph.nodes, calls, reads, options, strict=True):
        if n.phase == Phase.OPTIMIZER:
            kept.append(SequenceOptions(legal))
            continue
        tensors = (*values, *n.outs)
        along = [s for s in legal if dims.splits(s, tensors, dims.sequence)]
        weighs = call.op in PRODUCTS or not held.isdisjoint(values)
        heads = [s for s in legal if s not in along and not weighs and dims.splits(s, tensors, HEADS)]
        if along:
            legal = tuple(s for s in legal if s.letter is None or s in along or s in heads)
        else:
            legal = tuple(s for s in legal if s in heads or not dims.splits(s, tensors, dims.samples))
        first, second = (tuple(o for o, s in enumerate(legal) if s in some) for some in (along, heads))
        kept.append(SequenceOptions(legal, first, second, _attends(call, values, held)))
    return kept


def around_ring(of: SequenceOptions) -> SequenceOptions:
    """Only the options by which attention goes around a ring, where it has some."""
    kept = tuple(s for s in of.options if s.inner) if of.attends else ()
    return SequenceOptions(kept, tuple(range(len(kept))), attends=True) if kept else of


def _attends(call: OpCall, values: Sequence[int], weights: Collection[int]) -> bool:
    """Whether an op is a product of attention: a kernel of it, or a batch of products that no weight is part of."""
    return "_scaled_dot_product" in call.op or (call.op in BATCHED and not any(v in weights for v in values))


def _cuts(signature: Signature, values: Sequence[int]) -> list[Cut]:
    """The values that a signature splits, and how."""
    layouts: tuple[Sbp | None, ...] = (*signature.ins, *signature.outs)
    return [(v, layout) for v, layout in zip(values, layouts, strict=True) if v >= 0 and isinstance(layout, Split)]


def _check(graph: Graph, metas: Mapping[int, Meta], sequence: Dims, parts: int, ragged: bool, asked: str) -> None:
    """Raise LayoutError where there is no sequence, or none that is long enough."""
    batch = [i for i in graph.inputs if i.kind in CALL_INPUTS]
    value = {i.name: i.value for i in batch}
    longest = max((metas[value[name]].shape[d] for name, d in sequence), default=0)
    if longest >= parts:
        return
    shapes = ", ".join(f"{i.name} {metas[i.value].shape}" for i in batch)
    again = " (what another axis has cut unevenly is not cut again)" if ragged else ""
    found = f"at most {longest} positions" if sequence else "no dim along which attention looks or tokens are looked up"
    raise LayoutError(
        f'parallel= asks for "{asked}" over {parts} devices; {found} was found in the batch '
        f"({shapes or 'no tensors'}), a dim of {parts} positions at least was expected{again}. "
        f'Use "data" or "tensor" for this axis, or fewer devices'
    )


class _BatchDims:
    """Which dims of the batch's tensors each cut of each value splits."""

    def __init__(
        self, graph: Graph, calls: Sequence[OpCall], reads: Sequence[tuple[int, ...]], metas: Mapping[int, Meta],
        options: Options,
    ) -> None:  # fmt: skip
        self.graph, self.calls, self.reads, self.metas, self.options = graph, calls, reads, metas, options
        self.batch = [i for i in graph.inputs if i.kind in CALL_INPUTS]
        self.known: dict[Cut, set[tuple[str, int]]] = {}
        self.at: dict[tuple[int, int], set[tuple[str, int]]] = {}  # likewise, of each dim of a value
        self.one: dict[tuple[str, int], tuple[str, int]] = {}  # dims that are the same: each leads to one of them
        for i in self.batch:
            for d in range(len(metas[i.value].shape)):
                self.known[i.value, Split(d)] = {(i.name, d)}
                self.one[i.name, d] = (i.name, d)
        self.pairs = [
            [_cuts(s, (*values, *n.outs)) for s in legal if s.letter is not None]
            for n, values, legal in zip(graph.nodes, reads, options, strict=True)
            if n.phase != Phase.OPTIMIZER
        ]
        for n, values in zip(graph.nodes, reads, strict=True):
            for v in values if n.op in SAME_DIMS else ():
                rank = len(metas[v].shape)
                dims = range(rank if n.outs[0] >= 0 and rank == len(metas[n.outs[0]].shape) else 0)
                self.pairs.append([[(v, Split(d)), (n.outs[0], Split(d))] for d in dims])
        self._spread()
        self.sequence = self._sequences()
        self.samples = self._samples()

    def _spread(self) -> None:
        """Give each cut the dims of the others that an op has together with it."""
        for order in (self.pairs, reversed(self.pairs), self.pairs):  # gradients of keys: from what they are added to
            for splits in order:
                for cuts in splits:
                    dims = {d for cut in cuts for d in self.known.get(cut, ())}
                    if dims:
                        self._join(dims)
                        for cut in cuts:
                            self.known.setdefault(cut, set()).update(dims)

    def follow_heads(self, weights: Collection[int]) -> None:
        """Find the cuts that split heads of attention; ``weights`` are variables, and views and casts of them."""
        (heads,) = HEADS
        self.one[heads] = heads
        for n, call, values, legal in zip(self.graph.nodes, self.calls, self.reads, self.options, strict=True):
            letters = "b" if call.op in BATCHED else "hg"
            tensors = (*values, *n.outs)
            for s in legal if n.phase != Phase.OPTIMIZER and _attends(call, values, weights) else ():
                if s.letter is not None and s.letter in letters and not self.splits(s, tensors, self.samples):
                    for cut in _cuts(s, tensors):
                        self.known.setdefault(cut, set()).add(heads)
        self._spread()

    def splits(self, signature: Signature, values: Sequence[int], dims: Dims) -> bool:
        """Whether a signature splits one of these dims."""
        return any(self._dims_of(cut) & dims for cut in _cuts(signature, values))

    def _join(self, dims: set[tuple[str, int]]) -> None:
        first, *rest = sorted({self._root(d) for d in dims - HEADS}) or HEADS
        self.one.update(dict.fromkeys(rest, first))

    def _root(self, dim: tuple[str, int]) -> tuple[str, int]:
        while self.one[dim] != dim:
            dim = self.one[dim]
        return dim

    def _dims_of(self, cut: Cut) -> Dims:
        """The dims of the batch that a cut splits, each by the one that stands for it."""
        return frozenset(map(self._root, self.known.get(cut, ())))

    def _along(self, value: int, dim: int) -> Iterable[tuple[str, int]]:
        """The dims of the batch that run along a dim of a value."""
        if not self.at:
            for (v, cut), dims in self.known.items():
                self.at.setdefault((v, cut.dim), set()).update(dims)
        return self.at.get((value, dim), set())

    def _sequences(self) -> Dims:
        """The dims that are sequences."""
        attended: set[tuple[str, int]] = set()
        looked_up: set[tuple[str, int]] = set()
        for call, values in zip(self.calls, self.reads, strict=True):
            if "_scaled_dot_product" in call.op and "backward" not in call.op:
                attended.update(d for v in values[:2] for d in self._along(v, POSITIONS))
            elif call.op in SOFTMAXES:
                dim = argument(call, "dim")[1] % max(1, len(call.ins[0].shape))
                attended.update(self._along(values[0], dim))
            elif call.op == EMBEDDING and len(call.ins[1].shape) > 1:
                looked_up.update(self._along(values[1], 1))
        return frozenset(map(self._root, attended or looked_up))

    def _samples(self) -> Dims:
        """The dims of samples: the first of each tensor, or the second where the first is a sequence."""
        found: set[tuple[str, int]] = set()
        for i in self.batch:
            dims = [self._root((i.name, d)) for d in range(len(self.metas[i.value].shape))]
            if i.kind == InputKind.BATCH:  # others are shared by all samples: a mask, positions
                found.update(dims[:2] if dims and dims[0] in self.sequence else dims[:1])
        return frozenset(found) - self.sequence
