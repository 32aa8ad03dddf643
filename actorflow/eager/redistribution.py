"""Move a tensor from one layout to another: each rank passes its old part and receives its new one.

``actorflow_compiler.boxing.routes`` plans the hops, as for jobs; here each hop of a route is carried out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from actorflow.eager.communicator import WIDE, CollectiveLabel, EagerCommunicator
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.layout import NOWHERE, Layout
from actorflow.eager.lineage import Lineage
from actorflow.transport.redistribution import cut, cut_like, run_of, split_run
from actorflow_compiler.boxing.routes import BoxCopy, Hop, HopKind, route
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.plan import Box
from actorflow_compiler.plan.region import device_shape

__all__ = ["part_in", "redistribute"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HopStep:
    """One rank's side of a hop."""

    kind: HopKind
    ranks: tuple[int, ...]  # that exchange, this one among them
    send: tuple[tuple[Box, ...], ...]  # for each of ``ranks``, the boxes of this rank's part to send to it
    receive: tuple[tuple[Box, ...], ...]  # for each of ``ranks``, the boxes of the new part to receive from it
    counts: tuple[int, ...]  # elements that each of the other ``ranks`` sends
    shape: Shape  # of the new part
    add: bool


def part_in(x: GlobalTensor, target: Layout, why: str) -> Tensor:
    """The part of a global tensor that this rank has in another layout: see ``redistribute``."""
    spec = x._spec
    return redistribute(x._local, spec.shape, spec.layout, target, spec.comm, why, x._lineage)


def redistribute(
    local: Tensor, shape: Shape, source: Layout, target: Layout, comm: EagerCommunicator, why: str = "",
    lineage: Lineage = 0,
) -> Tensor:  # fmt: skip
    """The part of a tensor of logical ``shape`` that this rank has in ``target``, given its part in ``source``.

    Collective: every rank of both placements calls it, with the same arguments but for ``local``; on others it does
    nothing.  A rank outside of a placement has a part of shape ``(0,)``, of the right dtype.  The result shares
    memory with ``local`` only where the layouts are the same; no gradient flows.  ``why`` names the op that
    needs it, for errors.  Ranks that have parts of the tensor must give the same ``lineage``, if they exchange them.
    Raises LayoutError for a split that does not fit the shape.

    >>> redistribute(torch.ones(2), (2,), Layout(both, (P,)), Layout(both, (S(0),)), comm)  # on each of two ranks
    tensor([2.])
    """
    if source is target:
        return local
    if local.requires_grad:
        local = local.detach()
    steps = hop_steps(shape, source, target, comm.rank)
    if not steps:
        return local  # a rank outside of both
    text, digest = _label(why, local.dtype, shape, source, target)
    for step in steps:
        among = all(rank in source.placement for rank in step.ranks)
        label = CollectiveLabel(text, digest, lineage if among else 0)
        if step.kind is HopKind.ALL_REDUCE:
            local = comm.all_reduce(label, step.ranks, local)
        else:
            local = _exchange(local, step, comm, label)
    if source.placement.type != target.placement.type:
        local = local.to(comm.device(target.placement))
    return local


@lru_cache(maxsize=1 << 14)
def hop_steps(shape: Shape, source: Layout, target: Layout, rank: int) -> tuple[HopStep, ...]:
    """One rank's side of each hop of the route, in order."""
    hops = route(shape, source.placement, source.sbp, target.placement, target.sbp)
    found = (_side_of_hop(hop, shape, rank) for hop in hops)
    return tuple(step for step in found if step is not None)


def _side_of_hop(hop: Hop, shape: Shape, rank: int) -> HopStep | None:
    """A rank's side of a hop; None if it takes no part."""
    gives, takes = rank in hop.source, rank in hop.target
    if not gives and not takes:
        return None
    ranks = _ranks(hop, rank)
    out = device_shape(shape, hop.target_sbp, hop.target, hop.target.index(rank)) if takes else NOWHERE
    if hop.kind is HopKind.ALL_REDUCE:
        return HopStep(hop.kind, ranks, (), (), (), out, True)

    def parts(giver: int, taker: int) -> tuple[BoxCopy, ...]:
        if giver not in hop.source or taker not in hop.target:
            return ()
        return hop.parts[hop.target.index(taker)][hop.source.index(giver)]

    send = tuple(tuple(p.source for p in parts(rank, other)) for other in ranks)
    receive = tuple(tuple(p.target for p in parts(other, rank)) for other in ranks)
    counts = tuple(
        0 if other == rank else sum(numel(b.size) for b in boxes) for other, boxes in zip(ranks, receive, strict=True)
    )
    return HopStep(hop.kind, ranks, send, receive, counts, out, hop.add)


def _ranks(hop: Hop, rank: int) -> tuple[int, ...]:
    """The ranks that exchange data with a rank in a hop."""
    if hop.groups:
        return next(group for group in hop.groups if rank in group)
    return tuple(sorted({*hop.source.ranks, *hop.target.ranks})) if hop.kind is HopKind.SEND else (rank,)


def _exchange(local: Tensor, step: HopStep, comm: EagerCommunicator, label: CollectiveLabel) -> Tensor:
    me = step.ranks.index(comm.rank)
    pieces = [_flat(local, boxes) if i != me else None for i, boxes in enumerate(step.send)]
    came = comm.exchange(label, step.ranks, pieces, step.counts, local) if len(step.ranks) > 1 else [None]
    if not any(step.receive):
        return local.new_zeros(step.shape)
    wide = WIDE.get(local.dtype) if step.add else None
    sizes = (numel(box.size) for boxes in step.receive for box in boxes)
    covered = not step.add and sum(sizes) == numel(step.shape)
    out = (torch.empty if covered else torch.zeros)(step.shape, dtype=wide or local.dtype, device=local.device)
    for i, boxes in enumerate(step.receive):
        flat = came[i]
        if i == me:
            parts = cut_like(local, step.send[i], boxes)
        else:
            assert flat is not None or not step.counts[i]
            parts = split_run(local.new_empty(0) if flat is None else flat, boxes)
        for place, part in zip(cut(out, boxes), parts, strict=True):
            if step.add:
                place.add_(part if wide is None else part.to(wide))
            else:
                place.copy_(part)
    return out if wide is None else out.to(local.dtype)


def _flat(local: Tensor, boxes: tuple[Box, ...]) -> Tensor | None:
    """The elements of some boxes, one box after the other; None for none."""
    if not boxes or not any(numel(b.size) for b in boxes):
        return None
    pieces = cut(local, boxes)
    flat = pieces[0].reshape(-1) if len(pieces) == 1 else run_of(local, boxes)
    return flat.resolve_conj().resolve_neg()


@lru_cache(maxsize=1 << 14)
def _label(why: str, dtype: torch.dtype, shape: Shape, source: Layout, target: Layout) -> tuple[str, int]:
    """The text of a label, and its digest."""
    size = ",".join(map(str, shape))
    moves = f"{str(dtype).removeprefix('torch.')}[{size}], {source} -> {target}"
    label = CollectiveLabel.of(f"{why}: {moves}" if why else moves)
    return label.text, label.digest
