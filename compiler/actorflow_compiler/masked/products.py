"""Matrix products with selected rows: rows times a whole matrix, or sums over rows."""

from __future__ import annotations

from typing import Any

import torch

from actorflow_compiler.masked.rules import bound, op_name, rule
from actorflow_compiler.masked.tensor import (
    MaskedRows,
    common_selection,
    filled,
    refuse,
    refuse_pairs,
    tensors_in,
    wrap,
)

__all__: list[str] = []


@rule("matmul", "mm", "bmm", "mv", "dot", "__matmul__", "__rmatmul__")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Matrix products: rows times a whole matrix, or sums over rows."""
    first = ("input", "mat2") if op_name(func) in ("mm", "bmm") else ("input", "other")
    given = bound(
        first, args, {("other" if k in ("vec", "tensor") and first[1] == "other" else k): a for k, a in kwargs.items()}
    )
    a, b = given[first[0]], given[first[1]]
    if op_name(func) == "__rmatmul__":
        a, b = b, a
    rows = tensors_in((a, b))
    selection = common_selection(rows)

    def role(x: Any, second: bool) -> str:
        if not isinstance(x, MaskedRows):
            return ""
        dims = x._whole.dim()
        inner = dims - 2 if second and dims > 1 else dims - 1
        outer = dims - 1 if second else dims - 2
        return "inner" if x._row_dim == inner else "outer" if x._row_dim == outer else "batch"

    roles = role(a, False), role(b, True)
    plain = [x._whole if isinstance(x, MaskedRows) else x for x in (a, b)]
    if roles == ("inner", "inner"):
        return torch.matmul(filled(a, 0), filled(b, 0))
    out_dims = (
        max(plain[0].dim(), plain[1].dim()) - (plain[0].dim() == 1) - (plain[1].dim() == 1) * (plain[0].dim() > 1)
    )
    if "inner" in roles or roles == ("outer", "outer"):
        refuse_pairs(rows[0], "a product of matrices pairs")
    one, other, x = (a, b, plain[1]) if isinstance(a, MaskedRows) else (b, a, plain[0])
    if "batch" in roles:
        back = one._row_dim - one._whole.dim()
        if isinstance(other, MaskedRows):
            if other._row_dim - other._whole.dim() != back:
                refuse(one, "a product of matrices pairs other dims with", "rows can be paired with rows alone")
        elif x.dim() >= -back and x.shape[back] != 1:
            refuse(
                one,
                f"a product pairs a tensor of shape {list(x.shape)} with",
                "it has one for each row, also for others",
            )
        vector = (plain[0].dim() == 1) or (plain[1].dim() == 1)
        out = torch.matmul(*plain)
        return wrap(out, out.dim() + back + vector, selection)
    out = torch.matmul(*plain)
    assert out_dims >= 0
    vector = plain[1].dim() == 1 if roles[0] else plain[0].dim() == 1
    at = out.dim() - 1 if roles[1] or vector else out.dim() - 2
    return wrap(out, at, selection)


@rule("einsum")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``einsum``, over rows or row by row."""
    equation, *rest = args
    operands = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    rows = tensors_in(operands)
    selection = common_selection(rows)
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        refuse(rows[0], "einsum sums over", "only equations with an arrow and without dots are known")
    ins, out = equation.replace(" ", "").split("->")
    terms = ins.split(",")
    letters = {term[o._row_dim] for term, o in zip(terms, operands, strict=True) if isinstance(o, MaskedRows)}
    (letter, *others) = letters
    plain_has = any(letter in t for t, o in zip(terms, operands, strict=True) if not isinstance(o, MaskedRows))
    if others or plain_has or any(t.count(letter) > 1 for t in terms):
        refuse(rows[0], "einsum pairs", "rows can be paired with rows of the same mask alone")
    found = func(equation, *(filled(o, 0) if isinstance(o, MaskedRows) else o for o in operands))
    return wrap(found, out.index(letter), selection) if letter in out else found
