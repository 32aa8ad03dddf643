"""Move tensors between GPUs over NCCL, with a communicator for each pair of ranks.

NCCL has no tags, takes operations only in an order that all ranks agree on, and does not report a peer that never
comes.  So the ranks of a collective first tell each other over Gloo (``group_communicator.py``) that they are in it,
and where they compute.  Then the pairs are served one after the other, lower ranks first, which is one order on all
ranks.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from actorflow.devices import make_device
from actorflow.transport.communicators import CommunicatorRegistry, Maker, Scope, over_nccl
from actorflow.transport.nccl import nccl_host, nccl_version
from actorflow_compiler.core.tensor_bytes import as_bytes

__all__ = ["LOCATION_BYTES", "PairCommunicators", "PairTransfer", "can_use_nccl", "gpu_location"]

LOCATION_BYTES = 32  # bytes of a rank's location: the first 8 are of its version of NCCL, the others of its GPU
_NOWHERE = bytes(LOCATION_BYTES)  # a rank without NCCL


def gpu_location() -> bytes:
    """This rank's location."""
    version = nccl_version()
    if not version:
        return _NOWHERE
    gpu = f"{nccl_host() or socket.gethostname()}/{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return hashlib.sha256(version.encode()).digest()[:8] + hashlib.sha256(gpu.encode()).digest()[8:]


def can_use_nccl(one: bytes, other: bytes) -> bool:
    """Whether the ranks at two locations can use NCCL: both have the same version, and different GPUs."""
    return _NOWHERE not in (one, other) and one[:8] == other[:8] and one[8:] != other[8:]


@dataclass(frozen=True, slots=True)
class PairTransfer:
    """The flat tensors that this rank sends to one peer and receives from it; None for nothing."""

    peer: int
    leaving: Tensor | None
    coming: Tensor | None  # memory to be filled


class PairCommunicators:
    """One rank's communicators, each made at the first transfer of its pair.

    ``store`` is shared by all ranks and has no other users.  ``kind`` is the type of the devices whose tensors go this
    way, ``location`` is called once, at the first transfer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        make: Maker = over_nccl,
        kind: str = "cuda",
        location: Callable[[], bytes] = gpu_location,
    ) -> None:
        self._rank, self._find = rank, location
        self._communicators = CommunicatorRegistry(rank, store, make)
        self.kind = kind
        self._location: bytes | None = None
        self._aborted = self._transferring = False

    @property
    def location(self) -> bytes:
        """This rank's location."""
        if self._location is None:
            self._location = self._find()
        return self._location

    def exchange(self, transfers: Sequence[PairTransfer], device: torch.device) -> None:
        """Send and receive; returns when everything has arrived.

        Every peer is known to be making the same transfers.  Raises RuntimeError where the communicator fails, and
        after ``abort``.
        """
        self._transferring = True
        for transfer in sorted(transfers, key=lambda t: _ordered(self._rank, t.peer)):
            communicator = self._communicators.open(Scope.PAIR, _ordered(self._rank, transfer.peer))
            self._check_aborted()
            out, into = _bytes(transfer.leaving, device), _bytes(transfer.coming, device)
            first = transfer.peer < self._rank
            give, take = [out.numel(), 0], [into.numel(), 0]
            communicator.alltoall_base(
                into, out, take if first else take[::-1], give if first else give[::-1]
            ).wait()  # the device's queue waits, so that transfers keep their order there as well
        make_device(device).here().mark().wait_on_host()  # the host waits here, where a lost peer is noticed
        self._check_aborted()
        self._transferring = False

    def abort(self) -> None:
        """Make the present transfer, and any later one, fail; called on another thread, returns at once."""
        self._aborted = True
        self._communicators.abort("actorflow pair end")

    def close(self) -> None:
        """End the communicators; a transfer that has failed is given up."""
        if self._transferring:
            self.abort()
            return
        self._communicators.shut_down()
        self._communicators.clear()

    def _check_aborted(self) -> None:
        if self._aborted:
            raise RuntimeError("the transfer between devices was given up")


def _ordered(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _bytes(tensor: Tensor | None, device: torch.device) -> Tensor:
    if tensor is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return as_bytes(tensor)
