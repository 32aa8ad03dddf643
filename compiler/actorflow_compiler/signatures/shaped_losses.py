"""Terms of losses; they depend on the reduction.

Losses whose mean is asked for are decomposed into sums when they are captured, so a mean that is left is whole.
"""

from __future__ import annotations

from actorflow_compiler.core.op_call import OpCall, argument

NONE, SUM = 0, 2  # torch's numbers for reductions


def loss(call: OpCall) -> str:
    """``.,.->.`` or its sum ``.,.->``."""
    at, reduction = argument(call, "reduction")
    if reduction in (NONE, SUM):
        return f"{','.join('.' * at)}->{'.' if reduction == NONE else ''}"
    return f"{','.join(':' * at)}->"


def loss_backward(call: OpCall) -> str:
    """``.+,.,.->.``: the gradient is one for each element, or one for all."""
    at, reduction = argument(call, "reduction")
    dims = "." if reduction in (NONE, SUM) else ":"
    return f"{dims}+,{','.join(dims * (at - 1))}->{dims}"


def margin(call: OpCall) -> str | None:
    """``nC,n->n``: a loss for each sample over its classes."""
    _, reduction = argument(call, "reduction")
    if reduction not in (NONE, SUM) or len(call.ins[0].shape) != 2:
        return None
    out = "n" if reduction == NONE else ""
    return f"nC,n,_,_,C->{out}" if call.op.startswith("aten.multi_margin") else f"nC,nC->{out},nC"


def margin_backward(call: OpCall) -> str | None:
    """``n+,nC,n->nC``, or with one gradient for all."""
    _, reduction = argument(call, "reduction")
    if reduction not in (NONE, SUM) or len(call.ins[1].shape) != 2:
        return None
    grad = "n" * len(call.ins[0].shape)
    return f"{grad}+,nC,n,_,_,C->nC" if call.op.startswith("aten.multi_margin") else f"{grad}+,nC,nC,_,nC->nC"


def ctc(call: OpCall) -> str:
    """``TnC,nS,n,n->n,nTA``: samples may be split, but those whose labels are one behind the other."""
    n = "n" if len(call.ins[1].shape) == 2 else "N"
    labels = "nS" if n == "n" else "S"
    return f"T{n}C,{labels},{n},{n}->{n},{n}TA !{n}"


def ctc_backward(call: OpCall) -> str:
    """As ``ctc``, linear in the gradient."""
    n = "n" if len(call.ins[2].shape) == 2 else "N"
    labels = "nS" if n == "n" else "S"
    return f"{n}+,T{n}C,{labels},{n},{n},{n},{n}TA->T{n}C !{n}"
