"""Whether NCCL can use this machine's InfiniBand devices, or why not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import distributed

from actorflow.distributed.group import default_group

__all__ = ["RdmaWarning", "devices", "obstacle", "init", "initialized"]

DEVICES = Path("/sys/class/infiniband")  # where Linux shows devices of InfiniBand and of RoCE

_initialized = False


class RdmaWarning(UserWarning):
    """RDMA was asked for where there is none."""


def init() -> None:
    """See ``flow.env.init_rdma``."""
    global _initialized
    default_group()
    reason = obstacle(os.environ, DEVICES)
    _initialized = not reason
    if reason:
        warnings.warn(
            f"RDMA was asked for and is not used: {reason}. The data go over the network's ordinary sockets.",
            RdmaWarning,
            stacklevel=3,  # the caller of flow.env.init_rdma
        )


def initialized() -> bool:
    """See ``flow.env.rdma_is_initialized``."""
    return _initialized


def obstacle(environ: Mapping[str, str], folder: Path) -> str:
    """Why NCCL cannot use RDMA in this process; empty if it can."""
    if not torch.cuda.is_available():
        return "this process has no CUDA device, and NCCL, which is what uses RDMA, moves only what is on GPUs"
    if not distributed.is_nccl_available():
        return "this torch is built without NCCL, which is what uses RDMA"
    if environ.get("NCCL_IB_DISABLE", "0") == "1":
        return "the variable NCCL_IB_DISABLE=1 forbids it; unset it"
    found = devices(folder)
    if not found:
        return f"this machine has no InfiniBand or RoCE device ({folder} has none)"
    if not any("ACTIVE" in states for states in found.values()):
        return "no port of the InfiniBand devices is active: " + ", ".join(
            f"{device} {'/'.join(states) or 'without ports'}" for device, states in sorted(found.items())
        )
    return ""


def devices(folder: Path) -> dict[str, tuple[str, ...]]:
    """For each device ("mlx5_0") the states of its ports ("ACTIVE", "DOWN")."""
    if not folder.is_dir():
        return {}
    return {
        device.name: tuple(
            state.read_text().split(":")[-1].strip()
            for state in sorted(device.glob("ports/*/state"))  # "4: ACTIVE"
        )
        for device in sorted(folder.iterdir())
    }
