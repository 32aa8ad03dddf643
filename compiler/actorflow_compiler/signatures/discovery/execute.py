"""Run op calls on real or meta tensors, and draw random operands for a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.op_call import CALLS_STAY, OpCall, overload
from actorflow_compiler.core.ops import Arg, Meta, Ref, Symbol

Outs = list[Tensor | None]


class DrawKind(StrEnum):
    """Which random numbers floating operands are drawn from."""

    NORMAL = "normal"
    POSITIVE = "positive"  # 0.1 … 0.9
    WIDE = "wide"  # thirty times normal, or beyond every number among the arguments, since that may be a bound
    HUGE = "huge"  # ten thousand times normal
    WITH_NANS = "with nans"  # normal, some elements are NaN


FINITE_KINDS = (DrawKind.NORMAL, DrawKind.POSITIVE, DrawKind.WIDE, DrawKind.HUGE)


def run(op: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]], tensors: Sequence[Tensor]) -> Outs:
    """Run an op of torch; on meta tensors that only computes shapes.  Exceptions of the op pass through."""
    device = tensors[0].device if tensors else torch.device("cpu")
    out = overload(op)(*(_real(a, tensors, device) for a in args), **{k: _real(v, tensors, device) for k, v in kwargs})
    flat = list(out) if isinstance(out, list | tuple) else [out]
    return [r if isinstance(r, Tensor) else None for r in flat]


def _real(value: Arg, tensors: Sequence[Tensor], device: torch.device) -> Any:
    if isinstance(value, Ref):
        return tensors[value.index]
    if isinstance(value, tuple):
        return [_real(v, tensors, device) for v in value]
    if isinstance(value, Symbol):
        return device if value.text.startswith("device:") else getattr(torch, value.text.removeprefix("torch."))
    return value


def on_meta(call: OpCall) -> Outs | None:
    """The op's outputs on meta tensors; None if it has no meta kernel.  Raises if the op refuses the shapes."""
    outs = _on_meta(replace(call, outs=()))
    if isinstance(outs, str):
        raise RuntimeError(outs)
    return outs


@kept_while_compiling(1 << 12, stay=CALLS_STAY)  # some take a tenth of a second
def _on_meta(call: OpCall) -> Outs | str | None:
    tensors = [torch.empty(m.shape, dtype=getattr(torch, m.dtype), device="meta") for m in call.ins]
    try:
        return run(call.op, call.args, call.kwargs, tensors) if tensors else None
    except NotImplementedError:
        return None
    except Exception as error:  # whatever an op raises about shapes that do not fit
        return str(error)


def draw(call: OpCall, seed: int, kind: DrawKind) -> list[Tensor]:
    """Random operands for a call; the same for the same seed.

    ``kind`` is for floating operands.  Whole numbers are below the smallest size, so that they may be positions;
    truth values are mixed.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [n for m in call.ins for n in m.shape if n > 1]
    bound = max((abs(v) for v in numbers((call.args, tuple(v for _, v in call.kwargs))) if abs(v) < 1e12), default=0.0)
    scale = {DrawKind.WIDE: max(30.0, 2.0 * bound), DrawKind.HUGE: 1e4}.get(kind, 1.0)
    return [_draw(m, min(sizes, default=4), kind, scale, generator) for m in call.ins]


def numbers(arg: Arg) -> Iterator[float]:
    """The numbers among arguments."""
    if isinstance(arg, tuple):
        for part in arg:
            yield from numbers(part)
    elif isinstance(arg, int | float) and not isinstance(arg, bool):
        yield arg


def _draw(meta: Meta, below: int, kind: DrawKind, scale: float, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, meta.dtype)
    if meta.dtype == "bool":
        return torch.rand(meta.shape, generator=generator) < 0.5
    if not meta.is_float:
        return torch.randint(0, below, meta.shape, generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if kind == DrawKind.POSITIVE:
        return (torch.rand(meta.shape, generator=generator, dtype=wide) * 0.8 + 0.1).to(dtype)
    drawn = torch.randn(meta.shape, generator=generator, dtype=wide) * scale
    if kind == DrawKind.WITH_NANS:
        drawn[torch.rand(meta.shape, generator=generator) < 0.1] = torch.nan
    return drawn.to(dtype)


def meta_of(tensor: Tensor) -> Meta:
    """Shape and dtype."""
    return Meta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest element of ``b``; exactly for 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)
