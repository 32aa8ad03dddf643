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

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from actorflow.transport.communicators import NO_TIMEOUT, Communicator, CommunicatorRegistry, Scope, over_gloo
from actorflow.transport.parcels import SMALL, Parcels, Room, packed_by_size, plain_room, room_by_size, sum_by_dtype
from actorflow.transport.redistribution import check
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec


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
        wires = packed_by_size(tensors, self._room)
        for work in [pair.send([wire], 1, 0) for wire in wires]:
            work.wait()

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``."""
        pair = self._communicators[Scope.PAIR, (source, self._rank)]
        wires, tensors = room_by_size(specs, self._room)
        for work in [pair.recv([wire], 0, 0) for wire in wires]:
            work.wait()
        return tensors

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
            return sum_by_dtype(tensors, lambda flat: group.allreduce([flat]).wait())
        whole = [((Box((0,) * t.dim(), tuple(t.shape)),),) * size for t in tensors]
        terms = replace(comm, exchanges=tuple(Exchange(boxes, boxes, add=True) for boxes in whole))
        return self._exchange(group, terms, tensors, specs)

    def _exchange(
        self, group: Communicator, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]
    ) -> list[Tensor]:
        parcels = Parcels.of(comm, self._rank, specs)
        return parcels.exchange(tensors, self._room, lambda *buffers: group.alltoall_base(*buffers).wait())

    def explain(self) -> str:
        """See ``DataPlane``."""
        return ""

    def close(self) -> None:
        """See ``DataPlane``; blocked calls stay blocked until their peer ends or the timeout."""
        self._communicators.clear()
