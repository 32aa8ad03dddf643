"""Make the device of a rank by its kind; only this module distinguishes kinds of devices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actorflow.devices.base import Device, Mark, Queue
from actorflow.devices.cpu import Cpu
from actorflow.devices.cuda import Cuda
from actorflow_compiler.core.errors import ClusterError

__all__ = ["KINDS", "Cpu", "Cuda", "Device", "Mark", "Queue", "count", "make_device"]

KINDS: dict[str, Callable[[int], Device]] = {"cpu": Cpu, "cuda": Cuda}
_COUNTS: dict[str, Callable[[], int]] = {"cpu": lambda: 1, "cuda": torch.cuda.device_count}


def count(kind: str) -> int:
    """How many devices of a kind this process sees; all its processors count as one device."""
    return _COUNTS[kind]() if kind in _COUNTS else 0


def make_device(place: torch.device | str = "cpu") -> Device:
    """The device of this torch name; without an index, the first of its kind.

    >>> make_device("cpu").ahead
    False

    Raises ClusterError, which lists the devices there are, for an unknown kind or a device that is not there.
    """
    asked = torch.device(place)
    index = asked.index or 0
    if asked.type not in KINDS:
        raise ClusterError(f"a device {str(asked)!r} was asked for; known kinds are {', '.join(sorted(KINDS))}")
    if index >= count(asked.type) and asked.type != "cpu":
        there = ", ".join(f"{kind}: {count(kind)}" for kind in KINDS)
        raise ClusterError(
            f"device {asked.type}:{index} was asked for, which this machine does not show; it shows {there}. "
            'Use placements of type "cpu", fewer ranks for each machine, or look at CUDA_VISIBLE_DEVICES.'
        )
    return KINDS[asked.type](index)
