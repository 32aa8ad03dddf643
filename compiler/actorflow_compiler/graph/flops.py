"""Floating-point operations of an op; matmuls, convolutions and attention count, the rest is free."""

from __future__ import annotations

import functools

from actorflow_compiler.core.sbp import numel
from actorflow_compiler.signatures import OpCall


@functools.cache
def flops_of(call: OpCall) -> float:
    """Multiply-adds count twice."""
    ins = [m.shape for m in call.ins]
    name = call.op.split(".")[1]
    if name in ("mm", "bmm"):
        return 2.0 * numel(ins[0]) * ins[1][-1]
    if name in ("addmm", "baddbmm"):
        return 2.0 * numel(ins[1]) * ins[2][-1]
    if name == "convolution" and call.outs[0] is not None:
        return 2.0 * numel(call.outs[0].shape) * numel(ins[1][1:])
    if name == "convolution_backward":
        wanted = sum(m is not None for m in call.outs[:2])
        return 2.0 * numel(ins[0]) * numel(ins[2][1:]) * wanted
    if name == "grouped_mm":  # a row has one matrix, which is as likely here as elsewhere
        return 2.0 * numel(ins[0]) * ins[1][-1] * float(ins[1][0] / max(1, call.args[-1]))
    if name == "grouped_mm_weight":
        return 2.0 * numel(ins[0]) * ins[1][-1] * float(call.args[-2] / max(1, call.args[-1]))
    if name in ("_grouped_mm", "grouped_mm_fallback"):
        return 2.0 * numel(ins[0]) * ins[1][-1]
    if name == "grouped_mm_fallback_backward":
        return 2.0 * numel(ins[0]) * ins[1][-1] * sum(m is not None for m in call.outs)
    if name.startswith("_scaled_dot_product"):
        q = ins[1] if "backward" in name else ins[0]
        k = ins[2] if "backward" in name else ins[1]
        return (10.0 if "backward" in name else 4.0) * numel(q) * k[-2]
    return 0.0
