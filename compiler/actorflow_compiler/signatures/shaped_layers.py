"""A layer's or a loss's op goes in; its term, which depends on shapes and arguments, comes out."""

from __future__ import annotations

from actorflow_compiler.ops import Ref
from actorflow_compiler.signatures.call import OpCall, bind, operand

SUM, NONE = 2, 0  # torch's numbers for reductions
SPACE, KERNEL, MOVED = "HWDUVT", "KLMJIG", "XYZSRQ"  # input, kernel and output dims of images


def embedding_backward(call: OpCall) -> str:
    """Gradients summed into the rows of a table."""
    if bind(call)[4]:  # scaled by how often a row occurs in the whole batch
        rank = len(call.ins[1].shape)
        return f"{'ABCEFGHI'[:rank]}d+,{'ABCEFGHI'[:rank]}->Vd"
    return ".d+,.<v>->vd"


def _heads(call: OpCall, query: int, key: int) -> tuple[str, str]:
    """The head index of queries and keys; several query heads may share a key head: ``(hG)`` and ``h``."""
    q, k = call.ins[query].shape[1], call.ins[key].shape[1]
    if q == k:
        return "h", "h"
    return ("(hG)", "h") if q % k == 0 else ("H", "K")


def attention(call: OpCall) -> str:
    """Batch and heads may be split, and the queries where each sees all keys."""
    q, k = _heads(call, 0, 1)
    s = "S" if bind(call)[4] else "s"
    return f"b{q}{s}D,b{k}TD,b{k}TE,_,_,b{q}{s}T->b{q}{s}E,b{q}{s} !bhs"


def attention_backward(call: OpCall) -> str:
    """As ``attention``; the gradients of keys and values are sums over the queries."""
    q, k = _heads(call, 1, 2)
    s = "S" if bind(call)[7] else "s"
    return f"b{q}{s}E+,b{q}{s}D,b{k}TD,b{k}TE,b{q}{s}E,b{q}{s},_,_,b{q}{s}T->b{q}{s}D,b{k}TD,b{k}TE !bhs"


def efficient_attention_backward(call: OpCall) -> str:
    """Without a gradient of the bias, which sums over what it is broadcast along."""
    bias = call.outs[3] is None
    b, h = ("b", "h") if bias else ("B", "H")
    return f"{b}{h}SE+,{b}{h}SD,{b}{h}TD,{b}{h}TE,{b}{h}ST,{b}{h}SE,{b}{h}L,_,_->{b}{h}SD,{b}{h}TD,{b}{h}TE,{b}{h}ST"


def _normalised(call: OpCall, at: int) -> tuple[str, str]:
    """The normalised dims of input and statistics."""
    count = len(bind(call)[at])
    return "NMLKJ"[:count], "1" * count


def layer_norm(call: OpCall) -> str:
    """``.N,_,N,N->.N,.1,.1``."""
    n, one = _normalised(call, 1)
    return f".{n},_,{n},{n}->.{n},.{one},.{one}"


def layer_norm_backward(call: OpCall) -> str:
    """``.N+,.N,_,.1,.1,N,N->.N,N,N``."""
    n, one = _normalised(call, 2)
    return f".{n}+,.{n},_,.{one},.{one},{n},{n}->.{n},{n},{n}"


def rms_norm(call: OpCall) -> str:
    """``.N,_,N->.N,.1``."""
    n, one = _normalised(call, 1)
    return f".{n},_,{n}->.{n},.{one}"


def rms_norm_backward(call: OpCall) -> str:
    """``.N+,.N,_,.1,N->.N,N``."""
    n, one = _normalised(call, 2)
    return f".{n}+,.{n},_,.{one},{n}->.{n},{n}"


def _space(call: OpCall) -> str:
    return SPACE[: max(0, len(call.ins[0].shape) - 2)]


def group_norm(call: OpCall) -> str:
    """``nCHW,C,C,#0->nCHW,nG,nG``."""
    space = _space(call)
    return f"nC{space},C,C,#0->nC{space},nG,nG"


def group_norm_backward(call: OpCall) -> str:
    """``nCHW+,nCHW,nG,nG,C,#0->nCHW,C,C``."""
    space = _space(call)
    return f"nC{space}+,nC{space},nG,nG,C,#0->nC{space},C,C"


def batch_norm(call: OpCall) -> str:
    """Channels; where the statistics are given also the batch (the saved ones are then empty)."""
    without = call.op.endswith("no_stats")
    training = bind(call)[3 if without else 5]
    fixed = training or any(o is not None for o in call.outs[3:])
    x = f"{'N' if fixed else 'n'}c{_space(call)}"
    saved = ["c" if training else "_"] * 2
    return f"{x},{'c,c' if without else 'c,c,c,c'}->{','.join([x, *saved, 'c', 'c'][: len(call.outs)])} !nc"


def batch_norm_backward(call: OpCall) -> str:
    """Channels; where the statistics were given also the batch."""
    training = bind(call)[7]
    x = f"{'N' if training else 'n'}c{_space(call)}"
    return f"{x}+,{x},c,c,c,{'c,c' if training else '_,_'}->{x},c,c !nc"


def _channels(call: OpCall, groups: int, transposed: bool) -> tuple[str, str, str]:
    """Input channels, output channels, and the weight's first two dims."""
    if groups != 1:
        return "C", "O", "PQ"
    return ("c", "o", "co") if transposed else ("c", "o", "oc")


def convolution(call: OpCall) -> str:
    """``ncHW*,ocKL*,o+->noXY``."""
    *_, transposed, _, groups = bind(call)
    c, o, weight = _channels(call, groups, transposed)
    rank = len(call.ins[0].shape) - 2
    return f"n{c}{SPACE[:rank]}*,{weight}{KERNEL[:rank]}*,{o}+->n{o}{MOVED[:rank]} !co"


def convolution_backward(call: OpCall) -> str:
    """``noXY+,ncHW,ocKL->ncHW,ocKL,_``; the bias gradient, where used, does not look at the input channels."""
    *_, transposed, _, groups, _ = bind(call)
    c, o, weight = _channels(call, groups, transposed)
    if len(call.outs) > 2 and call.outs[2] is not None:
        c, weight = "C", weight.replace("c", "C")
    rank = len(call.ins[0].shape) - 2
    x, w, y = f"n{c}{SPACE[:rank]}", f"{weight}{KERNEL[:rank]}", f"n{o}{MOVED[:rank]}"
    return f"{y}+,{x},{w}->{x},{w},{o} !co"


def _samples(call: OpCall, at: int) -> str | None:
    """The dims of the targets, without the classes; None for a single sample."""
    rank = len(call.ins[at].shape)
    return "nhw"[:rank] if rank in (1, 3) else None


def nll_loss(call: OpCall) -> str | None:
    """The sum of losses and of weights, or the loss of each sample; a mean is written out before."""
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
