"""Capture the work of a kernel once (a CUDA graph), and replay it at each call.

A capture reads and writes fixed addresses: it uses variables where they lie, and each other operand is copied to a
tensor that belongs to the capture.  All captures share one memory pool, so the outputs of one are overwritten when the
next is replayed.  Outputs are therefore copied to new tensors at once, in the same queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.devices import Device
from actorflow.runtime.bodies.kernels import Kernel

__all__ = ["QUEUE", "replayed"]

QUEUE = "compute"  # the plan's queue in which captures are replayed
WARM = 2  # calls before the capture, in which libraries choose kernels and allocate workspaces


def replayed(kernel: Kernel, device: Device, operands: Sequence[Tensor], fixed: Mapping[int, Tensor]) -> Kernel:
    """Capture a kernel for operands of these shapes and strides, which are given as fake tensors.

    ``fixed`` holds the operands, by position, that are the same tensor at every call (variables).  The kernel is run on
    them and on zeros, so it must not change an operand.  Must be called while the device is idle and no other thread
    uses it.  Raises RuntimeError for work that cannot be captured.
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
    replay, outputs = device.capture(lambda: kernel(list(given)), WARM)
    into, at = list(places.values()), list(places)

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        if any(inputs[i] is not tensor for i, tensor in fixed.items()):  # a variable's tensor was replaced
            return kernel(inputs)
        if into:
            torch._foreach_copy_(into, [inputs[i] for i in at])
        inputs.clear()
        replay()
        found = [torch.empty_like(x) for x in outputs]
        if found:
            torch._foreach_copy_(found, list(outputs))
        return tuple(found)

    return run
