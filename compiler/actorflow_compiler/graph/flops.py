"""Floating-point operations of an op; matmuls, convolutions and attention count, the rest is free."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping

from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.op_call import CALLS, CALLS_STAY
from actorflow_compiler.core.ops import FLOATS
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.signatures import OpCall

_RING = "ring_attention"
_ATTENTION = ("_scaled_dot_product", "causal_attention", _RING)


@kept_while_compiling(CALLS, stay=CALLS_STAY)
def flops_of(call: OpCall) -> float:
    """The floating-point operations of a call; a multiply-add counts twice."""
    name = call.op.split(".")[1]
    if name.startswith(_RING):
        return _ring(call, backward="backward" in name)
    if name.startswith(_ATTENTION):
        return _attention(call, backward="backward" in name)
    rule = _RULES.get(name)
    return 2.0 * rule(call) if rule is not None else 0.0


def is_product(op: str) -> bool:
    """Whether an op has FLOPs that count."""
    name = op.split(".")[1]
    return name in _RULES or name.startswith(_ATTENTION)


def dtype_of_flops(call: OpCall) -> str:
    """The floating-point dtype that most bytes of a call's operands have; empty if none has one."""
    nbytes: Counter[str] = Counter()
    for meta in call.ins:
        if meta.dtype in FLOATS:
            nbytes[meta.dtype] += meta.nbytes
    return max(nbytes, key=nbytes.__getitem__, default="")


def _attention(call: OpCall, backward: bool) -> float:
    query, key = (call.ins[i + backward].shape for i in range(2))
    return (10.0 if backward else 4.0) * numel(query) * key[-2]


def _ring(call: OpCall, backward: bool) -> float:
    """Attention of each device's block of queries to the keys that are there."""
    query, blocks = call.ins[backward].shape, call.args[-2]
    assert isinstance(blocks, tuple)
    keys = sum(n for n in blocks[::3] if isinstance(n, int))
    return (10.0 if backward else 4.0) * numel(query) / (len(blocks) // 3) * keys


def _product(call: OpCall, first: int = 0) -> float:
    """Multiply-adds of a product of the operands ``first`` and the one after it."""
    return numel(call.ins[first].shape) * call.ins[first + 1].shape[-1]


def _convolution(call: OpCall) -> float:
    out = call.outs[0]
    return numel(out.shape) * numel(call.ins[1].shape[1:]) if out is not None else 0


def _convolution_backward(call: OpCall) -> float:
    wanted = sum(m is not None for m in call.outs[:2])
    return numel(call.ins[0].shape) * numel(call.ins[2].shape[1:]) * wanted


def _experts(call: OpCall) -> float:
    """Each row is multiplied by one expert's matrix; rows are assumed to be even over the devices that hold experts."""
    return _product(call) * float(call.ins[1].shape[0] / max(1, call.args[-1]))


def _experts_weight(call: OpCall) -> float:
    return _product(call) * float(call.args[-2] / max(1, call.args[-1]))


def _experts_backward(call: OpCall) -> float:
    return _product(call) * sum(m is not None for m in call.outs)


_RULES: Mapping[str, Callable[[OpCall], float]] = {  # name of the op → multiply-adds
    "mm": _product,
    "bmm": _product,
    "addmm": functools.partial(_product, first=1),
    "baddbmm": functools.partial(_product, first=1),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "grouped_mm": _experts,
    "grouped_mm_weight": _experts_weight,
    "_grouped_mm": _product,
    "grouped_mm_fallback": _product,
    "grouped_mm_fallback_backward": _experts_backward,
}
