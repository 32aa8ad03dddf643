"""Compile the tensor parts of bodies with torch's inductor, each for operands of given strides.

Ranks of one machine share the work, and what they have made is kept for later runs (``body_store``): a rank compiles
what nobody has compiled, and leaves to another rank what that one is compiling; in the end it loads that, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow.runtime.bodies.body_store import BodyStore, key_of
from actorflow.runtime.bodies.kernels import Kernel, Kernels
from actorflow_compiler.core.torch_internals import (
    compile_graph,
    compile_settings,
    fake_mode,
    load_graph,
    trace_kernel,
)
from actorflow_compiler.plan.plan import Body

__all__ = ["Compilations", "WantedBody", "compile_bodies"]

_one_at_a_time = threading.Lock()  # torch's tracers and compilers have process-wide state
_Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class WantedBody:
    """A body that computes on tensors alone, to be compiled for operands of these forms."""

    body: Body
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]  # shape, stride, …
    autotune: bool

    @staticmethod
    def of(body: Body, operands: Sequence[Tensor], autotune: bool) -> WantedBody:
        """For operands like these, which need no memory."""
        return WantedBody(
            body, tuple((tuple(x.shape), tuple(x.stride()), x.dtype, x.device) for x in operands), autotune
        )


@dataclass(frozen=True, slots=True)
class Compilations:
    """What has become of the bodies that were wanted."""

    kernels: Mapping[WantedBody, Kernel]
    errors: Mapping[WantedBody, Exception]  # of torch's compiler; any kind
    compiled: int  # by this rank
    loaded: int  # that this or another rank, or an earlier run, had compiled


def compile_bodies(
    wanted: Sequence[WantedBody], kernels: Kernels, store: BodyStore | None, doing: Callable[[str], None]
) -> Compilations:
    """Compile or load each of different bodies; ``doing`` is told how many are done.

    When a compiled kernel is called, an operand with other strides than it was compiled for is copied first.  Must be
    called with gradients off, and outside all modes.
    """
    made: dict[WantedBody, Kernel] = {}
    errors: dict[WantedBody, Exception] = {}
    compiled = 0

    def loaded(one: WantedBody, digest: str) -> bool:
        assert store is not None
        run = store.find(digest, _load)
        if run is not None:
            made[one] = _checking_strides(run, one)
        return run is not None

    def compile(one: WantedBody, digest: str | None) -> None:
        nonlocal compiled
        try:
            run, data = _compile(one, kernels)
        except Exception as error:  # an op needs values, or torch, triton or a C++ compiler failed
            errors[one] = error
            return
        compiled += 1
        made[one] = _checking_strides(run, one)
        if store is not None and digest is not None and data is not None:
            store.add(digest, data)

    def attempt(one: WantedBody, digest: str, wait: bool) -> bool:
        """Load or compile a body; False if another process compiles it, which is not waited for."""
        assert store is not None
        if loaded(one, digest):
            return True
        with store.compiling(digest, wait) as mine:
            if mine and not loaded(one, digest):  # another one may just have finished
                compile(one, digest)
        return mine

    elsewhere = []
    settings = compile_settings() if store is not None and wanted else None
    for one in wanted:
        doing(f"{len(made) + len(errors)} of {len(wanted)}")
        digest = None if store is None else key_of(one.body, one.operands, one.autotune, kernels.library, settings)
        if digest is None:
            compile(one, None)
        elif not attempt(one, digest, wait=False):
            elsewhere.append((one, digest))
    for one, digest in elsewhere:
        doing(f"{len(made) + len(errors)} of {len(wanted)}, waiting for other ranks")
        attempt(one, digest, wait=True)
    return Compilations(made, errors, compiled, len(made) - compiled)


def _load(data: bytes) -> _Run:
    with _one_at_a_time:
        return load_graph(data)


def _compile(one: WantedBody, kernels: Kernels) -> tuple[_Run, bytes | None]:
    """A body's function, and the bytes by which it is loaded.  Raises any exception of torch's compiler."""
    name = "max-autotune-no-cudagraphs" if one.autotune else "default"
    with _one_at_a_time, fake_mode():
        # each operand is a tensor of its own, so that the kernel does not assume that two of them are the same
        apart = [torch.empty_strided(s, stride, dtype=dtype, device=at) for s, stride, dtype, at in one.operands]
        found = compile_graph(trace_kernel(kernels.kernel(one.body), apart), apart, name)
    return found.run, found.data


def _checking_strides(run: _Run, one: WantedBody) -> Kernel:
    strides = [stride for _, stride, _, _ in one.operands]

    def kernel(inputs: list[Any]) -> tuple[Any, ...]:
        for i, (x, stride) in enumerate(zip(inputs, strides, strict=True)):
            if x.stride() != stride:
                inputs[i] = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
        return tuple(run(inputs))

    return kernel
