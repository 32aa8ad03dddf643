"""Tell signatures that round terms of a sum to few bits before they are added, where a single device rounds the sum."""

from __future__ import annotations

from actorflow_compiler.core.op_call import OpCall, Signature
from actorflow_compiler.core.ops import FEW_BITS, FLOATS
from actorflow_compiler.core.sbp import PartialSum

__all__ = ["narrows_sums", "rounds_sums"]


def rounds_sums(call: OpCall, signature: Signature) -> bool:
    """Whether an op makes terms of few bits, as products of such numbers are made."""
    outs = zip(signature.outs, call.outs, strict=True)
    return any(isinstance(s, PartialSum) and m is not None and m.dtype in FEW_BITS for s, m in outs)


def narrows_sums(call: OpCall, signature: Signature) -> bool:
    """Whether an op reads terms of more bits than those that it makes, as a cast of a sum does."""
    ins = zip(signature.ins, call.ins, strict=True)
    wide = any(isinstance(s, PartialSum) and m is not None and m.dtype in FLOATS - FEW_BITS for s, m in ins)
    return wide and rounds_sums(call, signature)
