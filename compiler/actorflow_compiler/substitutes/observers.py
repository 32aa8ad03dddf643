"""Trace observers and fake quantisation of ``torch.ao`` without reading the values of their ranges.

Per-channel ranges have no size before an observer sees its first values.  For ranges of a layer's weight the size is
known: they get that size here, and start as empty ranges, as in torch.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import is_fake
from actorflow_compiler.values.reads import place_of

__all__ = ["OPS", "replaced_observers", "give_ranges_sizes"]

UNSIZED = (
    "an observer of ranges for each channel has seen no values yet, so that its ranges have no size; expected: one "
    "that was called before the first call of the job (model(batch) once, or the observer on values of the same shape)"
)
WEIGHT = "weight_fake_quant"  # attribute of a layer that is trained quantised: the module that quantises its weight
AVERAGES, FUSED = "MovingAveragePerChannelMinMaxObserver", "FusedMovingAvgObsFakeQuantize"


def quantised(low: Tensor, high: Tensor, least: int, most: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points for ranges.  torch's fused op chooses them; it does not update the ranges here."""
    count = low.numel()
    x = low.new_zeros((count, 1))
    scale, zero = low.new_ones(count), torch.zeros(count, dtype=torch.int32, device=low.device)
    off, on = (torch.tensor([flag], device=low.device) for flag in (0, 1))
    ranges = (low.clone(), high.clone()) if low.dim() else (low.clone().reshape(()), high.clone().reshape(()))
    torch.fused_moving_avg_obs_fake_quant(
        x, off, on, *ranges, scale, zero, 0.0, least, most, 0, low.dim() > 0, symmetric
    )
    return scale, zero


@torch.library.custom_op("actorflow::quantised", mutates_args=())
def traced_quantised(low: Tensor, high: Tensor, least: int, most: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """``quantised``, for the trace of a step."""
    return quantised(low, high, least, most, symmetric)


@traced_quantised.register_fake
def _(low: Any, high: Any, least: int, most: int, symmetric: bool) -> Any:
    return low.new_empty((low.numel(),)), low.new_empty((low.numel(),), dtype=torch.int32)


OPS: dict[str, Callable[..., Any]] = {"quantised": quantised}


def give_ranges_sizes(modules: Iterable[nn.Module]) -> None:
    """Give per-channel ranges of layers' weights their size, if they have none yet; the ranges are empty."""
    for layer in modules:
        if isinstance(layer, torch.jit.ScriptModule):  # has no ``_modules`` of torch.ao
            continue
        fake = layer._modules.get(WEIGHT)
        observer = None if fake is None else fake._modules.get("activation_post_process")
        weight = layer._parameters.get("weight")
        if fake is None or observer is None or weight is None or not getattr(fake, "is_per_channel", False):
            continue
        if type(observer).__name__ == AVERAGES and type(fake).__name__ != FUSED:
            continue
        low, high, scale, zero = (
            owner._buffers.get(name)
            for owner, name in ((observer, "min_val"), (observer, "max_val"), (fake, "scale"), (fake, "zero_point"))
        )
        if low is None or high is None or scale is None or zero is None or low.numel() or high.numel():
            continue
        count = (weight.shape[getattr(fake, "ch_axis", 0)],)
        low.resize_(count).fill_(float("inf"))
        high.resize_(count).fill_(float("-inf"))
        if scale.numel() == 1 and count != (1,):
            scale.resize_(count).fill_(1.0)
            zero.resize_(count).fill_(0)


@contextlib.contextmanager
def replaced_observers() -> Iterator[None]:
    """Let observers update their ranges with plain ops."""
    observer: Any = importlib.import_module("torch.ao.quantization.observer")
    fake: Any = importlib.import_module("torch.ao.quantization.fake_quantize")
    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (observer.MovingAverageMinMaxObserver, "forward", _averaged),
        (observer.PerChannelMinMaxObserver, "_forward", _widened),
        (observer.MovingAveragePerChannelMinMaxObserver, "forward", _averaged),
        (observer.UniformQuantizationObserverBase, "_calculate_qparams", _scales),
        (fake.FusedMovingAvgObsFakeQuantize, "forward", _fused),
    )
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]

    def instead(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, x, *args: ours(self, x, *args) if is_fake(x) else plain(self, x, *args)

    for (owner, name, plain), (_, _, ours) in zip(before, replaced, strict=True):
        setattr(owner, name, instead(plain, ours))
    try:
        yield
    finally:
        for owner, name, plain in before:
            setattr(owner, name, plain)


def _seen(x: Tensor, axis: int | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of all elements, or of each channel along ``axis``."""
    values = x.detach().to(like.dtype)
    if axis is None:
        return values.amin(), values.amax()
    if like.numel() == 0:
        _refuse_unsized()
    others = [dim for dim in range(values.dim()) if dim != axis % values.dim()]
    return (values.amin(others), values.amax(others)) if others else (values, values)


def _refuse_unsized() -> NoReturn:
    raise CaptureError(f"{place_of(traceback.extract_stack())}\n  {UNSIZED}")


def _averaged(self: Any, x: Tensor) -> Tensor:
    """Move the ranges towards the range of ``x``; empty ranges become the range of ``x``."""
    if x.numel():
        _move_ranges(self, x, getattr(self, "ch_axis", None), torch.isinf(self.min_val) & torch.isinf(self.max_val))
    return x


def _move_ranges(observer: Any, x: Tensor, axis: int | None, *first: Tensor) -> None:
    with torch.no_grad():
        share = observer.averaging_constant
        seen = _seen(x, axis, observer.min_val)
        begins = first * 2 if first else (torch.isinf(observer.min_val), torch.isinf(observer.max_val))
        for kept, now, new in zip((observer.min_val, observer.max_val), seen, begins, strict=True):
            kept.copy_(torch.where(new, now, kept + share * (now - kept)))


def _widened(self: Any, x: Tensor) -> Tensor:
    """Widen the ranges of channels to hold ``x``."""
    if x.numel():
        with torch.no_grad():
            low, high = _seen(x, self.ch_axis, self.min_val)
            self.min_val.copy_(torch.minimum(low, self.min_val))
            self.max_val.copy_(torch.maximum(high, self.max_val))
    return x


def _scales(self: Any, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points of ranges; 1 and 0 where no value was seen."""
    if low.numel() == 0 or high.numel() == 0:
        _refuse_unsized()
    least, most, kind = self.quant_min, self.quant_max, self.qscheme
    steps = float(most - least)
    bottom, top = low.clamp(max=0), high.clamp(min=0)
    zero = torch.zeros(low.shape, dtype=torch.int64, device=low.device)
    if kind in (torch.per_tensor_symmetric, torch.per_channel_symmetric):
        scale = torch.maximum(torch.maximum(-bottom, top) / (steps / 2), self.eps)
        if self.dtype in (torch.quint8, torch.uint8):
            zero = zero + ((least + most) // 2 if self.has_customized_qrange else 128)
        elif self.dtype == torch.uint16:
            zero = zero + 2**15
    elif kind == torch.per_channel_affine_float_qparams:
        scale = (high - low) / steps
        scale = torch.where(scale > self.eps, scale, torch.ones_like(scale))
        zero = -1 * low / scale
    else:
        scale = torch.maximum((top - bottom) / steps, self.eps)
        zero = (least - torch.round(bottom / scale).to(torch.int)).clamp(least, most)
    none = torch.isinf(low) & torch.isinf(high)
    scale, zero = scale.reshape(max(1, low.numel())), zero.reshape(max(1, low.numel()))
    none = none.reshape(scale.shape)
    return torch.where(none, torch.ones_like(scale), scale), torch.where(none, torch.zeros_like(zero), zero)


def _fused(self: Any, x: Tensor) -> Tensor:
    """Observe and quantise, which torch does in one op that reads the flags and the ranges."""
    observer = self.activation_post_process
    for values in (x, observer.min_val):
        if values.dtype == torch.float64:  # which torch's op refuses, too
            raise RuntimeError("expected scalar type Float but found Double")
    axis = self.ch_axis if self.is_per_channel else None
    if self.observer_enabled[0] != 0:
        _move_ranges(observer, x, axis)
    if self.fake_quant_enabled[0] == 0:
        return x.clone()
    least, most = observer.quant_min, observer.quant_max
    with torch.no_grad():
        found = torch.ops.actorflow.quantised(observer.min_val, observer.max_val, least, most, self.is_symmetric_quant)
        self.scale.copy_(found[0])
        self.zero_point.copy_(found[1])
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero_point, least, most)
    return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero_point, axis, least, most)
