"""Compile a kernel over tensors with torch's inductor, for operands of given strides."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.runtime.bodies.kernels import Kernel
from actorflow_compiler.core.torch_internals import compile_graph, trace_kernel
from actorflow_compiler.plan.modes import Mode

__all__ = ["joined"]

_one_at_a_time = threading.Lock()  # torch's tracers and compilers have process-wide state


def joined(plain: Kernel, operands: Sequence[Tensor], mode: Mode) -> Kernel:
    """Compile a kernel for operands of these shapes and strides, which are given as fake tensors.

    When the compiled kernel is called, an operand with other strides is copied first.  Must be called inside a
    FakeTensorMode.  Raises any exception of torch's compiler.
    """
    # give each operand its own tensor, so that the kernel does not assume that two of them are the same
    apart = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in operands]
    name = "max-autotune-no-cudagraphs" if mode.autotune else "default"
    with _one_at_a_time, torch.no_grad():
        run = compile_graph(trace_kernel(plain, apart), apart, name)
    strides = [x.stride() for x in operands]

    def kernel(inputs: list[Any]) -> tuple[Any, ...]:
        for i, (x, stride) in enumerate(zip(inputs, strides, strict=True)):
            if x.stride() != stride:
                inputs[i] = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
        return tuple(run(inputs))

    return kernel
