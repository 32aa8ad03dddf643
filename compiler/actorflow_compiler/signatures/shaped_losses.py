"""Terms of losses; they depend on the reduction.

Capture decomposes means into sums, so a loss that still has a mean reduction is not split.
"""

from __future__ import annotations

from actorflow_compiler.core.op_call import OpCall, argument, bind, operand
from actorflow_compiler.core.ops import Ref

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
    """``TnC,nS,n,n->n,nTA``: samples may be split, unless the labels of all samples are concatenated."""
    n = "n" if len(call.ins[1].shape) == 2 else "N"
    labels = "nS" if n == "n" else "S"
    return f"T{n}C,{labels},{n},{n}->{n},{n}TA !{n}"


def ctc_backward(call: OpCall) -> str:
    """As ``ctc``, linear in the gradient."""
    n = "n" if len(call.ins[2].shape) == 2 else "N"
    labels = "nS" if n == "n" else "S"
    return f"{n}+,T{n}C,{labels},{n},{n},{n},{n}TA->T{n}C !{n}"


def _samples(call: OpCall, at: int) -> str | None:
    """The dims of the targets, without the classes; None for a single sample."""
    rank = len(call.ins[at].shape)
    return "nhw"[:rank] if rank in (1, 3) else None


def nll_loss(call: OpCall) -> str | None:
    """The sum of losses and of weights, or the loss of each sample; capture has decomposed a mean."""
    reduction = bind(call)[3]
    n = _samples(call, 1)
    if n is None:
        return None
    if reduction == NONE:
        return f"{n[0]}C{n[1:]},{n},C->{n},_"
    upper = n if reduction == SUM else n.upper()
    return f"{upper[0]}C{upper[1:]},{upper},C->,"


def nll_loss_backward(call: OpCall) -> str | None:
    """``+,nC,n,C,_,_,_->nC``."""
    n = _samples(call, 2)
    if n is None or not isinstance(bind(call)[0], Ref):
        return None
    grad = n if len(operand(call, bind(call)[0]).shape) else ""
    x = f"{n[0]}C{n[1:]}"
    return f"{grad}+,{x},{n},C,_,_,_->{x}"


def pick(call: OpCall) -> str:
    """``nvhw+,nhw<v>->nhw``: with classes split, a part gives 0 for targets among other parts' classes."""
    x, target = _classes(len(call.ins[0].shape), call.args[2])
    return f"{x}+,{target}<v>->{target}"


def pick_backward(call: OpCall) -> str:
    """``nhw+,nhw<v>->nvhw``."""
    x, target = _classes(len(call.ins[1].shape) + 1, call.args[3])
    return f"{target}+,{target}<v>->{x}"


def amax_blocks(call: OpCall) -> str:
    """``nvh,_,^v->nv^h``."""
    x, _ = _classes(len(call.ins[0].shape), call.args[1])
    return f"{x},_,^v->{x.replace('v', 'v^')}"


def _classes(rank: int, dim: int) -> tuple[str, str]:
    """The indices of a tensor whose dim ``dim`` has the classes v, and the same without v."""
    others = "abcdefgh"[: rank - 1]
    return f"{others[:dim]}v{others[dim:]}", others
