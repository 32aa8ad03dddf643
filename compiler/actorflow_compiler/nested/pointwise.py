"""Element-wise functions of nested tensors, and layers over their last dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.masked.pointwise import DROPS, FINITE, SAFE
from actorflow_compiler.masked.rules import bound, op_name
from actorflow_compiler.nested.tensor import NestedRows, nested_in, refuse, rule

__all__ = ["pointwise"]

IN_PLACE = (
    "add_", "sub_", "mul_", "div_", "neg_", "relu_", "sigmoid_", "tanh_", "exp_", "clamp_", "pow_", "sqrt_", "abs_",
    "masked_fill_", "zero_", "fill_", "sin_", "cos_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__",
    "copy_",
)  # fmt: skip
BESIDES = ("__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "to", "type", "dropout")


@rule(*{*FINITE, *SAFE, *IN_PLACE, *BESIDES} - {"requires_grad_", *DROPS[1:]})
def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An element-wise function, whose operands broadcast."""
    name = op_name(func)
    first, *others = nested_in((args, kwargs))
    for other in others:
        _check_same_lengths(first, other, name)
    plain_args, plain_kwargs = pytree.tree_map_only(
        Tensor, lambda t: t._rows if isinstance(t, NestedRows) else _broadcast(first, t, name), (list(args), kwargs)
    )
    given = func(*plain_args, **plain_kwargs)
    if args and isinstance(args[0], NestedRows) and given is args[0]._rows:
        return args[0]  # it was changed in place
    return pytree.tree_map_only(Tensor, first.like, given)


def _check_same_lengths(one: NestedRows, other: NestedRows, name: str) -> None:
    alike = (
        one._jagged == other._jagged and one._ragged_dim == other._ragged_dim and one._lengths.of == other._lengths.of
    )
    if not alike or one._rows.dim() != other._rows.dim():
        refuse(other, f"{name} with another nested tensor", "only sequences of the same lengths are put together")
    if one._jagged and one._lengths is not other._lengths:
        refuse(
            other, f"{name} with another jagged tensor", "PyTorch takes their lengths for different ones",
            "expected: both over the same offsets, torch.nested.nested_tensor_from_jagged(values, nt.offsets())",
        )  # fmt: skip


def _broadcast(x: NestedRows, tensor: Tensor, name: str) -> Tensor:
    """A plain operand, reshaped to broadcast against packed rows."""
    dims, behind = x._rows.dim(), x._rows.dim() - x._ragged_dim
    if tensor.dim() > dims + 1 or (tensor.dim() >= behind and tensor.shape[-behind] != 1):
        refuse(x, f"{name} with a tensor of shape {list(tensor.shape)}", "it has a size of its own in the ragged dim")
    if tensor.dim() <= dims:
        return tensor
    if tensor.shape[0] == 1:
        return tensor[0]
    if tensor.shape[0] != len(x):
        refuse(x, f"{name} with a tensor of shape {list(tensor.shape)}", f"the batch has {len(x)} sequences")
    return repeated_rows(x, tensor.squeeze(x._ragged_dim + 1), x._ragged_dim)


def repeated_rows(x: NestedRows, each: Tensor, at: int) -> Tensor:
    """Repeat item i of ``each`` for all rows of sequence i, along dim ``at``."""
    parts = [each[i].unsqueeze(at).expand(*each.shape[1 : at + 1], length, *each.shape[at + 1 :])
             for i, length in enumerate(x._lengths.of)]  # fmt: skip
    return torch.cat(parts, at)


@rule("linear", "layer_norm", "rms_norm", "embedding")
def last_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer over the last dims, with plain weights."""
    name = op_name(func)
    given = bound(("input", "normalized_shape" if "norm" in name else "weight"), args[:2], {})
    x, about = given.get("input", kwargs.get("input")), given.get("normalized_shape", kwargs.get("normalized_shape"))
    if not isinstance(x, NestedRows) or len(nested_in((args, kwargs))) > 1:
        refuse(nested_in((args, kwargs))[0], f"{name}, as a weight,")
    over = 0 if name == "embedding" else len(about) if about is not None else 1
    if x._ragged_dim >= x._rows.dim() - over:
        refuse(x, f"{name} over the ragged dim")
    args, kwargs = pytree.tree_map_only(NestedRows, lambda n: n._rows, (args, kwargs))
    return x.like(func(*args, **kwargs))


@rule("matmul", "__matmul__", "bmm")
def product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply each row by a matrix, or by the matrix of its sequence."""
    given = bound(("input", "other", "mat2"), args, kwargs)
    x, other = given["input"], given["other"] if "other" in given else given["mat2"]
    if not isinstance(x, NestedRows) or isinstance(other, NestedRows):
        refuse(nested_in((args, kwargs))[0], op_name(func), instead="expected: nt @ weight, with plain weights, or "
               "F.scaled_dot_product_attention")  # fmt: skip
    if x._ragged_dim == x._rows.dim() - 1:
        refuse(x, f"{op_name(func)} over the ragged dim")
    if other.dim() == 2:
        return x.like(x._rows @ other)
    if other.dim() != 3 or len(other) != len(x) or x._ragged_dim or x._rows.dim() != 2:
        refuse(x, f"{op_name(func)} with a tensor of shape {list(other.shape)}")
    return x.like(torch.cat([rows @ other[i] for i, rows in enumerate(x.each)]))


@rule("requires_grad_")
def requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set whether autograd computes a gradient."""
    args[0]._rows.requires_grad_(*args[1:], **kwargs)
    return args[0]
