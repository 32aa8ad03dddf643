"""Warn, once for each argument, of tensors on another device than the rank's, which every call has to move."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from actorflow.script_state.arguments import CallArguments
from actorflow.standins.logical_batch import BatchTensor
from actorflow_compiler.core.errors import CallError

__all__ = ["InputDevices"]


class InputDevices:
    """Checks on which devices the arguments of jobs are.

    A tensor on the CPU is expected, since batches are loaded there; it goes to the device through pinned memory.  A
    tensor on any other device is moved by every call, with a copy that nothing overlaps.
    """

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()  # (job, argument)

    def look(self, job: str, arguments: CallArguments, needed: Iterable[str], device: torch.device) -> None:
        """Warn of the ``needed`` tensors that have to be moved.  Raises CallError for one without memory."""
        for spec, tensor in zip(arguments.specs, arguments.tensors, strict=True):
            if tensor.device != device and spec.name in needed and not isinstance(tensor, BatchTensor):
                self._moves(job, spec.name, tensor, device)

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
