"""The data plane over Gloo.

Gloo silently mixes up collectives that two ranks issue in different orders in one process group, and a small message
waits behind a large one in the same group.  So each directed pair of ranks and each group of a collective has its own
communicator, which one thread uses in the plan's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from actorflow.transport.communicators import NO_TIMEOUT, Communicator, CommunicatorRegistry, Scope, over_gloo
from actorflow.transport.parcels import SMALL, Parcels, Room, by_size, plain_room, side_by_side
from actorflow.transport.redistribution import check, dtype_of
from actorflow_compiler.core.tensor_bytes import as_bytes
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec

# Gloo cannot sum these dtypes, and sums bools as bytes (True + True is 2), so they are converted to another dtype to
# be summed, and converted back.
_SUMMED_AS = {torch.bool: torch.int32, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_CPU = torch.device("cpu")


class GlooPlane:
    """A data plane over TCP for one rank, for tensors on the CPU; ``StagedPlane`` adapts it to other devices.

    ``room`` allocates the memory for received tensors.  ``store`` is shared by all ranks of the run.  A call that is
    blocked when its peer dies fails within milliseconds.  A call whose peer hangs fails only after ``timeout``, because
    Gloo cannot be interrupted; the control plane has to notice the hang.
    """

    def __init__(self, rank: int, store: Store, *, timeout: timedelta = NO_TIMEOUT, room: Room = plain_room) -> None:
        self._rank = rank
        self._communicators = CommunicatorRegistry(
            rank,
            PrefixStore("actorflow/gloo", store),
            partial(over_gloo, timeout=timeout),
            "rank {rank} could not connect to ranks {ranks} for a {scope}: {error}",
        )
        self._room = room

    def open(self, peers: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """See ``DataPlane``.  Raises ClusterError if a member does not connect within the timeout."""
        for pair in peers:
            self._communicators.open(Scope.PAIR, pair)
        for group in groups:
            self._communicators.open(Scope.GROUP, group)

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """See ``DataPlane``."""
        pair = self._communicators[Scope.PAIR, (self._rank, to)]
        wires = [as_bytes(t) for t in tensors]
        small, large = by_size([w.numel() for w in wires])
        if small:
            flat, parts = side_by_side([wires[i].numel() for i in small], self._room)
            for i, part in zip(small, parts, strict=True):
                part.copy_(wires[i])
            wires.append(flat)
            large.append(len(tensors))
        for work in [pair.send([wires[i]], 1, 0) for i in large]:
            work.wait()

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``."""
        pair = self._communicators[Scope.PAIR, (source, self._rank)]
        small, large = by_size([spec.nbytes for spec in specs])
        wires = [self._room(0 if i in small else spec.nbytes) for i, spec in enumerate(specs)]
        if small:
            flat, parts = side_by_side([specs[i].nbytes for i in small], self._room)
            for i, part in zip(small, parts, strict=True):
                wires[i] = part
            wires.append(flat)
            large.append(len(specs))
        for work in [pair.recv([wires[i]], 0, 0) for i in large]:
            work.wait()
        return [wire.view(dtype_of(spec.dtype)).view(spec.shape) for wire, spec in zip(wires, specs, strict=False)]

    def collective(self, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``.  Uses one Gloo operation, or one for each dtype of a large all_reduce.

        In a small all_reduce (up to ``SMALL`` bytes), every member sends its tensors to all others and sums what it
        receives in the order of the group.
        """
        check(comm, tensors, specs)
        group = self._communicators[Scope.GROUP, comm.ranks]
        if comm.kind != CollectiveKind.ALL_REDUCE:
            return self._exchange(group, comm, tensors, specs)
        size = len(comm.ranks)
        if (size - 1) * sum(t.nbytes for t in tensors) > SMALL:
            return self._all_reduce(group, tensors)
        whole = [((Box((0,) * t.dim(), tuple(t.shape)),),) * size for t in tensors]
        terms = replace(comm, exchanges=tuple(Exchange(boxes, boxes, add=True) for boxes in whole))
        return self._exchange(group, terms, tensors, specs)

    def _all_reduce(self, group: Communicator, tensors: Sequence[Tensor]) -> list[Tensor]:
        outputs: list[Tensor | None] = [None] * len(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            flat = torch.cat([tensors[i].reshape(-1) for i in indices])
            wide = flat.to(_SUMMED_AS.get(dtype, dtype))
            group.allreduce([wide]).wait()
            flat = wide.to(dtype)
            for i, part in zip(indices, torch.split(flat, [tensors[i].numel() for i in indices]), strict=True):
                outputs[i] = part.view(tensors[i].shape)
        return cast(list[Tensor], outputs)

    def _exchange(
        self, group: Communicator, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]
    ) -> list[Tensor]:
        parcels = Parcels.of(comm, self._rank, specs)
        leaving, coming = self._room(sum(parcels.to)), self._room(sum(parcels.come))
        parcels.pack(tensors, leaving)
        group.alltoall_base(coming, leaving, list(parcels.come), list(parcels.to)).wait()
        return parcels.unpack(tensors, coming, _CPU)

    def explain(self) -> str:
        """See ``DataPlane``."""
        return ""

    def close(self) -> None:
        """See ``DataPlane``; blocked calls stay blocked until their peer ends or the timeout."""
        self._communicators.clear()
