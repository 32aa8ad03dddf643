"""Keys of masks: two masks have equal keys only if they are known to hold the same values.

Two results of a trace are the same if the same ops computed them from the same tensors, none of which was written in
between.  The values of a mask that depends on constants alone are known during capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.core.torch_internals import (
    OpOverload,
    constant_in_trace,
    constant_of,
    node_of,
    real_tensors,
    schema_of,
)

__all__ = ["MaskKey", "known_indices", "version"]

aten = torch.ops.aten
MAX_OPS = 300  # at most, to compare or compute for a key
MAX_ELEMENTS = 1 << 20  # of a mask whose values are computed during capture


def version(tensor: Tensor) -> int:
    """A counter of the writes to a tensor's memory: torch's ``_version``, or in inference mode those in the trace."""
    if not tensor.is_inference():
        return tensor._version
    node = _trace_node(tensor)
    if node is None:
        return 0
    root = _memory_owner(node)
    return sum(_is_write(n) and any(_memory_owner(c) is root for c in n.all_input_nodes) for n in node.graph.nodes)


class MaskKey:
    """The key of a tensor with its current values."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version, self._node = tensor, version(tensor), _trace_node(tensor)

    def __hash__(self) -> int:
        return hash(MaskKey)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskKey):
            return NotImplemented
        if self._tensor is other._tensor:
            return self._version == other._version
        return self._node is not None and other._node is not None and _computes_same(self._node, other._node)


def _computes_same(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether two nodes of a trace are known to compute the same values."""
    pairs, seen = [(one, other)], set[tuple[torch.fx.Node, torch.fx.Node]]()
    while pairs:
        a, b = (_without_repeats(n) for n in pairs.pop())
        if a is b or (a, b) in seen:
            continue
        seen.add((a, b))
        if len(seen) > MAX_OPS or not _is_plain(a) or not _is_plain(b) or a.target != b.target:
            return False
        mine, form = pytree.tree_flatten((a.args, a.kwargs))
        theirs, form_of_theirs = pytree.tree_flatten((b.args, b.kwargs))
        if form != form_of_theirs:
            return False
        for x, y in zip(mine, theirs, strict=True):
            if isinstance(x, torch.fx.Node) and isinstance(y, torch.fx.Node):
                pairs.append((x, y))
            elif type(x) is not type(y) or x != y:
                return False
    touched = {n for pair in seen for node in pair for n in (node, *node.all_input_nodes)}
    return not _written_since(one.graph, touched, {node for pair in seen for node in pair})


def known_indices(mask: Tensor) -> tuple[Tensor, ...] | None:
    """The indices along each dim that a mask selects, if it depends on constants alone; else None."""
    values = _known_values(mask)
    if values is None:
        return None
    with real_tensors():
        columns = [c.tolist() for c in values.nonzero(as_tuple=True)]
    return tuple(torch.tensor(c, dtype=torch.long, device=mask.device) for c in columns)


def _known_values(mask: Tensor) -> Tensor | None:
    constant = constant_of(mask)
    if constant is not None:
        return constant
    node = _trace_node(mask)
    if node is None or mask.numel() > MAX_ELEMENTS:
        return None
    needed, pending = set[torch.fx.Node](), [node]
    while pending:
        n = pending.pop()
        if n in needed:
            continue
        needed.add(n)
        if len(needed) > MAX_OPS or not (_is_plain(n) or n.op == "get_attr"):
            return None
        pending += n.all_input_nodes
    if _written_since(node.graph, needed, needed):
        return None
    values: dict[torch.fx.Node, Any] = {}
    constants = {n: constant_in_trace(str(n.target)) for n in needed if n.op == "get_attr"}
    with real_tensors(), torch.no_grad():
        for n in node.graph.nodes:
            if n not in needed:
                continue
            if n.op == "get_attr":
                values[n] = constants[n]
                if values[n] is None:
                    return None
            else:
                args, kwargs = pytree.tree_map_only(torch.fx.Node, values.__getitem__, (n.args, n.kwargs))
                values[n] = n.target(*args, **kwargs)
    found = values[node]
    return found if isinstance(found, Tensor) and found.shape == mask.shape else None


def _is_plain(node: torch.fx.Node) -> bool:
    """Whether a node is an ATen op that writes no tensor and draws no random numbers."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, OpOverload):
        return False
    return op.namespace == "aten" and not schema_of(op).is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def _written_since(graph: torch.fx.Graph, touched: set[torch.fx.Node], since: set[torch.fx.Node]) -> bool:
    """Whether the memory of one of some nodes was written after the first of ``since``."""
    roots = {_memory_owner(n) for n in touched}
    begun = False
    for n in graph.nodes:
        begun = begun or n in since
        if not begun or not _is_write(n):
            continue
        changed: Sequence[torch.fx.Node] = n.all_input_nodes
        if any(_memory_owner(c) in roots for c in changed):
            return True
    return False


def _without_repeats(node: torch.fx.Node) -> torch.fx.Node:
    """The node of the original tensor, if ``node`` selects one repetition of it along a new dim; else ``node``."""
    while node.target is aten.select.int:
        spread, dim, *_ = node.args
        if not isinstance(spread, torch.fx.Node) or spread.target is not aten.expand.default:
            break
        one = spread.args[0]
        if not isinstance(one, torch.fx.Node) or one.target is not aten.unsqueeze.default:
            break
        of, new = one.args
        shapes: list[Any] = [
            n.meta["val"].shape if isinstance(n, torch.fx.Node) and "val" in n.meta else None
            for n in (of, spread, node)
        ]
        if None in shapes or shapes[0] != shapes[2] or not isinstance(new, int) or not isinstance(dim, int):
            break
        dims = len(shapes[1])
        if dims != len(shapes[0]) + 1 or new % dims != dim % dims:
            break
        assert isinstance(of, torch.fx.Node)
        node = of
    return node


def _is_write(node: torch.fx.Node) -> bool:
    """Whether a node is an op that writes its arguments."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _memory_owner(node: torch.fx.Node) -> torch.fx.Node:
    """The node in whose memory a view lies."""
    while isinstance(node.target, OpOverload) and node.all_input_nodes:
        returns = schema_of(node.target).returns
        if not returns or returns[0].alias_info is None:
            break
        node = node.all_input_nodes[0]
    return node


def _trace_node(tensor: Tensor) -> torch.fx.Node | None:
    """The node of the current trace that makes a tensor; None for a tensor from outside."""
    found = node_of(tensor)
    return None if found is None else found[0]
