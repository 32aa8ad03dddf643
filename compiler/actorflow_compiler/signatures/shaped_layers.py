"""Terms of the ops of layers and solvers; they depend on the shapes and arguments of a call."""

from __future__ import annotations

from actorflow_compiler.core.op_call import OpCall, argument, bind
from actorflow_compiler.custom_ops.causal_attention import CAUSAL, CAUSAL_BACKWARD


def embedding_backward(call: OpCall) -> str:
    """Gradients summed into the rows of a table."""
    if bind(call)[4]:  # scaled by how often a row occurs in the whole batch
        rank = len(call.ins[1].shape)
        return f"{'ABCEFGHI'[:rank]}d+,{'ABCEFGHI'[:rank]}->Vd"
    return ".d+,.<v>->vd"


def _heads(call: OpCall, query: int, key: int) -> tuple[str, str]:
    """The head index of queries and keys; several query heads may share a key head: ``(hg)`` and ``h``."""
    q, k = call.ins[query].shape[1], call.ins[key].shape[1]
    if q == k:
        return "h", "h"
    return ("(hg)", "h") if q % k == 0 else ("H", "K")


def attention(call: OpCall) -> str:
    """Batch and heads may be split, and the queries: each sees all keys, or (``causal_attention``) those before it."""
    q, k = _heads(call, 0, 1)
    mask = "" if call.op == CAUSAL else f",_,_,b{q}sT"
    return f"b{q}sD,b{k}TD,b{k}TE{mask}->b{q}sE,b{q}s !bhgs"


def attention_backward(call: OpCall) -> str:
    """As ``attention``; the gradients of keys and values are sums over the queries."""
    q, k = _heads(call, 1, 2)
    mask = "" if call.op == CAUSAL_BACKWARD else f",_,_,b{q}sT"
    return f"b{q}sE+,b{q}sD,b{k}TD,b{k}TE,b{q}sE,b{q}s{mask}->b{q}sD,b{k}TD,b{k}TE !bhgs"


def ring_attention(call: OpCall) -> str:
    """As ``attention``; how positions are split is the ring's affair."""
    q, k = _heads(call, 0, 1)
    return f"b{q}SD,b{k}TD,b{k}TE,b{q}SE,b{q}S,b{q}SU,b{q}S->b{q}SE,b{q}S !bhg"


def ring_attention_backward(call: OpCall) -> str:
    """As ``attention_backward``, with the gradient of the queries so far."""
    q, k = _heads(call, 1, 2)
    return f"b{q}SE,b{q}SD,b{k}TD,b{k}TE,b{q}SE,b{q}S,b{q}SD,b{q}SU->b{q}SD,b{k}TD,b{k}TE !bhg"


def pass_on(call: OpCall) -> str:
    """Widths may be split, and batch and heads together with those of what it waits for."""
    q, k = _heads(call, 1, 0)
    return f"b{k}Td+,b{q}S{'E' * (len(call.ins[1].shape) - 3)}->b{k}Td"


def even_out(call: OpCall) -> str:
    """All but the positions may be split."""
    width = "d" * (len(call.ins[0].shape) - 3)
    return f"bhS{width}+->bhT{width}"


def efficient_attention_backward(call: OpCall) -> str:
    """As ``attention_backward``, without a gradient of the bias, which is summed over its broadcast dims."""
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


def batch_norm(call: OpCall) -> str:
    """Channels may be split; with given statistics the batch, too (the saved statistics are then empty)."""
    without = call.op.endswith("no_stats")
    training = bind(call)[3 if without else 5]
    fixed = training or any(o is not None for o in call.outs[3:])
    x = f"{'N' if fixed else 'n'}c:"
    saved = ["c" if training else "_"] * 2
    return f"{x},{'c,c' if without else 'c,c,c,c'}->{','.join([x, *saved, 'c', 'c'][: len(call.outs)])} !nc"


def batch_norm_backward(call: OpCall) -> str:
    """Channels may be split; with given statistics the batch, too."""
    training = bind(call)[7]
    x = f"{'N' if training else 'n'}c:"
    return f"{x}+,{x},c,c,c,{'c,c' if training else '_,_'}->{x},c,c !nc"


def convolution(call: OpCall) -> str:
    """``n(gc):*,(go)c:*,(go)+->n(go):``: batch, groups, and the channels of each group."""
    weight = "(gc)o" if bind(call)[6] else "(go)c"
    return f"n(gc):*,{weight}:*,(go)+,_,_,_,_,_,#g->n(go): !gco"


def convolution_backward(call: OpCall) -> str:
    """The backward of a convolution; the gradient of the bias, if used, does not depend on the input channels."""
    bias = len(call.outs) > 2 and call.outs[2] is not None  # its shape is wrong where the batch is empty
    c = "C" if bias else "c"
    x, w, y = f"n(g{c}):", f"(g{c})o:" if bind(call)[7] else f"(go){c}:", "n(go):"
    return f"{y}+,{x},{w},_,_,_,_,_,_,#g->{x},{w},(go) !gco{'n' * bias}"


def weight_norm(call: OpCall) -> str:
    """``aBC,a11->aBC,a11 !a``: the dim that keeps its norms is the first or the last."""
    v, g = _kept(len(call.ins[0].shape), bind(call)[2])
    return f"{v},{g}->{v},{g} !a"


def weight_norm_backward(call: OpCall) -> str:
    """``aBC+,aBC,a11,a11->aBC,a11``."""
    v, g = _kept(len(call.ins[0].shape), bind(call)[4])
    return f"{v}+,{v},{g},{g}->{v},{g} !a"


def _kept(rank: int, dim: int) -> tuple[str, str]:
    letters, ones = "ABCDEFGH"[:rank], "1" * (rank - 1)
    if dim == 0:
        return f"a{letters[1:]}", f"a{ones}"
    return f"{letters[:-1]}a", f"{ones}a"


MAX = 2  # torch's number for the kind of bag that keeps the largest


def embedding_bag(call: OpCall) -> str:
    """Columns of the table may be split; the indices may not, since bounds of bags are positions among all of them."""
    return "Vd,N,O,_,_,_,N->Bd,_,_,Bd" if bind(call)[4] == MAX else "Vd+,N,O,_,_,_,N->Bd,_,_,_"


def embedding_bag_backward(call: OpCall) -> str:
    """The backward of ``embedding_bag``."""
    dense = "dense" in call.op
    _, mode = argument(call, "mode")
    where = "Bd" if mode == MAX else "_"
    return f"Bd+,N,{'N' if dense else 'O,N'},B,{where},_,_,{'_,N' if dense else '_,_,N'}->Vd"


def lu_solve(call: OpCall) -> str:
    """The columns, or rows, of the right side may be split."""
    return ".NM,.N,.Nk+->.Nk" if bind(call)[3] else ".NM,.N,.kN+->.kN"


def solve_triangular(call: OpCall) -> str:
    """As ``lu_solve``."""
    return ".NM,.Nk+->.Nk" if argument(call, "left")[1] else ".NM,.kN+->.kN"


def ormqr(call: OpCall) -> str:
    """As ``lu_solve``, with a product by an orthogonal matrix."""
    return ".NM,.K,.Ij+->.Ij" if argument(call, "left")[1] else ".NM,.K,.jI+->.jI"


def solve(call: OpCall) -> str:
    """Systems of equations with one or many right sides; the factors come out, too.

    Right sides of one dim less are those of all systems, or, if there are as many rows as systems, one for each: of
    which kind they are must not depend on how many systems a device has, so these are not split.
    """
    a, b = (m.shape for m in call.ins[:2])
    vector = len(b) == 1 or (len(a) - 1 == len(b) and b == a[:-1])
    if not vector and len(b) == len(a) - 1:
        systems, sides = "ABCEFGHI"[: len(a) - 2], "OPQRSTUV"[: len(b) - 2]
        return f"{systems}NM,{sides}NK->{systems}NK,{systems}NM,{systems}N,{systems}"
    x = ".N" if vector else ".NK"
    return f".NM,{x}->{x},.NM,.N,."
