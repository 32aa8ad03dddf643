"""Everything that actorflow uses of torch without torch promising it; works on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "MERSENNE",
    "backward_engine",
    "before_each_op",
    "constant_of",
    "fake_mode",
    "fast_callable",
    "is_fake",
    "looks_compiling",
    "memory_of",
    "plain_recurrence",
    "python_source",
    "runs_python",
    "real_tensors",
    "sequence_number",
    "sequence_of",
    "swap_contents",
    "values_not_seen",
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


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Ops inside work on real memory, and no trace sees them."""
    return _disable_current_modes()


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
def values_not_seen() -> Iterator[None]:
    """Let distributions not check their arguments, and truncated normals be drawn without a loop until all fit.

    The caller may not depend on values of tensors, and these would, by default.
    """
    import torch.nn.init
    from torch.distributions import Distribution

    checked, drawn = Distribution._validate_args, torch.nn.init._no_grad_trunc_normal_
    Distribution.set_default_validate_args(False)
    torch.nn.init._no_grad_trunc_normal_ = _truncated_normal
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)
        torch.nn.init._no_grad_trunc_normal_ = drawn


def _truncated_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Fill with normal numbers that lie in [a, b], by the inverse of their distribution function."""
    low, high = (math.erf((limit - mean) / (std * math.sqrt(2))) for limit in (a, b))
    with torch.no_grad():
        tensor.uniform_(low, high, generator=generator).erfinv_()
        return tensor.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


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


@dataclass(frozen=True, slots=True)
class GeneratorLayout:
    """Where in the state of a CPU generator (``torch.Generator.get_state``) its parts lie, in bytes."""

    size: int
    seed: int  # int64
    left: int  # int32, one more than the words of the block that are not drawn yet
    next: int  # int64, the position of the next word
    key: int  # 624 int64, the words of the block


MERSENNE = GeneratorLayout(size=5056, seed=0, left=8, next=16, key=24)


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, also for those on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """As ``torch.utils.swap_tensors``, also where there are weak references: those keep to the tensor objects."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def runs_python(op: torch._ops.OpOverload) -> bool:
    """Whether what the op runs on tensors with memory was registered from Python in this process."""
    if op._schema.name in OPDEFS:
        return True
    name = op._schema.name.replace("::", "/") + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return any(entry.rpartition("/")[0] == name for entry in torch.library._impls)


def python_source(op: torch._ops.OpOverload) -> str | None:
    """The source of a ``torch.library.custom_op``, with that of the file it is in; None where it is not to be had.

    Of a closure, the values are added; None if they are not plain.
    """
    definition = OPDEFS.get(op._schema.name)
    if definition is None:
        return None
    function = inspect.unwrap(definition._init_fn)
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if not all(value is None or isinstance(value, bool | int | float | str) for value in values):
        return None
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    with contextlib.suppress(OSError, TypeError, ValueError):
        source += Path(inspect.getsourcefile(function) or "").read_text()
    return f"{source}\n{values}"


class _Before(TorchDispatchMode):
    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, then run the op."""
        self._call()
        return func(*args, **(kwargs or {}))


def before_each_op(call: Callable[[], None]) -> contextlib.AbstractContextManager[Any]:
    """Call a function before each op that runs, or is traced, inside."""
    return _Before(call)
