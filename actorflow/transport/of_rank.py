"""Make the data planes that a rank can use with its device, by their names in plans."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from actorflow.devices import Device
from actorflow.transport.gloo import GlooPlane
from actorflow.transport.messages import DataPlane
from actorflow.transport.nccl import NcclPlane, nccl_version
from actorflow.transport.staged import StagedPlane
from actorflow.transport.timeouts import Started

__all__ = ["planes_of"]


def planes_of(
    rank: int, store: Store, device: Device, patience: float, late: Callable[[Started], None]
) -> dict[str, DataPlane]:
    """The data planes of a rank by name; ``store`` is shared by all ranks of the run.

    The first NCCL call that takes longer than ``patience`` seconds is passed to ``late``, which has to end the run.
    """
    if not device.ahead:
        return {"gloo": GlooPlane(rank, store)}
    planes: dict[str, DataPlane] = {"gloo": StagedPlane(GlooPlane(rank, store, room=device.staging), device)}
    if nccl_version():
        planes["nccl"] = NcclPlane(rank, store, device, patience=patience, late=late)
    return planes
