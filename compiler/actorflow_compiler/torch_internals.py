"""Everything that actorflow uses of torch without torch promising it; works on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "backward_engine",
    "constant_of",
    "fake_mode",
    "fast_callable",
    "is_fake",
    "looks_compiling",
    "plain_recurrence",
    "sequence_number",
    "sequence_of",
]

DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no memory."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is without memory."""
    return isinstance(tensor, FakeTensor)


def constant_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a fake tensor that was made from Python numbers, or of a real tensor."""
    return tensor.constant if isinstance(tensor, FakeTensor) else tensor


def sequence_number() -> int:
    """The number that autograd will give to the next node of the forward pass."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # has no stub


def sequence_of(node: Any) -> int | None:
    """The forward sequence number of a backward node; None for gradient accumulation."""
    return None if "AccumulateGrad" in node.name() else int(node._sequence_nr())


@contextlib.contextmanager
def looks_compiling() -> Iterator[None]:
    """Let optimizers accept capturable=True on a CPU and models skip checks of values."""
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


@contextlib.contextmanager
def plain_recurrence() -> Iterator[None]:
    """Let recurrent layers be made of plain ops: oneDNN's fused ones keep a workspace that no plan can carry.

    ``torch.backends.mkldnn.flags`` does the same, but warns about TF32 at each use.
    """
    old = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(old)


@contextlib.contextmanager
def backward_engine(
    wrap: Callable[[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Run every backward pass through ``wrap(engine, root tensors, args, kwargs)``."""
    import torch.autograd.graph as ag

    engine = ag._engine_run_backward

    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:  # the parameter's name is torch's
        return wrap(engine, tuple(t_outputs), args, kwargs)

    ag._engine_run_backward = run
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]  # not exported
    try:
        yield
    finally:
        ag._engine_run_backward = engine
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]  # not exported


def fast_callable(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """What calls the operator without the Python frame of ``OpOverload.__call__`` (0.3 µs of 2.5)."""
    found = getattr(overload, "_op", overload)
    return found if callable(found) else overload
