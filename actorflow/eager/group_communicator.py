"""The communicator of a rank that is a process, over one Gloo group of all ranks.

Every message carries a tag made of its collective's label, so ranks in different ops never take each other's data: they
wait, and ``mismatch_watch.py`` finds that out.  Tensors on GPUs go from GPU to GPU over NCCL, once both ranks have said
over Gloo that they are in the same op; between ranks that share a GPU or have no NCCL they go through the CPU.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from actorflow.control import cluster
from actorflow.control.cluster import Cluster
from actorflow.distributed.group import default_group
from actorflow.eager.communicator import EagerCommunicator
from actorflow.eager.mismatch import CollectiveWait
from actorflow.eager.mismatch_watch import SILENT, SLOW, MismatchWatch
from actorflow.eager.pair_transfers import LOCATION_BYTES, PairCommunicators, PairTransfer, can_use_nccl
from actorflow.support.collective_waits import in_collective
from actorflow.support.terminal import say
from actorflow.transport.communicators import NO_TIMEOUT, CommunicatorRegistry, Scope, break_connections, over_gloo
from actorflow.transport.nccl import nccl_version
from actorflow_compiler.core.errors import CallError, ClusterError
from actorflow_compiler.core.tensor_bytes import as_bytes, flat
from actorflow_compiler.core.torch_internals import store_of_default_group

__all__ = ["GroupCommunicator"]

TAGS = 2**31 - 1  # Gloo takes tags below 2**31; the last one is for ``break_connections``
MEETING = 300.0  # seconds for all ranks to use their first global tensor


class GroupCommunicator(EagerCommunicator):
    """One rank of several processes, over one Gloo group of all of them.

    ``store`` is shared by all ranks and has no other users; the constructor is collective.  ``pairs`` moves
    tensors on devices of its kind, on all ranks or none; without it they go through the CPU.  A rank that gives no
    sign of life for ``silent`` seconds is lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        timeout: timedelta = NO_TIMEOUT,
        pairs: PairCommunicators | None = None,
        silent: float = SILENT,
    ) -> None:
        super().__init__(rank, world)
        self._process = os.getpid()
        self._pairs = pairs
        first = "the first op on global tensors"
        with in_collective(f"{first}, for which all ranks meet", tuple(r for r in range(world) if r != rank), first):
            _meet(store, rank, world)
        communicators = CommunicatorRegistry(
            rank,
            store,
            partial(over_gloo, timeout=timeout),
            "rank {rank} could not connect to the other ranks for global tensors: {error}",
        )
        self._group = communicators.open(Scope.GROUP, self.all_ranks)
        connection: Any = store  # its stub lacks what follows
        own = connection.clone()  # a connection of its own: one thread's calls do not hold up the other's
        self._watch = MismatchWatch(PrefixStore("mismatch", own), rank, world, self._break, silent)

    @classmethod
    def joined(cls) -> GroupCommunicator | None:
        """The communicator of this process's run, or of torch's default group; None for a process without peers."""
        run, silent = cluster.joined(), SILENT
        if isinstance(run, Cluster):
            store, rank, world = run.store(), run.rank, run.world
            silent = max(SILENT, 2 * run.settings.silence_limit)  # the control plane says it sooner
        else:
            if cluster.process_settings().world > 1:
                default_group()
            known = store_of_default_group()
            if known is None or known[2] == 1:
                return None
            store, rank, world = known
        pairs = PairCommunicators(PrefixStore("actorflow/eager/pairs", store), rank) if nccl_version() else None
        comm = cls(PrefixStore("actorflow/eager", store), rank, world, pairs=pairs, silent=silent)
        atexit.register(comm._at_exit)
        return comm

    def _transfer(
        self, waiting: CollectiveWait, digest: int, send: Sequence[Tensor | None], receive: Sequence[int], like: Tensor
    ) -> list[Tensor | None]:
        if os.getpid() != self._process:
            raise CallError(
                f"{waiting.what}: rank {self.rank} is process {self._process}, and this is process {os.getpid()}, "
                f"which was forked from it and is no rank: others would not come. Expected: plain tensors in it, such "
                f"as x.numpy() or x.to_local() of before the fork"
            )
        pairs = self._pairs if self._pairs is not None and like.device.type == self._pairs.kind else None
        if pairs is not None:
            waiting = replace(waiting, what=f"{waiting.what}, between {pairs.kind} devices")
            rooms = [torch.empty(n, dtype=like.dtype, device=like.device) if n else None for n in receive]
            send = [None if t is None else flat(t) for t in send]  # running out of memory raises before peers wait
        tag = (digest + waiting.number * 0x9E3779B1 + (pairs is not None)) % TAGS
        self._watch.enter(waiting)
        text = f"collective {waiting.number} of ranks {list(waiting.ranks)}: {waiting.what}"
        try:
            with in_collective(text, waiting.peers, text, f"global tensors of ranks {list(waiting.ranks)}"):
                if pairs is None:
                    came = self._carry(tag, waiting.ranks, send, receive, like)
                else:
                    came = self._carry_directly(pairs, tag, waiting, send, rooms)
        except RuntimeError as error:
            if pairs is not None:
                self._watch.give_up(waiting)
            self._explain(error, waiting)
        self._watch.leave()
        return came

    def _carry(
        self, tag: int, ranks: Sequence[int], send: Sequence[Tensor | None], receive: Sequence[int], like: Tensor
    ) -> list[Tensor | None]:
        """Send and receive over Gloo."""
        far = like.device.type != "cpu"
        came: list[Tensor | None] = [None] * len(send)
        works = []
        for i, (peer, n) in enumerate(zip(ranks, receive, strict=True)):
            if n:
                room = came[i] = torch.empty(n, dtype=like.dtype)
                works.append(self._group.recv([room.view(torch.uint8)], peer, tag))
        for peer, tensor in zip(ranks, send, strict=True):
            if tensor is not None:
                near = tensor.cpu() if far else tensor
                works.append(self._group.send([as_bytes(near)], peer, tag))
        for work in works:
            work.wait()
        return [None if t is None else t.to(like.device) for t in came] if far else came

    def _carry_directly(
        self,
        pairs: PairCommunicators,
        tag: int,
        waiting: CollectiveWait,
        send: Sequence[Tensor | None],
        rooms: list[Tensor | None],
    ) -> list[Tensor | None]:
        """Send and receive from device to device where two ranks can, else over Gloo, once all peers are in the op."""
        mine = torch.frombuffer(bytearray(pairs.location), dtype=torch.uint8)
        count = len(waiting.peers)
        locations = self._carry(tag, waiting.peers, [mine] * count, [LOCATION_BYTES] * count, mine)
        known = {
            peer: can_use_nccl(pairs.location, location.numpy().tobytes())
            for peer, location in zip(waiting.peers, locations, strict=True)
            if location is not None
        }
        transfers = [
            PairTransfer(rank, out, room)
            for rank, out, room in zip(waiting.ranks, send, rooms, strict=True)
            if known.get(rank, False)
        ]
        if transfers:
            pairs.exchange(transfers, next(t.device for t in (*send, *rooms) if t is not None))
        if len(transfers) == count:
            return rooms
        direct = [known.get(rank, True) for rank in waiting.ranks]
        like = next(t for t in (*send, *rooms) if t is not None)
        slow = self._carry(
            tag,
            waiting.ranks,
            [None if d else t for d, t in zip(direct, send, strict=True)],
            [0 if d or t is None else t.numel() for d, t in zip(direct, rooms, strict=True)],
            like,
        )
        return [room if d else t for d, room, t in zip(direct, rooms, slow, strict=True)]

    def _explain(self, error: RuntimeError, waiting: CollectiveWait) -> NoReturn:
        """Raise the error that says why a transfer has failed."""
        run = cluster.joined()
        if isinstance(run, Cluster) and self._watch.verdict is None and run.failed.wait(1.0):
            raise run.explain(error) from error
        why, lost = self._watch.why(error, waiting)
        raise (ClusterError if lost else CallError)(why) from error if self._watch.verdict is None else None

    def _break(self) -> None:
        """Make a transfer that is blocked fail; called on the watching thread."""
        break_connections(self._group, next(r for r in self.all_ranks if r != self.rank))
        if self._pairs is not None:
            self._pairs.abort()

    def finish(self, how: str = "has ended its script") -> None:
        """Tell the peers that this rank takes part in no further collective; waits a moment, so that they learn why."""
        self._watch.finish(how)
        if self._pairs is not None and self._watch.verdict is None:
            self._pairs.close()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None:
            self.finish()
        else:
            self.finish(f"raised {type(error).__name__}: {error}")


def _meet(store: Store, rank: int, world: int) -> None:
    """Wait until all ranks are here."""
    store.set(f"here/{rank}", "")
    begun = time.monotonic()
    told = False
    while not store.check([f"here/{r}" for r in range(world)]):
        waited = time.monotonic() - begun
        if (waited > SLOW and not told) or waited > MEETING:
            missing = [r for r in range(world) if not store.check([f"here/{r}"])]
            text = (
                f"rank {rank} uses its first global tensor, and has waited {waited:.0f} s for rank"
                f"{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} to use theirs: all ranks have to run the "
                f"same ops on global tensors in the same order"
            )
            if waited > MEETING:
                raise ClusterError(text)
            told = True
            say(text)
        time.sleep(0.02)  # a store's own wait cannot be interrupted
