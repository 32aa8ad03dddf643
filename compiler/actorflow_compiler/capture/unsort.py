"""Remove a sort of rows from a graph that works on the sorted rows one by one and puts them back.

Mixtures of experts sort tokens by expert, so that a grouped product finds the tokens of an expert together.  After a
sort over the whole batch no row is where it was, so nothing can be split along the batch.  This pass traces each sorted
value back to the value whose rows it reorders.  Ops that work row by row then run on the unsorted value, a product of
sorted rows takes unsorted rows with the numbers of their groups, and ops that put rows back disappear.  A value that is
needed sorted after all keeps the ops that make it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.capture.graph_rewriter import GraphRewriter
from actorflow_compiler.core.op_call import bind
from actorflow_compiler.core.ops import Meta, Ref, Symbol, substitute_all
from actorflow_compiler.custom_ops.grouped_mm import GROUPED, GROUPED_WEIGHT
from actorflow_compiler.custom_ops.random import UNIFORM
from actorflow_compiler.graph.flops import flops_of
from actorflow_compiler.graph.graph import Graph, Node, call_of, prune, verify
from actorflow_compiler.signatures import OpCall
from actorflow_compiler.signatures.term_matching import index_call

SORTS = frozenset({"aten.sort.default", "aten.sort.stable"})
CASTS = frozenset({"aten._to_copy.default", "aten.clone.default"})


@dataclass(frozen=True, slots=True)
class SortedRows:
    """A value that consists of the rows of another value along ``dim``, reordered by a sort."""

    sort: int  # number of the sort, in graph order
    dim: int
    value: int  # the value before the sort


def unsort(graph: Graph) -> Graph:
    """An equal graph with as few sorted values as possible; the same graph where that would be more work."""
    if not any(n.op in SORTS for n in graph.nodes):
        return graph
    found = prune(_Walk(graph).run())
    return verify(found) if _work(found) <= _work(graph) else graph


def _work(graph: Graph) -> float:
    return sum(flops_of(call_of(n, graph.metas)[0]) for n in graph.nodes)


class _Walk(GraphRewriter):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)  # in ``same``, the equal value needs no sort
        self.made: dict[int, Node] = {}
        self.of: dict[int, SortedRows] = {}
        self.alike: set[int] = set()  # values whose rows may be in any order
        self.step: dict[int, int] = {}  # value → k where its element i is i // k
        # values → the sort that they belong to
        self.keys: dict[int, int] = {}  # the keys that are sorted
        self.inverse: dict[int, int] = {}  # index that undoes the sort
        self.counts: dict[int, int] = {}  # how often each of the keys 0, 1, … is there
        self.ends: dict[int, int] = {}  # where the rows of each of the keys 0, 1, … end
        self.key_of: dict[int, int] = {}  # sort → keys

    def run(self) -> Graph:
        for n in self.graph.nodes:
            self.look(self.put(self.reading_same(n)))
        return self.rewritten()

    def put(self, n: Node) -> Node:
        """See ``GraphRewriter``."""
        self.made.update({o: n for o in n.outs if o >= 0})
        return super().put(n)

    def look(self, n: Node) -> None:
        """Record what is known of the outputs of a node: sorted rows, keys, counts, and so on."""
        call, reads = call_of(n, self.metas)
        if rule := RULES.get(n.op):
            rule(self, n, call, reads)
        if any(v in self.of for v in reads) and not any(o in self.of or o in self.same for o in n.outs):
            self.row_by_row(n, call, reads)
        if reads and all(v in self.alike for v in reads) and _pointwise(call):
            self.alike.update(n.outs)

    def row_by_row(self, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
        """Apply an op on sorted rows to the unsorted ones instead, if it does the same with each row."""
        indices = index_call(call)
        given = {i: self.of[v] for i, v in enumerate(reads) if v in self.of}
        first = next(iter(given))
        sort = given[first].sort
        if indices is None or len({r.sort for r in given.values()}) > 1:
            return
        group = indices.ins[first].dims[given[first].dim]
        if len(group) != 1 or group[0] not in indices.splittable:
            return
        (letter,) = group
        for i, (v, tensor) in enumerate(zip(reads, indices.ins, strict=True)):
            at = [d for d, g in enumerate(tensor.dims) if letter in g]
            if tensor.values == letter or (at and v not in self.alike and (v not in self.of or at != [given[i].dim])):
                return
            if (at and tensor.dims[at[0]] != group) or (v in self.of and not at):
                return
        dims: list[int | None] = []
        for o, out in zip(n.outs, indices.outs, strict=True):
            if o < 0:
                dims.append(None)
                continue
            at = [] if out is None else [d for d, g in enumerate(out.dims) if letter in g]
            if out is None or out.values == letter or (at and out.dims[at[0]] != group):
                return
            dims.append(at[0] if at else None)
        values = [given[i].value if i in given else v for i, v in enumerate(reads)]
        outs = tuple(-1 if o < 0 else self.next + i for i, o in enumerate(n.outs))
        self.next += len(outs)
        for o, new, dim in zip(n.outs, outs, dims, strict=True):
            if o < 0:
                continue
            self.metas[new] = self.metas[o]
            if dim is None:
                self.same[o] = new
            else:
                self.of[o] = SortedRows(sort, dim, new)
        args, kwargs = substitute_all(call.args, call.kwargs, lambda i: Ref(values[i]))
        self.look(self.put(replace(n, args=args, kwargs=kwargs, outs=outs)))

    # -- helpers of the rules ----------------------------------------------------------------------

    def rows_of(self, value: int, sort: int, dim: int = 0) -> int | None:
        """The value that ``value`` reorders along ``dim``; None where it does not."""
        found = self.of.get(value)
        return found.value if found is not None and (found.sort, found.dim) == (sort, dim) else None

    def is_zero(self, value: int) -> bool:
        maker = self.made.get(value)
        return maker is not None and maker.op == "aten.full.default" and maker.args[1] == 0

    def repeat(self, n: Node, value: int, times: int) -> int:
        """Repeat every row ``times`` times; returns the new value."""
        shape, dtype = self.metas[value].shape, self.metas[value].dtype
        value = self.add(n, "aten.unsqueeze.default", (Ref(value), 1), Meta((shape[0], 1, *shape[1:]), dtype))
        wide = Meta((shape[0], times, *shape[1:]), dtype)
        value = self.add(n, "aten.expand.default", (Ref(value), wide.shape), wide)
        value = self.add(n, "aten.clone.default", (Ref(value),), wide, memory_format=Symbol("torch.contiguous_format"))
        rows = Meta((shape[0] * times, *shape[1:]), dtype)
        return self.add(n, "aten.view.default", (Ref(value), rows.shape), rows)

    def sum_each(self, n: Node, value: int, times: int) -> int:
        """Sum every ``times`` consecutive rows; returns the new value."""
        shape, dtype = self.metas[value].shape, self.metas[value].dtype
        parts = Meta((shape[0] // times, times, *shape[1:]), dtype)
        value = self.add(n, "aten.view.default", (Ref(value), parts.shape), parts)
        return self.add(n, "aten.sum.dim_IntList", (Ref(value), (1,)), Meta((parts.shape[0], *shape[1:]), dtype))


def _pointwise(call: OpCall) -> bool:
    """Whether each output element depends only on the input elements at its place, and not on the place itself."""
    indices = index_call(call)
    return indices is not None and all(
        t is not None and all(len(g) < 2 for g in t.dims) and t.dims == indices.ins[0].dims and not t.values
        for t in (*indices.ins, *indices.outs)
    )


def _sort(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    if len(call.ins[0].shape) != 1 or n.outs[1] < 0:
        return
    (keys,), number = reads, len(walk.key_of)
    walk.key_of[number] = keys
    if not bind(call)[-1]:  # ascending
        walk.keys[keys] = number
    places = Meta(call.ins[0].shape, "int64")
    before = walk.add(n, "aten.arange.default", places.shape, places, device=Symbol("device:cpu"))
    walk.step[before] = 1
    for o, value in zip(n.outs, (keys, before), strict=True):
        if o >= 0:
            walk.of[o] = SortedRows(number, 0, value)


def _arange(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    if len(call.args) == 1:
        walk.step[n.outs[0]] = 1


def _any_order(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    walk.alike.update(n.outs)


def _cast(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    for known in (walk.keys, walk.counts, walk.ends, walk.step, walk.inverse):
        if reads[0] in known:
            known[n.outs[0]] = known[reads[0]]


def _divide(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    by, mode = call.args[1], dict(call.kwargs).get("rounding_mode", "floor")
    if reads[0] in walk.step and isinstance(by, int) and by > 0 and mode is not None:
        walk.step[n.outs[0]] = walk.step[reads[0]] * by


def _index(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    """Index rows by the sort's permutation, or by its inverse, which undoes the sort."""
    if len(reads) != 2 or call.args[1][0] is None:
        return
    source, index = reads
    if index in walk.inverse:
        value = walk.rows_of(source, walk.inverse[index])
        if value is not None:
            walk.same[n.outs[0]] = value
        return
    found = walk.of.get(index)
    times = walk.step.get(found.value) if found else None
    if found is None or times is None or source in walk.of:
        return
    if walk.metas[source].shape[0] * times == walk.metas[index].shape[0]:
        value = source if times == 1 else walk.repeat(n, source, times)
        walk.of[n.outs[0]] = SortedRows(found.sort, 0, value)


def _index_put(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    """The inverse of ``_index``: its gradient, and the inversion of a permutation."""
    if len(reads) != 3 or call.args[1][0] is None:
        return
    base, index, source = reads
    replaces = not (len(call.args) > 3 and call.args[3]) or walk.is_zero(base)
    if not replaces:
        return
    if index in walk.inverse:
        if source not in walk.of and walk.metas[source] == walk.metas[base]:
            walk.of[n.outs[0]] = SortedRows(walk.inverse[index], 0, source)
        return
    found = walk.of.get(index)
    times = walk.step.get(found.value) if found else None
    if found is None or times is None or walk.metas[base].shape[0] * times != walk.metas[index].shape[0]:
        return
    value = walk.rows_of(source, found.sort)
    if value is None:
        if times == 1 and walk.step.get(source) == 1:
            walk.inverse[n.outs[0]] = found.sort
    elif times == 1 and walk.metas[source] == walk.metas[base]:
        walk.same[n.outs[0]] = value
    elif walk.is_zero(base):
        walk.same[n.outs[0]] = walk.sum_each(n, value, times)


def _histogram(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    """A histogram of whole numbers from 0 on, with one bin for each number, counts the keys."""
    _, bins, low, high = bind(call)
    found = walk.of.get(reads[0])
    sort = walk.keys.get(found.value if found else reads[0])
    if sort is not None and low == 0 and high == bins - 1:
        walk.counts[n.outs[0]] = sort


def _cumsum(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    if reads[0] in walk.counts:
        walk.ends[n.outs[0]] = walk.counts[reads[0]]


def _search(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    """A search for 0, 1, … in the sorted keys, from the right, gives where the rows of each key end."""
    given = dict(call.kwargs)
    right = given.get("right") or given.get("side") == "right"
    found = walk.of.get(reads[0])
    if right and found and found.value in walk.keys and len(reads) == 2 and walk.step.get(reads[1]) == 1:
        walk.ends[n.outs[0]] = found.sort


def _product(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    """Sorted rows times the matrix of their group; or, for its gradient, the rows of each group with each other."""
    if len(reads) != 3 or reads[2] not in walk.ends:
        return
    left, right, sort = reads[0], reads[1], walk.ends[reads[2]]
    dims, (out,) = len(walk.metas[right].shape), n.outs
    x = walk.rows_of(left, sort)
    if x is not None and dims == 3 and right not in walk.of:
        walk.of[out] = SortedRows(sort, 0, _grouped(walk, n, x, right, sort))
        return
    x, grad = walk.rows_of(left, sort, 1), walk.rows_of(right, sort)
    if x is not None and grad is not None:
        walk.same[out] = _grouped_weight(walk, n, _transposed(walk, n, x), grad, sort, walk.metas[out])


def _product_backward(walk: _Walk, n: Node, call: OpCall, reads: tuple[int, ...]) -> None:
    """The backward op of the grouped product in ``transformers``: the gradients of both operands."""
    left, weight, ends, upstream = reads
    if ends not in walk.ends:
        return
    sort = walk.ends[ends]
    x, grad = walk.rows_of(left, sort), walk.rows_of(upstream, sort)
    if x is None or grad is None:
        return
    if n.outs[0] >= 0:
        walk.of[n.outs[0]] = SortedRows(sort, 0, _grouped(walk, n, grad, _transposed(walk, n, weight), sort))
    if n.outs[1] >= 0:
        walk.same[n.outs[1]] = _grouped_weight(walk, n, x, grad, sort, walk.metas[n.outs[1]])


def _grouped(walk: _Walk, n: Node, x: int, weight: int, sort: int) -> int:
    rows, (groups, _, width) = walk.metas[x], walk.metas[weight].shape
    args = (Ref(x), Ref(weight), Ref(walk.key_of[sort]), 0, groups)
    return walk.add(n, GROUPED, args, Meta((rows.shape[0], width), rows.dtype))


def _grouped_weight(walk: _Walk, n: Node, x: int, grad: int, sort: int, meta: Meta) -> int:
    args = (Ref(x), Ref(grad), Ref(walk.key_of[sort]), 0, meta.shape[0], meta.shape[0])
    return walk.add(n, GROUPED_WEIGHT, args, meta)


def _transposed(walk: _Walk, n: Node, value: int) -> int:
    *outer, rows, columns = walk.metas[value].shape
    meta = Meta((*outer, columns, rows), walk.metas[value].dtype)
    return walk.add(n, "aten.transpose.int", (Ref(value), -2, -1), meta)


Rule = Callable[[_Walk, Node, OpCall, tuple[int, ...]], None]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(SORTS, _sort),
    **dict.fromkeys(CASTS, _cast),
    "aten.arange.default": _arange,
    "aten.full.default": _any_order,
    UNIFORM: _any_order,
    "aten.floor_divide.default": _divide,
    "aten.div.Tensor_mode": _divide,
    "aten.div.Scalar_mode": _divide,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.histc.default": _histogram,
    "aten.cumsum.default": _cumsum,
    "aten.searchsorted.Tensor": _search,
    "aten._grouped_mm.default": _product,
    "transformers.grouped_mm_fallback.default": _product,
    "transformers.grouped_mm_fallback_backward.default": _product_backward,
}
