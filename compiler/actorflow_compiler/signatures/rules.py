"""Ops whose rule depends on their arguments: views, joins, cuts, indexing; each function writes the rule's text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from actorflow_compiler.ops import Arg, Ref
from actorflow_compiler.signatures.model import OpCall
from actorflow_compiler.signatures.notation import arguments

LETTERS = "abcdefghijklmnop"


def _first(call: OpCall) -> tuple[int, ...]:
    return call.ins[0].shape


def _arg(call: OpCall, name: str) -> Arg:
    return dict(arguments(call))[name]


def letters(rank: int) -> list[str]:
    """Distinct letters for the dims of a tensor."""
    return list(LETTERS[:rank])


def transpose(call: OpCall) -> str:
    """Two dims change places."""
    out = letters(len(_first(call)))
    text = "".join(out)
    if call.op.startswith("aten.t."):
        a, b = 0, len(out) - 1
    else:
        a, b = (int(call.args[1]) % len(out), int(call.args[2]) % len(out)) if out else (0, 0)
    if out:
        out[a], out[b] = out[b], out[a]
    return f"{text}+->{''.join(out)}"


def permute(call: OpCall) -> str:
    """The dims in another order."""
    ins = letters(len(_first(call)))
    return f"{''.join(ins)}+,_->{''.join(ins[d] for d in call.args[1])}"


def unsqueeze(call: OpCall) -> str:
    """A new dim of size 1."""
    ins = letters(len(_first(call)))
    out = list(ins)
    out.insert(int(call.args[1]) % (len(ins) + 1), "1")
    return f"{''.join(ins)}+,_->{''.join(out)}"


def squeeze(call: OpCall) -> str:
    """Dims of size 1 disappear."""
    shape = _first(call)
    ins = letters(len(shape))
    dims = call.args[1] if len(call.args) > 1 else tuple(range(len(shape)))
    dims = (dims,) if isinstance(dims, int) else dims
    gone = {d % len(shape) for d in dims if shape[d] == 1} if shape else set()
    return f"{''.join(ins)}+,_->{''.join(x for i, x in enumerate(ins) if i not in gone)}"


def expand(call: OpCall) -> str:
    """Dims of size 1, and new ones, are repeated."""
    shape, out = _first(call), call.outs[0]
    assert out is not None
    names = letters(len(out.shape))
    offset = len(names) - len(shape)
    return f"{''.join(names[offset:])}+,[{''.join(names)}]->{''.join(names)}"


def cut_dim(call: OpCall) -> str:
    """A range, or one element, of one dim: the others may be split."""
    shape = _first(call)
    if not shape:
        return "+->"
    dim = int(_arg(call, "dim")) % len(shape)
    ins = letters(len(shape))
    out = list(ins)
    if call.op.startswith("aten.slice."):
        result = call.outs[0]
        assert result is not None
        if result.shape != shape:
            ins[dim], out[dim] = "Y", "Z"
    else:
        ins[dim] = "Y"
        del out[dim]
    outs = ",".join(["".join(out)] * len(call.outs))
    return f"{''.join(ins)}+->{outs}"


def split(call: OpCall) -> str:
    """A tensor cut into several along a dim; equal parts keep that dim splittable."""
    shape = _first(call)
    dim = int(_arg(call, "dim")) % len(shape)
    ins = letters(len(shape))
    parts = [o.shape for o in call.outs if o is not None]
    size = _arg(call, "split_size") if "split_size" in dict(arguments(call)) else None
    equal = isinstance(size, int) and shape[dim] % size == 0 and len(call.outs) * size == shape[dim]
    out = list(ins)
    inner = ins[dim]
    if equal:
        ins[dim] = f"(Q{inner})"
    else:
        ins[dim], out[dim] = "Y", "Z"
    outs = ",".join(["".join(out)] * len(call.outs))
    del parts
    return f"{''.join(ins)}+,{f'#{inner}' if equal else '_'},_->{outs}"


def cat(call: OpCall) -> str:
    """Tensors joined along a dim; equal ones keep that dim splittable."""
    shapes = [call.ins[r.index].shape for r in call.args[0] if isinstance(r, Ref)]
    result = call.outs[0]
    assert result is not None
    rank = len(result.shape)
    dim = int(_arg(call, "dim")) % rank
    names = letters(rank)
    if any(len(s) != rank for s in shapes):  # an empty tensor of one dim, which cat ignores
        return "->"
    equal = all(s == shapes[0] for s in shapes)
    terms, out = [], list(names)
    for i, _ in enumerate(shapes):
        term = list(names)
        if not equal:
            term[dim] = "QRSTUVWXYZ"[i % 10]
        terms.append("".join(term) + "+")
    out[dim] = f"(Q{names[dim]})" if equal else "P"
    return f"{';'.join(terms)},_->{''.join(out)}"


def stack(call: OpCall) -> str:
    """Tensors joined along a new dim."""
    count = sum(isinstance(r, Ref) for r in call.args[0])
    names = letters(len(_first(call)))
    out = list(names)
    out.insert(int(_arg(call, "dim")) % (len(names) + 1), "Q")
    return f"{';'.join([''.join(names) + '+'] * count)},_->{''.join(out)}"


def view(call: OpCall) -> str:
    """Another shape over the same elements: the common refinement of both shapes."""
    result = call.outs[0]
    assert result is not None
    a, b = _first(call), result.shape
    if 0 in a:
        return "->"
    cuts = sorted(set(_suffixes(a)) | set(_suffixes(b)))
    common = set(_suffixes(a)) & set(_suffixes(b))
    following = dict(itertools.pairwise(cuts))
    broken: set[int] = set()
    for c in cuts[:-1]:
        if following[c] % c:
            low = max(x for x in common if x <= c)
            high = min(x for x in common if x > c)
            broken |= {d for d in cuts if low <= d < high}
    names = {c: (LETTERS[i] if c not in broken else chr(ord("A") + i)) for i, c in enumerate(reversed(cuts[:-1]))}
    return f"{_refined(a, cuts, names, broken)}+,[{_refined(b, cuts, names, broken)}]->{_refined(b, cuts, names, broken)}"


def _suffixes(shape: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(reversed(shape), lambda p, n: p * n, initial=1))


def _refined(shape: Sequence[int], cuts: Sequence[int], names: dict[int, str], broken: set[int]) -> str:
    text, high = "", math.prod(shape)
    for n in shape:
        low = high // n
        inside = [c for c in reversed(cuts) if low <= c < high]
        high = low
        if not inside:
            text += "1"
        elif any(c in broken for c in inside):
            text += "Z"
        else:
            text += names[inside[0]] if len(inside) == 1 else f"({''.join(names[c] for c in inside)})"
    return text


def backward_of_cut(call: OpCall) -> str:
    """slice_backward, select_backward: the cut dim may not be split."""
    result = call.outs[0]
    assert result is not None
    dim = int(_arg(call, "dim")) % len(result.shape)
    out = letters(len(result.shape))
    grad = list(out)
    if len(call.ins[0].shape) < len(out):
        del grad[dim]
    else:
        grad[dim] = "Y"
    out[dim] = "Z"
    return f"{''.join(grad)}+,[{''.join(out)}]->{''.join(out)}"


def pad(call: OpCall) -> str:
    """Padded dims may not be split; padding with zeros is linear."""
    widths = call.args[1]
    names = letters(len(_first(call)))
    out = list(names)
    for i in range(len(widths) // 2):
        if widths[2 * i] or widths[2 * i + 1]:
            names[-1 - i], out[-1 - i] = "Y", "Z"
    names = [f"{x}" if x != "Y" else "RSTUVWXY"[i % 8] for i, x in enumerate(names)]
    out = [f"{x}" if x != "Z" else "JKLMNOPQ"[i % 8] for i, x in enumerate(out)]
    value = _arg(call, "value")
    return f"{''.join(names)}{'' if value else '+'}->{''.join(out)}"


def gather(call: OpCall) -> str:
    """x.gather(dim, index): dims that x and index share may be split, dim itself may be split in the index."""
    x, index = call.ins[0].shape, call.ins[1].shape
    if not x:
        return "->"
    dim = int(_arg(call, "dim")) % len(x)
    first, second = "", ""
    for i, name in enumerate(letters(len(x))):
        if i == dim:
            first, second = first + "Y", second + name
        elif x[i] == index[i]:
            first, second = first + name, second + name
        else:
            first, second = first + "RSTUVWX"[i % 7], second + "JKLMNOP"[i % 7]
    return f"{first}+,_,{second}->{second}"


def index_tensor(call: OpCall) -> str:
    """x[i, j, …] with index tensors for the leading dims; their dims and the rest of x may be split."""
    indices = call.args[1]
    if any(not isinstance(i, Ref) for i in indices) or any(call.ins[i.index].dtype == "bool" for i in indices):
        return "->"
    shapes = [call.ins[i.index].shape for i in indices]
    rank = max(len(s) for s in shapes)
    if any(s != max(shapes, key=len) for s in shapes):
        return "->"
    inner = LETTERS[:rank]
    rest = LETTERS[rank : rank + len(_first(call)) - len(indices)]
    return f"{'QRSTUVWX'[: len(indices)]}{rest}+,{';'.join([inner] * len(indices))}->{inner}{rest}"


def layer_norm(call: OpCall) -> str:
    """Normalised dims may not be split."""
    count = len(call.args[1])
    n = "NMLKJ"[:count]
    return f".{n},[{n}],{n},{n}->.{n},.{'1' * count},.{'1' * count}"


def layer_norm_backward(call: OpCall) -> str:
    """Gradients of weight and bias are sums over the other dims."""
    count = len(call.args[2])
    n = "NMLKJ"[:count]
    return f".{n}+,.{n},[{n}],.{'1' * count},.{'1' * count},{n},{n}->.{n},{n},{n}"


def _spatial(rank: int, names: str) -> str:
    return names[: rank - 2]


def convolution(call: OpCall) -> str:
    """Batch and channels may be split, space may not; grouped convolutions split only the batch."""
    rank = len(_first(call))
    c, o = ("c", "o") if _arg(call, "groups") == 1 else ("C", "O")
    weight = f"{c}{o}" if _arg(call, "transposed") else f"{o}{c}"
    if c == "C":
        weight = "OG"
    return f"n{c}{_spatial(rank, 'HWD')}*,{weight}{_spatial(rank, 'KLM')}*,{o}+->n{o}{_spatial(rank, 'XYZ')}"


def convolution_backward(call: OpCall) -> str:
    """The gradient of the weight is a sum over the batch, that of the input over output channels."""
    rank = len(_first(call))
    c, o = ("c", "o") if _arg(call, "groups") == 1 else ("C", "O")
    weight = f"{c}{o}" if _arg(call, "transposed") else f"{o}{c}"
    if c == "C":
        weight = "OG"
    weight += _spatial(rank, "KLM")
    x = f"n{c}{_spatial(rank, 'HWD')}"
    return f"n{o}{_spatial(rank, 'XYZ')}+,{x},{weight}->{x},{weight},{o}"


def pool(call: OpCall) -> str:
    """Pooling over the last two dims."""
    lead = "nc"[-(len(_first(call)) - 2) :]
    return f"{lead}HW->" + ",".join([f"{lead}XY"] * len(call.outs))


def linear_pool(call: OpCall) -> str:
    """Average pooling."""
    return pool(call).replace("HW->", "HW+->")


def pool_backward(call: OpCall) -> str:
    """Backward of pooling: linear in the gradient."""
    lead = "nc"[-(len(_first(call)) - 2) :]
    rest = "_," * (len(arguments(call)) - 3)
    last = f"{lead}XY" if call.op.startswith("aten.max_pool") else "_"
    return f"{lead}XY+,{lead}HW,{rest}{last}->{lead}HW"


def pointwise(call: OpCall) -> str:
    """Any element-by-element op that has no line of its own."""
    terms = []
    for _, value in arguments(call):
        terms.append("." if isinstance(value, Ref) else ";".join(["."] * len(value)) if isinstance(value, tuple) and any(isinstance(v, Ref) for v in value) else "_")
    return f"{','.join(terms)}->{','.join(['.'] * len(call.outs))}"


def pieces(call: OpCall) -> str:
    """actorflow.unpack and actorflow.pack: pieces lie one behind the other on a dim."""
    names = letters(len(_first(call)))
    dim = int(call.args[1])
    whole = list(names)
    whole[dim] = f"(Q{names[dim]})"
    if call.op == "actorflow.unpack":
        return f"{''.join(whole)}+,_,_,_->{''.join(names)}"
    return f"{''.join(names)}+,_,_->{''.join(whole)}"
