"""Make torch.distributed's default group over all ranks of the run, once."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from actorflow.control import cluster
from actorflow.distributed.standing_waits import watch_waits_over
from actorflow.rendezvous.device_assignment import claim_gpu
from actorflow.rendezvous.elastic import torch_settings
from actorflow.rendezvous.options import DeviceType
from actorflow.rendezvous.settings import Settings
from actorflow.support.collective_waits import in_collective
from actorflow.transport.nccl import nccl_host
from actorflow_compiler.core.errors import CallError, ClusterError
from actorflow_compiler.core.torch_internals import store_of_default_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["default_group", "rank", "standing_for", "use_own_device", "world"]

DATA_TIMEOUT = timedelta(days=1)  # of torch.distributed; a peer that fails is noticed by the control plane
PATIENCE = 0.1  # seconds for threads of the group to free their tensors
_process = 0  # the process that is this rank, once it has used the group


def default_group() -> ProcessGroup:
    """``torch.distributed``'s default group over all ranks; the first call makes it, and is collective.

    Gloo moves tensors on the CPU and, on machines with CUDA, NCCL those on GPUs.  The ranks meet

    - under ``actorflow run`` in the run's own store,
    - under ``python -m actorflow.distributed.launch`` and ``torchrun`` at ``MASTER_ADDR:MASTER_PORT``,
    - alone nowhere: the group has one member.

    A group that the script has made itself is used as it is.  A group made here is closed when the process
    ends.  Raises CallError in a process that was forked from a rank, ClusterError if the ranks do not meet, and in a
    pretended cluster (``actorflow plan``), which has no other ranks.
    """
    global _process
    if _process not in (0, os.getpid()):
        raise CallError(
            f"a collective was called in process {os.getpid()}, which was forked from this rank, process {_process}, "
            f"and is no rank: others would not come. Expected: the collective in the rank itself"
        )
    if not distributed.is_initialized():
        place = cluster.process_settings()
        others = tuple(rank for rank in range(place.world) if rank != place.rank)
        with in_collective("the first collective, for which all ranks meet", others, "the first collective"):
            _make(place)
        atexit.register(_close)
    if not _process:
        _process = os.getpid()
        _watch()
    group = distributed.group.WORLD
    assert group is not None
    return group


def _watch() -> None:
    """Have somebody see where this rank waits for ever: under ``actorflow run`` the control plane does."""
    known = store_of_default_group()
    if known is not None and known[2] > 1 and not isinstance(cluster.joined(), cluster.Cluster):
        store, rank, _ = known
        watch_waits_over(store, rank)


class _Thread(threading.local):
    stands_for: tuple[int, int] | None = None  # the rank that this thread is, and of how many


_thread = _Thread()


@contextlib.contextmanager
def standing_for(rank: int, world: int) -> Iterator[None]:
    """A context in which this thread is a rank by itself."""
    before, _thread.stands_for = _thread.stands_for, (rank, world)
    try:
        yield
    finally:
        _thread.stands_for = before


def rank() -> int:
    """This process's number in its run, or the rank that this thread stands for; makes no group."""
    return cluster.process_settings().rank if _thread.stands_for is None else _thread.stands_for[0]


def world() -> int:
    """The number of ranks; makes no group."""
    return cluster.process_settings().world if _thread.stands_for is None else _thread.stands_for[1]


def use_own_device() -> None:
    """Make "cuda" mean this rank's own GPU, where each rank of this machine has one, or may share; else do nothing."""
    run = cluster.joined()
    place = torch_settings() if run is None else run.settings  # begins no run
    if place is None or place.devices == 1 or place.pretend or place.device_type == DeviceType.CPU:
        return
    count = torch.cuda.device_count()
    if count >= place.devices or (count and place.oversubscribe):
        claim_gpu(place)


def _make(place: Settings) -> None:
    if place.pretend:
        raise ClusterError(
            f"`actorflow plan` pretends a cluster of {place.world} ranks, which have no process group; eager "
            "collectives, global tensors and DistributedDataParallel need `actorflow run`"
        )
    use_own_device()
    shared = place.oversubscribe and torch.cuda.device_count() < place.devices and not nccl_host()  # NCCL refuses it
    nccl = torch.cuda.is_available() and distributed.is_nccl_available() and not shared
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    joined = cluster.joined()
    if joined is None and place.world > 1:
        _meet(place, backend)
        return
    store = (joined or cluster.current()).store()
    make: Any = distributed  # its stubs lack what follows
    distributed.init_process_group(
        backend,
        store=make.PrefixStore("actorflow/default", store),
        rank=place.rank,
        world_size=place.world,
        timeout=DATA_TIMEOUT if place.world > 1 else None,
    )


def _meet(place: Settings, backend: str) -> None:
    """Meet at ``MASTER_ADDR:MASTER_PORT``.  Gloo and NCCL keep torch's own timeouts, since no control plane watches."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        distributed.init_process_group(backend, rank=place.rank, world_size=place.world)
    except (ValueError, RuntimeError) as error:
        raise ClusterError(
            f"rank {place.rank} of {place.world} could not meet the others at {where} (MASTER_ADDR, MASTER_PORT): "
            f"{error}. Start the script on every node with the same --nnodes, --nproc_per_node, --master_addr and "
            "--master_port."
        ) from error


def _close() -> None:
    """Close the group that ``default_group`` made; a script may have closed it already."""
    # PyTorch's DistributedDataParallel never releases its group, so nothing joins Gloo's threads.  A thread that frees
    # the tensors of its last collective needs the interpreter's lock, and aborts the process if it asks for the lock
    # while Python is ending.  So it gets the lock here.
    time.sleep(PATIENCE)
    if distributed.is_initialized():
        distributed.destroy_process_group()
