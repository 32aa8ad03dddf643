"""Give the indices of an op's call other sizes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actorflow_compiler.core.op_call import bind, rebind
from actorflow_compiler.core.ops import Arg
from actorflow_compiler.signatures.notation import parse
from actorflow_compiler.signatures.table import term_of
from actorflow_compiler.signatures.term_matching import Group, IndexedTensor, index_call, ranked
from signature_checks import Instance, real
from signature_checks import instance as run_whole


def indices(case: Instance) -> tuple[str, ...]:
    """The indices that may have other sizes: those that may be split."""
    op = index_call(case.call)
    return () if op is None else tuple(c for c in op.splittable if c not in op.parts)


def resized(case: Instance, sizes: dict[str, int]) -> Instance | None:
    """The call with some indices resized; None if the op refuses these sizes."""
    op, text = index_call(case.call), term_of(case.call)
    assert op is not None
    assert text is not None
    new = op.size | sizes

    def length(group: Group, old: int) -> int:
        return math.prod(new[c] for c in group) if group and all(c in new for c in group) else old

    def shape(x: IndexedTensor) -> list[int]:
        return [length(group, n) for group, n in zip(x.dims, x.meta.shape, strict=True)]

    operands = [_repeated(x, shape(t)) for x, t in zip(case.operands, op.ins, strict=True)]
    for x, t in zip(operands, op.ins, strict=True):
        if t.values:
            x.remainder_(max(1, new[t.values]))
    changed: dict[int, Arg] = {}
    for i, argument in enumerate(parse(text).arguments):
        old = bind(case.call)[i]
        if argument.kind == "shape":
            changed[i] = tuple(shape(next(o for o in op.outs if o is not None)))
        elif argument.kind == "sizes" and old is not None:
            dims = ranked(argument.operands[0].dims, len(old) if isinstance(old, tuple) else 1)
            whole = old if isinstance(old, tuple) else (old,)
            here = tuple(length(d, n) if isinstance(d, tuple) else n for d, n in zip(dims, whole, strict=True))
            changed[i] = here if isinstance(old, tuple) else here[0]
    args, kwargs = rebind(case.call, changed)
    try:
        return run_whole(case.call.op, [real(a, operands) for a in args], {k: real(v, operands) for k, v in kwargs})
    except (RuntimeError, IndexError):
        return None


def _repeated(x: Tensor, shape: list[int]) -> Tensor:
    """The same numbers again and again, or only the first of them; repeated ones differ a little."""
    out = x
    for dim, (old, new) in enumerate(zip(x.shape, shape, strict=True)):
        if new != old:
            out = out.index_select(dim, torch.arange(new) % max(1, old))
    if out is not x and out.is_floating_point():
        out = out * torch.linspace(1.0, 0.95, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out.clone()
