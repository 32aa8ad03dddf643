"""Mixtures of experts along a mesh axis that users want for the experts: each device has some, and computes their rows.

Experts are parameters of three dims or more, one matrix for each, by which a grouped product (rows choose their
expert) or a batch of products (each expert has rows of its own) multiplies.

Between two grouped products of an expert, rows are treated one by one (an activation, a gate).  A device computes only
the rows of its experts there, and the next product reads no others, so nothing is exchanged: such values are *inside*.
They lie as broadcast ones, though rows of other devices' experts have no meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.op_call import first_out
from actorflow_compiler.core.ops import Meta, Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Sbp, Split, numel
from actorflow_compiler.custom_ops.grouped_mm import GROUPED, GROUPED_WEIGHT
from actorflow_compiler.graph.graph import Graph, InputKind, Node, call_of
from actorflow_compiler.hints.goal import Goal, ParallelMode
from actorflow_compiler.hints.hints import LayoutHint, ResolvedHints
from actorflow_compiler.signatures import OpCall, Signature, signatures

BATCHED = frozenset({"aten.bmm.default", "aten.baddbmm.default"})
MATRICES = 3  # dims of stacked matrices
TRIED = 2  # devices for which signatures are asked, to follow a dim
WITHIN = Signature((B, Split(0), B), (B,), "e")  # of a grouped product whose result is inside
ORIGIN = 'parallel="expert"'


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The products with experts' matrices, and what is between them, by the number of their first output."""

    grouped: frozenset[int] = frozenset()  # grouped products, also those that make the matrices' gradients
    inside: frozenset[int] = frozenset()  # values of which a device has the rows of its experts
    weights: frozenset[int] = frozenset()  # experts' matrices, and views and casts of them: never gathered

    def options(self, node: Node, legal: tuple[Signature, ...]) -> tuple[Signature, ...]:
        """The options of an op along the axis of the experts."""
        if node.outs[0] in self.grouped:
            return (WITHIN,) if node.outs[0] in self.inside else tuple(s for s in legal if s.letter == "e")
        return legal[:1] if not self.inside.isdisjoint(node.outs) else legal

    def allow(self, node: Node, reads: Collection[int], signature: Signature) -> bool:
        """Whether an op that makes or reads values that are inside may have a signature along the experts' axis."""
        if node.outs[0] in self.grouped:
            return signature == WITHIN if node.outs[0] in self.inside else signature.letter == "e"
        if self.inside.isdisjoint(reads):
            return self.inside.isdisjoint(node.outs)
        return self.inside.issuperset(o for o in node.outs if o >= 0) and all(s == B for s in signature.ins)


NO_EXPERTS = ExpertProducts()

# ---- the parameters


def expert_dims(graph: Graph) -> tuple[Mapping[str, int], frozenset[int]]:
    """Parameter → the dim along which its experts are stacked; and the values that are parameters, views or casts."""
    at: dict[int, dict[int, tuple[str, int]]] = {}  # value → its dim → a parameter, and the dim of it that it is
    for i in graph.inputs:
        rank = len(graph.metas[i.value].shape)
        if i.kind == InputKind.VARIABLE and rank >= MATRICES:
            at[i.value] = {d: (i.name, d) for d in range(rank)}
    grouped: dict[str, int] = {}
    batched: dict[str, int] = {}
    for n in graph.nodes if at else ():
        call, reads = call_of(n, graph.metas)
        if n.phase == Phase.OPTIMIZER:
            continue
        if call.op == GROUPED:
            grouped.update([at[reads[1]][0]] if 0 in at.get(reads[1], ()) else [])
        elif call.op in BATCHED:
            batched.update(at[v][0] for v in reads if 0 in at.get(v, ()))
        elif len(n.outs) == len(set(reads)) == 1 and n.outs[0] >= 0 and reads[0] in at:
            at[n.outs[0]] = dict(_followed(call, at[reads[0]]))
    found = grouped or batched
    return found, frozenset(v for v, dims in at.items() if any(name in found for name, _ in dims.values()))


def _followed(call: OpCall, dims: Mapping[int, tuple[str, int]]) -> list[tuple[int, tuple[str, int]]]:
    """The dims of an op's output that are those of its operand."""
    if numel(call.ins[0].shape) != numel(first_out(call).shape):
        return []
    pairs = [(s.ins[0], s.outs[0]) for s in signatures(call, TRIED)]
    return [(b.dim, dims[a.dim]) for a, b in pairs if _plain(a) and _plain(b) and a.dim in dims]


def _plain(layout: Sbp | None) -> TypeGuard[Split]:
    return isinstance(layout, Split) and layout.blocks == layout.unit == 1


def split_experts(graph: Graph, owners: Mapping[str, Placement], hints: ResolvedHints, goal: Goal) -> ResolvedHints:
    """The hints, with one more for each parameter with experts: it is split along them on the axes for experts.

    Raises LayoutError if there is none, or one with fewer experts than devices.
    """
    axes = {name: [a for a, n in enumerate(p.hierarchy) if n > 1 and goal.mode(a) == ParallelMode.EXPERT]
            for name, p in owners.items()}  # fmt: skip
    if not any(axes.values()):
        return hints
    dims, _ = expert_dims(graph)
    shapes: Mapping[str, Meta] = {i.name: graph.metas[i.value] for i in graph.inputs}
    if not dims:
        raise LayoutError(
            f"{ORIGIN} was asked for; no parameter with experts was found in the step. Experts are looked for among "
            f"parameters of {MATRICES} dims, one matrix for each expert, that a grouped product or a batch of products "
            f"(torch.bmm, einsum) multiplies by; rows sorted for a grouped product are to be put back before anything "
            f'else reads them. Stack the weights of experts that are modules of their own, or use "data" or "tensor" '
            f"for this axis"
        )
    layouts = dict(hints.layouts)
    for name, dim in dims.items():
        given = layouts.get(name, LayoutHint((), ORIGIN))
        wish: list[Sbp | None] = [*given.wish, *(None,) * (len(owners[name].hierarchy) - len(given.wish))]
        for axis in axes[name] if name not in hints.homes else ():
            devices, experts = owners[name].hierarchy[axis], shapes[name].shape[dim]
            if experts < devices:
                raise LayoutError(
                    f"{ORIGIN} was asked for over {devices} devices; {name} of shape {shapes[name].shape} has "
                    f"{experts} experts, {devices} at least were expected. Use fewer devices for this axis"
                )
            wish[axis] = wish[axis] or Split(dim)
        layouts[name] = replace(given, wish=tuple(wish))
    zero = {n: replace(z, stage=min(z.stage, 2)) if z.axis in axes.get(n, ()) and n in dims else z
            for n, z in hints.zero.items()}  # fmt: skip
    return replace(hints, layouts=layouts, zero=zero)


# ---- the products


@dataclass(frozen=True, slots=True)
class Rows:
    """Which dim of a value that is inside has the rows, and the value that says which expert each of them has."""

    group: int
    dim: int


def expert_products(graph: Graph) -> ExpertProducts:
    """Find the products with experts, and the values that are inside."""
    _, weights = expert_dims(graph)
    calls = [call_of(n, graph.metas) for n in graph.nodes]
    groups = {reads[2] for (call, reads) in calls if call.op == GROUPED and reads[1] in weights}
    readers: dict[int, list[int]] = {}
    grouped: dict[int, int] = {}  # node → the value that says which row is whose
    for k, (n, (call, reads)) in enumerate(zip(graph.nodes, calls, strict=True)):
        for v in set(reads):
            readers.setdefault(v, []).append(k)
        multiplies = call.op == GROUPED_WEIGHT or (call.op == GROUPED and reads[1] in weights)
        if n.phase != Phase.OPTIMIZER and multiplies and reads[2] in groups:
            grouped[k] = reads[2]
    kept = {*graph.results, *(new for _, new in graph.updates)}
    inside: dict[int, Rows] = {}
    for k in grouped:
        if calls[k][0].op == GROUPED:
            inside.update(_inside(graph, calls, readers, grouped, kept, inside, k))
    return ExpertProducts(frozenset(graph.nodes[k].outs[0] for k in grouped), frozenset(inside), weights)


def _inside(
    graph: Graph, calls: Sequence[tuple[OpCall, tuple[int, ...]]], readers: Mapping[int, Sequence[int]],
    grouped: Mapping[int, int], kept: Collection[int], known: Mapping[int, Rows], start: int,
) -> Mapping[int, Rows]:  # fmt: skip
    """The values made of a grouped product's rows one by one; none if one of them is read by anything else."""
    group, place = grouped[start], graph.nodes[start].placement
    found = {graph.nodes[start].outs[0]: Rows(group, 0)}
    todo = list(found)
    while todo:
        value = todo.pop()
        if value in kept:
            return {}
        for k in readers.get(value, ()):
            n, (call, reads) = graph.nodes[k], calls[k]
            taken = {i: rows for i, v in enumerate(reads) if (rows := found.get(v) or known.get(v)) is not None}
            if n.placement != place or n.phase == Phase.OPTIMIZER or any(r.group != group for r in taken.values()):
                return {}
            if k in grouped:
                of_rows = {0} if call.op == GROUPED else {0, 1}
                if grouped[k] != group or not taken.keys() <= of_rows or any(r.dim for r in taken.values()):
                    return {}
                continue
            dims = _row_by_row(call, {i: r.dim for i, r in taken.items()})
            if dims is None:
                return {}
            for o, dim in zip(n.outs, dims, strict=True):
                if o >= 0 and o not in found:
                    found[o] = Rows(group, dim)
                    todo.append(o)
    return found


def _row_by_row(call: OpCall, dims: Mapping[int, int]) -> tuple[int, ...] | None:
    """The dims of an op's outputs that are the rows of these operands, which are along ``dims``.

    None if a row of an output depends on several rows of an operand.
    """
    sizes = {call.ins[i].shape[d] for i, d in dims.items()}
    for s in signatures(call, TRIED):
        if s.letter is not None and all(s.ins[i] == Split(d) for i, d in dims.items()):
            made = [o.dim if _plain(o) else -1 for o in s.outs]
            outs = zip(s.outs, call.outs, made, strict=True)
            if all(m is None or (_plain(o) and {m.shape[d]} == sizes) for o, m, d in outs):
                return tuple(made)
    return None
