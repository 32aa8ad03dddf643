"""Decompose ops that have inner signatures: choose signatures for the simpler ops, and price their communication.

An inner signature is one by which devices exchange something small inside the op (``signatures/inner.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.boxing.routes import bytes_moved
from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.op_call import GRAPHS, GRAPHS_STAY
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.sbp import B, NdSbp, Parts, Sbp, Split, device_count, largest
from actorflow_compiler.custom_ops.ring_attention import PASS_ON
from actorflow_compiler.graph.graph import Graph, Node, call_of, verify
from actorflow_compiler.infer.axes import GraphLayouts
from actorflow_compiler.infer.inner_decompositions import BODIES, Cuts
from actorflow_compiler.infer.ring_decompositions import RING_BODIES
from actorflow_compiler.rewriting.expand import instantiate, trace
from actorflow_compiler.signatures import OpCall, Signature, local_call, signatures
from actorflow_compiler.signatures.ring_signatures import STEPS

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class DecomposedOp:
    """An op decomposed into simpler ones."""

    graph: Graph  # its inputs are the op's operands, its results the outputs that are used
    chosen: tuple[tuple[Signature, ...], ...]  # node by node: one signature for each mesh axis
    costs: tuple[tuple[float, int], ...]  # for each axis: bytes that all its devices send together, communications


def inner_cost(call: OpCall, signature: Signature, parts: Parts) -> tuple[float, int]:
    """Bytes that the devices ``parts`` send in all, and the number of communications; (0, 0) if it is not inner."""
    if not signature.inner:
        return 0.0, 0
    (cost,) = decompose(call, (signature,), (parts,)).costs
    return cost


@kept_while_compiling(GRAPHS, stay=GRAPHS_STAY)
def decompose(call: OpCall, chosen: tuple[Signature, ...], axes: tuple[Parts, ...]) -> DecomposedOp:
    """Decompose an op, at least one of whose signatures is inner; ``chosen`` has one for each of a mesh's ``axes``."""
    graph = trace(call, functools.partial(_run, call, _cuts(chosen, axes)))
    assert graph is not None, call
    assert [graph.metas[r] for r in graph.results] == [m for m in call.outs if m is not None], call
    calls = [call_of(n, graph.metas) for n in graph.nodes]
    local = [c for c, _ in calls]
    metas = dict(graph.metas)
    found: list[list[Signature]] = [[] for _ in calls]
    costs = []
    for signature, parts in zip(chosen, axes, strict=True):
        walk = _SignaturePropagation(parts, metas)
        walk.layout = {i.value: s for i, s in zip(graph.inputs, signature.ins, strict=True)}
        for k, (n, (_, operands)) in enumerate(zip(graph.nodes, calls, strict=True)):
            found[k].append(walk.node(local[k], operands, n.outs))
            local[k] = local_call(local[k], found[k][-1], parts, largest(parts))
        wanted = [s for s in signature.outs if s is not None]
        for r, s in zip(graph.results, wanted, strict=True):
            walk.give(r, s)
        costs.append((walk.moved, walk.communications))
        for (_, operands), c, n in zip(calls, local, graph.nodes, strict=True):
            metas.update(zip(operands, c.ins, strict=True))
            metas.update({o: m for o, m in zip(n.outs, c.outs, strict=True) if o >= 0 and m is not None})
    return DecomposedOp(graph, tuple(map(tuple, found)), tuple(costs))


def _cuts(chosen: tuple[Signature, ...], axes: tuple[Parts, ...]) -> Cuts:
    """Which dims of the first operand are split inside, and over which devices on each axis."""
    cuts: dict[int, tuple[Parts, ...]] = {}
    for signature, parts in zip(chosen, axes, strict=True):
        if signature.inner:
            split = signature.ins[0]
            assert isinstance(split, Split), signature
            cuts[split.dim] = (*cuts.get(split.dim, ()), parts)
    return tuple(sorted(cuts.items()))


def _run(call: OpCall, cuts: Cuts, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """Run the op's decomposition, in float32 where it would sum in 16 bits; attention's kernel does that by itself."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in NARROW else value

    if call.op in RING_BODIES:
        made = RING_BODIES[call.op](cuts, *args, **kwargs)
    else:
        args, kwargs = pytree.tree_map(wide, (args, kwargs))
        made = BODIES[call.op](cuts, *args, **kwargs)
    outs = made if isinstance(made, tuple) else (made,)
    return [
        None if out is None or meta is None else out.to(getattr(torch, meta.dtype))
        for out, meta in zip(outs, call.outs, strict=True)
    ]


class _SignaturePropagation:
    """Chooses, for each op of a decomposition in order, the signature that moves the fewest bytes.

    A value that has to move is gathered, or added up, as a whole.  No value is split anew or made a partial sum: the
    ops follow the split of the operands.
    """

    def __init__(self, parts: Parts, metas: Mapping[int, Meta]) -> None:
        self.parts, self.count, self.metas = parts, device_count(parts), metas
        self.layout: dict[int, Sbp] = {}
        self.given: set[tuple[int, Sbp]] = set()
        self.moved = 0.0
        self.communications = 0

    def node(self, call: OpCall, operands: tuple[int, ...], outs: tuple[int, ...]) -> Signature:
        have = [self.layout[v] for v in operands]
        options = [
            s
            for s in signatures(
                call, self.parts, wanted=[h for h in have if isinstance(h, Split)], inner=call.op in STEPS
            )
            if all(_follows(h, need) for h, need in zip(have, s.ins, strict=True))
        ]

        def price(s: Signature) -> tuple[float, int]:
            if s.inner:  # a step around a ring
                return 0.0, 0
            needs = set(zip(operands, s.ins, strict=True))
            return sum(self.bytes(v, need) for v, need in needs), sum(self.layout[v] != need for v, need in needs)

        best = min(options, key=price)
        for v, need in zip(operands, best.ins, strict=True):
            self.give(v, need)
        if best.inner and call.op == PASS_ON:
            self.moved += call.ins[0].nbytes
            self.communications += 1
        self.layout.update({o: s for o, s in zip(outs, best.outs, strict=True) if o >= 0 and s is not None})
        return best

    def bytes(self, value: int, need: Sbp) -> float:
        """Bytes sent to give a value to one more reader."""
        if (value, need) in self.given:
            return 0.0
        return bytes_moved(self.layout[value], need, self.metas[value].nbytes, self.count, self.count, True)

    def give(self, value: int, need: Sbp) -> None:
        moved = self.bytes(value, need)
        self.moved += moved
        self.communications += moved > 0
        self.given.add((value, need))


def _follows(have: Sbp, need: Sbp) -> bool:
    """Whether a reader may need a value in a layout: unchanged, whole, or a split of a whole value."""
    return need in (have, B) or (have == B and isinstance(need, Split))


def decompose_inner(graph: Graph, layouts: GraphLayouts) -> tuple[Graph, GraphLayouts]:
    """Replace every op one of whose signatures is inner by its decomposition; values keep their numbers.

    A result of such an op may have another layout afterwards (a partial sum, say); boxing for its readers starts there.
    """
    metas = dict(graph.metas)
    fresh = itertools.count(max(metas, default=0) + 1)
    value, placement = dict(layouts.value), dict(layouts.placement)
    nodes: list[Node] = []
    operands: list[tuple[NdSbp, ...]] = []
    chosen: list[tuple[Signature, ...]] = []
    for n, needs, picked in zip(graph.nodes, layouts.operands, layouts.chosen, strict=True):
        if not any(s.inner for s in picked):
            nodes.append(n)
            operands.append(needs)
            chosen.append(picked)
            continue
        assert n.placement is not None
        call, reads = call_of(n, graph.metas)
        body = decompose(call, picked, n.placement.axes)
        number = {i.value: v for i, v in zip(body.graph.inputs, reads, strict=True)}
        number |= dict(zip(body.graph.results, (o for o in n.outs if o >= 0), strict=True))
        made = instantiate(body.graph, n, number, metas, fresh)
        for m, found in zip(made, body.chosen, strict=True):
            operands.append(tuple(zip(*(s.ins for s in found), strict=True)))
            for k, o in enumerate(m.outs):
                if o >= 0:
                    value[o] = tuple(layout for s in found if (layout := s.outs[k]) is not None)
                    placement[o] = n.placement
        nodes += made
        chosen += body.chosen
    out = replace(layouts, value=value, placement=placement, operands=operands, chosen=chosen)
    return verify(replace(graph, nodes=tuple(nodes), metas=metas)), out
