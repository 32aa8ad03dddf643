"""Dispatch calls of torch's functions with nested tensors to the rules that compute them over packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.torch_internals import READS
from actorflow_compiler.masked.rules import op_name
from actorflow_compiler.masked.tensor import read_refusal
from actorflow_compiler.nested import attention, pointwise, reduce, shapes
from actorflow_compiler.nested.shapes import nested_sizes
from actorflow_compiler.nested.tensor import RULES, NestedRows, nested_in, refuse

__all__ = ["call"]

_ = attention, pointwise, reduce, shapes  # imported for their rules


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that has nested tensors among its arguments."""
    name = op_name(func)
    if name in READS:
        raise read_refusal(name)
    rule = PROPERTIES.get(name) if args and isinstance(args[0], NestedRows) else None
    if rule is not None and len(args) == 1:
        return rule(args[0])
    found = RULES.get(func)
    first = nested_in((args, kwargs))[0]
    if found is None:
        refuse(first, name)
    if kwargs.get("out") is not None:
        refuse(first, f"{name} with out=")
    return found(func, tuple(args), kwargs)


def _values(x: NestedRows) -> Tensor:
    if x._jagged:
        return x._rows
    if x._ragged_dim:
        refuse(x, "values()", "those of a strided one whose sequences are not along dim 1 are not packed")
    return x._rows.flatten()


def _no_gradient(x: NestedRows) -> None:
    refuse(x, "grad", "nothing keeps a gradient for it", "expected: gradients of the tensors that it is made of")


def _data(x: NestedRows) -> NestedRows:
    return x.like(x._rows.detach())


def _dims(x: NestedRows) -> int:
    return x._rows.dim() + 1


def _layout(x: NestedRows) -> torch.layout:
    return torch.jagged if x._jagged else torch.strided


def _numel(x: NestedRows) -> int:
    return x._rows.numel()


def _is_nested(x: NestedRows) -> bool:
    return True


def _each(x: NestedRows) -> Sequence[Tensor]:
    return x.each if x._jagged else [*x.each]


def _of_rows(name: str) -> Callable[[NestedRows], Any]:
    def ask(x: NestedRows) -> Any:
        found = getattr(x._rows, name)
        return found() if callable(found) else found

    return ask


PROPERTIES: dict[str, Callable[[NestedRows], Any]] = {
    "shape": nested_sizes, "is_nested": _is_nested, "grad": _no_gradient, "data": _data, "values": _values,
    "ndim": _dims, "dim": _dims, "ndimension": _dims, "layout": _layout, "numel": _numel, "nelement": _numel,
    "unbind": _each,
    **{
        name: _of_rows(name)
        for name in ("dtype", "device", "requires_grad", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_mkldnn",
                     "is_cpu", "is_leaf", "itemsize", "is_xpu", "is_mps", "is_contiguous", "is_floating_point",
                     "is_complex", "get_device", "element_size", "is_signed")
    },
}  # fmt: skip
