"""Notes for users: on ops without a line in the table, and on attention that does not go around a ring."""

from __future__ import annotations

import torch

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.sbp import device_count
from actorflow_compiler.graph.graph import Graph, call_of
from actorflow_compiler.hints.goal import Goal, ParallelMode
from actorflow_compiler.infer.axes import GraphLayouts
from actorflow_compiler.infer.sequence_axis import BATCHED, SOFTMAXES
from actorflow_compiler.signatures import signatures
from actorflow_compiler.signatures.registration import find_registration
from actorflow_compiler.signatures.ring_signatures import why_not
from actorflow_compiler.signatures.table import has_line

SHOWN = 6  # signatures in a line


def notes_on(graph: Graph) -> tuple[str, ...]:
    """A line for each op without a line in the table: whether registered or discovered, and its signatures.

    ``mylib.scale.default: signatures discovered: S(0), B -> S(0); P, B -> P``
    """
    found: dict[str, dict[str, None]] = {}  # op → lines of text, in order
    source: dict[str, str] = {}
    for n in graph.nodes:
        if has_line(n.op) or n.placement is None or n.op.startswith("actorflow."):
            continue
        call, _ = call_of(n, graph.metas)
        for parts in {p for p in n.placement.axes if device_count(p) > 1}:
            known = found.setdefault(n.op, {})
            for signature in signatures(call, parts)[1:]:
                known[str(signature)] = None
                source[n.op] = signature.source
    lines = []
    for op, texts in found.items():
        if texts:
            more = f"; … ({len(texts)} in all)" if len(texts) > SHOWN else ""
            lines.append(f"{op}: signatures {source[op]}: {'; '.join(list(texts)[:SHOWN])}{more}")
        else:
            what = "no signature registered for it fits" if find_registration(op) else "no signatures discovered"
            lines.append(f"{op}: {what}; it runs on whole tensors")
    return tuple(lines)


def ring_notes(graph: Graph, layouts: GraphLayouts, goal: Goal) -> tuple[str, ...]:
    """For each axis for a ring a line about attention that does not go around it, with the reason."""
    lines = []
    written_out = _scores(graph)
    axes = range(max((len(p.hierarchy) for p in layouts.placement.values()), default=0))
    for axis in (a for a in axes if goal.mode(a) == ParallelMode.RING):
        why: dict[str, dict[str, None]] = {}  # reason → where
        for n, chosen in zip(graph.nodes, layouts.chosen, strict=True):
            attends = "_scaled_dot_product" in n.op and "backward" not in n.op
            assert n.placement is not None
            if not (attends or n.outs[0] in written_out) or axis >= len(chosen) or chosen[axis].inner:
                continue
            call, _ = call_of(n, graph.metas)
            if device_count(n.placement.axes[axis]) > 1 and n.phase == Phase.FORWARD:
                reason = why_not(call, n.placement.axes[axis]) if attends else "it is written out in products"
                why.setdefault(reason or "another axis splits its positions", {})[n.where or n.line or n.op] = None
        for reason, places in why.items():
            where = ", ".join(list(places)[:SHOWN]) + (" …" if len(places) > SHOWN else "")
            lines.append(f'parallel="ring": attention ({where}) does not go around the ring, as {reason}')
    return tuple(lines)


def _scores(graph: Graph) -> frozenset[int]:
    """The softmaxes that a batch of products reads, through views, casts and dropout."""
    made: dict[int, int] = {}  # value → the softmax that it is made of
    found: set[int] = set()
    for n in graph.nodes:
        reads = {made[v] for v in n.reads() if v in made}
        if n.op in SOFTMAXES:
            made[n.outs[0]] = n.outs[0]
        elif n.op in BATCHED:
            found.update(reads)
        elif len(reads) == len(n.outs) == 1:
            made[n.outs[0]] = reads.pop()
    return frozenset(found)


def tell_traced(device: torch.device, kind: str) -> tuple[str, ...]:
    """A note if a step for one kind of device was traced on another kind."""
    if device.type == kind:
        return ()
    return (
        f"traced with the {device.type.upper()}'s kernels, as this process reaches no {kind} device: attention and "
        f"autocast may be other ones there",
    )
