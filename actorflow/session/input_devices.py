"""Warn, once for each argument, of tensors that each call moves between devices, and of batches that every rank has."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from actorflow.script_state.arguments import CallArguments
from actorflow.standins.logical_batch import BatchTensor
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.units import bytes_text

__all__ = ["InputDevices"]

FEW = 4  # ranks that may each load whole batches
LARGE = 16 << 20  # bytes of a batch that more ranks should not each load


class InputDevices:
    """Checks on which devices the arguments of jobs are.

    A tensor on the CPU is expected, since batches are loaded there; it goes to the device through pinned memory.  A
    tensor on any other device is moved by every call, with a copy that nothing overlaps.

    A large batch of many ranks is expected to come from a data source, of which each rank reads its own rows.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._told: set[tuple[str, str]] = set()  # (job, argument)

    def look(self, job: str, arguments: CallArguments, needed: Iterable[str], device: torch.device) -> None:
        """Warn of the ``needed`` tensors that have to be moved.  Raises CallError for one without memory."""
        if self._world > FEW and self._rank == 0:
            self._whole(job, arguments)
        for spec, tensor in zip(arguments.specs, arguments.tensors, strict=True):
            if tensor.device != device and spec.name in needed and not isinstance(tensor, BatchTensor):
                self._moves(job, spec.name, tensor, device)

    def _whole(self, job: str, arguments: CallArguments) -> None:
        """Say once what to do where every rank loads large batches."""
        nbytes = sum(
            tensor.nbytes
            for spec, tensor in zip(arguments.specs, arguments.tensors, strict=True)
            if spec.batch and not isinstance(tensor, BatchTensor)
        )
        if nbytes > LARGE and (job, "") not in self._told:
            self._told.add((job, ""))
            say(
                f"{job} was called with a batch of {bytes_text(nbytes)}, which each of {self._world} ranks "
                f"has loaded whole, to use its own rows; a rank that takes it from flow.data.loader loads no others"
            )

    def _moves(self, job: str, name: str, tensor: Tensor, device: torch.device) -> None:
        at = tensor.device
        if at.type == "meta":
            raise CallError(
                f"{job} was called with {name} on the meta device, which has no values; a tensor on the CPU"
                f"{'' if device.type == 'cpu' else f' or on {device}'} was expected"
            )
        same = at.type == device.type and device.index in (None, at.index)
        if at.type == "cpu" or same or (job, name) in self._told:
            return
        self._told.add((job, name))
        warnings.warn(
            f"{job} was called with {name} on {at}, and this rank works on {device}: it is moved in every call (this "
            f"is told once); make it on {device}, or leave it on the CPU, from where it is copied behind other work",
            UserWarning,
            stacklevel=2,
        )
