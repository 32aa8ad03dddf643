"""Signatures by which attention goes around a ring of devices, and those of the ops that it is then made of.

Queries, keys and values stay split by positions.  The op is decomposed (``infer/ring_decompositions.py``) into steps
between which blocks of keys and values are passed on.
"""

from __future__ import annotations

from actorflow_compiler.core.op_call import OpCall, Signature, argument, bind
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.core.sbp import B, Parts, Sbp, Split, all_share
from actorflow_compiler.custom_ops.ring_attention import (
    CUT_BACK,
    EACH,
    EVEN_OUT,
    PASS_ON,
    POSITIONS,
    RING,
    RING_BACKWARD,
)

FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
WRITTEN_OUT = frozenset({FORWARD, BACKWARD})
STEPS = frozenset({RING, RING_BACKWARD, PASS_ON, EVEN_OUT, CUT_BACK})  # what they are written out in
DIMS = 4


def ring_signatures(call: OpCall, parts: Parts) -> tuple[Signature, ...]:
    """The signature that splits all operands and outputs by positions over a ring of ``parts`` devices, if it is legal.

    Attention with dropout, over devices with weights, or causal and of more or fewer queries than keys has none.
    """
    if not isinstance(parts, int) or parts < 2 or (call.op not in STEPS and why_not(call, parts)):
        return ()
    if call.op in STEPS and _devices(call) != parts:
        return ()
    outs = tuple(None if m is None else Split(POSITIONS) for m in call.outs)
    return (Signature(tuple(_rows(call, m) for m in call.ins), outs, "s", inner=True),)


def why_not(call: OpCall, parts: Parts) -> str:
    """Why attention cannot go around a ring of these devices; empty if it can."""
    if call.op not in WRITTEN_OUT:
        return "its kernel is not that of CPUs"
    backward = call.op == BACKWARD
    q, k = call.ins[backward], call.ins[backward + 1]
    if len(q.shape) != DIMS:
        return f"it has {len(q.shape)} dims and not {DIMS}"
    mask = argument(call, "attn_mask")[1]
    if mask is not None and not (isinstance(mask, Ref) and _fits(call.ins[mask.index], q, k)):
        return "it has a mask that does not have a column for each key"
    if argument(call, "dropout_p")[1]:
        return "it has dropout"
    if not isinstance(parts, int):
        return "devices share by weights"
    if argument(call, "is_causal")[1] and q.shape[POSITIONS] != k.shape[POSITIONS]:
        return f"it is causal, of {q.shape[POSITIONS]} queries to {k.shape[POSITIONS]} keys"
    if not all(all_share(m.shape[POSITIONS], parts) for m in (q, k)):
        return f"{parts} devices are more than its positions"
    return ""


def _devices(call: OpCall) -> int:
    """The devices of the ring that a step is for."""
    arguments = bind(call)
    if call.op == PASS_ON:
        (*_, devices) = arguments
        assert isinstance(devices, int)
        return devices
    listed = arguments[1] if call.op in (EVEN_OUT, CUT_BACK) else arguments[-2]
    assert isinstance(listed, tuple)
    return len(listed) if call.op in (EVEN_OUT, CUT_BACK) else len(listed) // EACH


def _rows(call: OpCall, operand: Meta) -> Sbp:
    """The split of an operand by positions; a mask may have one row for all of them."""
    if call.op in (PASS_ON, EVEN_OUT, CUT_BACK):
        return Split(POSITIONS)
    at = len(operand.shape) - 2 if len(operand.shape) < DIMS - 1 else POSITIONS
    return B if operand.shape[at] == 1 else Split(at)


def _fits(mask: Meta, q: Meta, k: Meta) -> bool:
    """Whether a mask has a column for each key, and a row for each query or one for all."""
    return (
        mask.is_float
        and len(mask.shape) in (DIMS - 2, DIMS)
        and mask.shape[-1] == k.shape[POSITIONS]
        and mask.shape[-2] in (1, q.shape[POSITIONS])
    )
