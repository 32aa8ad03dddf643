"""Capture the work of a kernel once (a CUDA graph), and replay it at each call.

A capture reads and writes fixed addresses: it uses variables where they lie, and each other operand is copied to a
tensor that belongs to the capture.  All captures share one memory pool, so the outputs of one are overwritten when the
next is replayed.  Outputs are therefore copied to new tensors at once, in the same queue, but for those that are lent:
these are read where they lie, by work of the same queue that comes before the next replay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow.devices import Device
from actorflow.runtime.bodies.kernels import Kernel

__all__ = ["QUEUE", "Captured", "capture_kernel"]

QUEUE = "compute"  # the plan's queue in which captures are replayed
WARM = 2  # calls before the capture, in which libraries choose kernels and allocate workspaces


@dataclass(frozen=True, slots=True)
class Captured:
    """A kernel that was captured, and the tensors that are its outputs at every call, for those that are lent."""

    run: Kernel
    lent: Mapping[int, Tensor]


def capture_kernel(
    kernel: Kernel,
    device: Device,
    operands: Sequence[Tensor],
    fixed: Mapping[int, Tensor],
    lends: Collection[int] = (),
    *,
    apart: bool = False,
) -> Captured:
    """Capture a kernel for operands of these shapes and strides, which are given as fake tensors.

    ``fixed`` holds the operands, by position, that are the same tensor at every call (variables, and what another
    capture lends).  The kernel is run on them and on zeros, so it must not change an operand.  ``lends`` are the
    outputs that nothing reads after the next replay of a capture in the device's shared memory, or, if this one is
    ``apart`` from it, after its own.  Must be called while the device is idle and no other thread uses it.  Raises
    RuntimeError for work that cannot be captured.
    """
    elsewhere = {str(x.device) for x in operands if x.device.type != device.where.type}
    if elsewhere:
        raise RuntimeError(f"an operand lies on {elsewhere.pop()}")
    with device.queue(QUEUE).context():
        places = {
            i: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device.where).zero_()
            for i, x in enumerate(operands)
            if i not in fixed
        }
    device.synchronize()
    given = [fixed[i] if i in fixed else places[i] for i in range(len(operands))]
    replay, outputs = device.capture(lambda: kernel(list(given)), WARM, apart=apart)
    into, at = list(places.values()), list(places)
    leave = [i for i in range(len(outputs)) if i not in lends]
    leaving = [outputs[i] for i in leave]

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        if any(inputs[i] is not tensor for i, tensor in fixed.items()):  # a variable's tensor was replaced
            return kernel(inputs)
        if into:
            torch._foreach_copy_(into, [inputs[i] for i in at])
        inputs.clear()
        replay()
        found = list(outputs)
        if leaving:
            copies = [torch.empty_like(x) for x in leaving]
            torch._foreach_copy_(copies, leaving)
            for i, copy in zip(leave, copies, strict=True):
                found[i] = copy
        return tuple(found)

    return Captured(run, {i: outputs[i] for i in lends})
