"""Dispatch calls of torch's functions that select by values, or that have selected rows among their arguments.

``SelectionMode`` is the mode that does this while a step is captured.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from actorflow_compiler.core.torch_internals import without_functions_of_autograd
from actorflow_compiler.masked import gathers, losses, pointwise, products, reduce, rows, shapes, tensor
from actorflow_compiler.masked.rules import RULES, op_name, refusal_makers
from actorflow_compiler.masked.selecting import (
    SELECTING_FUNCTIONS,
    get_item,
    is_selecting,
    row_numbers,
    set_item,
    where_of_mask,
)
from actorflow_compiler.masked.tensor import MaskedRows, read_refusal, refuse, selection_of_count, tensors_in

__all__ = ["SelectionMode", "check_results", "selection_mode"]

_ = gathers, losses, products, reduce, rows, shapes  # imported for their rules
PROPERTIES = (
    "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_nested", "is_sparse", "is_quantized",
    "is_meta", "is_mkldnn",
)  # fmt: skip
OF_THE_WHOLE = (
    *(getattr(Tensor, name).__get__ for name in PROPERTIES), Tensor.dim, Tensor.ndimension,
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex,
    Tensor.get_device, Tensor.element_size, Tensor.is_signed,
)  # fmt: skip


READS = ("item", "tolist", "numpy", "__repr__", "__str__", "__format__", "__bool__", "__float__", "__int__",
         "__index__", "__array__", "__reduce_ex__")  # fmt: skip
NOT_BY_ROWS = (
    "grad", "register_hook", "retain_grad", "backward", "unique", "unique_consecutive", "bincount", "histc",
    "histogram", "cov", "corrcoef", "trace", "diag", "diagonal", "triu", "tril", "outer", "inner", "addmm",
    "tensordot", "pdist", "combinations", "repeat_interleave", "tile", "rot90", "renorm", "instance_norm", "trapezoid",
    "gradient",
)  # fmt: skip
AUGMENTED = {f"{name}_": name for name in ("add", "sub", "mul", "div", "floor_divide", "remainder", "pow")} | {
    f"__i{name}__": f"__{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
MAKES = (torch.zeros, torch.ones, torch.full)


def _sizes(v: MaskedRows) -> tuple[Any, ...]:
    """The shape, with the count of selected rows as a tensor."""
    return tuple(v._selection.count if d == v._row_dim else n for d, n in enumerate(v._whole.shape))


def _numel(v: MaskedRows) -> Any:
    each = v._whole.numel() // max(1, v._whole.shape[v._row_dim])
    return v._selection.count if each == 1 else v._selection.count * each


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that has selected rows among its arguments."""
    found = RULES.get(func)
    if found is not None:
        return found(func, tuple(args), kwargs)
    if func in OF_THE_WHOLE:
        return func(args[0]._whole)
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        return (get_item if func is Tensor.__getitem__ else set_item)(*args)
    if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
        return _sizes(args[0])
    if func is Tensor.size:
        d = args[1] if len(args) > 1 else kwargs.get("dim")
        return _sizes(args[0]) if d is None else _sizes(args[0])[d]
    if func in (Tensor.numel, Tensor.nelement, torch.numel):
        return _numel(args[0])
    if func == Tensor.data.__get__:  # type: ignore[attr-defined]
        return args[0].detach()
    if func in SELECTING_FUNCTIONS:
        return _select_again(func, args, kwargs)
    (first, *others) = tensors_in((args, kwargs))
    name = op_name(func)
    if name in READS:
        raise read_refusal(name)
    origin = first._selection.origin
    by_rows = not (others or origin.indices or name in NOT_BY_ROWS or name.startswith("_"))
    after = f"{name}({origin.source})[{origin.mask}], which selects afterwards; or " * by_rows
    return refuse(
        first, f"{name} is called with", f"what {name} does to rows that do not count is not known",
        instead=f"{after}{origin.rewritten('0')}",
    )  # fmt: skip


def _select_again(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    rows = tensors_in((args, kwargs))
    if op_name(func) == "masked_select" and len(args) == 2 and not kwargs and isinstance(args[0], MaskedRows):
        return get_item(args[0], args[1])
    return refuse(rows[0], f"{op_name(func)} numbers", "which is where among them depends on values",
           instead="the mask of both: (mask & (x > 0)).nonzero()")  # fmt: skip


tensor.dispatchers.append(call)


class SelectionMode(TorchFunctionMode):
    """The mode in which functions that select by values return ``MaskedRows``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, MaskedRows) for t in types):
            return call(func, args, kwargs)
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            if not is_selecting(func, args, kwargs):
                return func(*args, **kwargs)
            return (get_item if func is Tensor.__getitem__ else set_item)(*args)
        if func in MAKES:
            sizes = args[0] if args and isinstance(args[0], list | tuple) else kwargs.get("size", args)
            rest = args[1:] if args and sizes is args[0] else ()
            made = pointwise.of_count(
                lambda shape: func(shape, *rest, **{k: v for k, v in kwargs.items() if k != "size"}), sizes
            )
            return func(*args, **kwargs) if made is None else made
        if func is torch.arange and len(args) == 1 and (selection := selection_of_count(args[0])) is not None:
            own, dtype = row_numbers(selection), kwargs.get("dtype") or torch.long
            return own if dtype == torch.long else own.to(dtype)
        if args and selection_of_count(args[0]) is not None and (out_of_place := AUGMENTED.get(op_name(func))):
            return getattr(Tensor, out_of_place)(*args, **kwargs)  # ``n += 1`` must not write the selection's count
        if is_selecting(func, args, kwargs):
            return (where_of_mask if func in (torch.where, Tensor.where) else SELECTING_FUNCTIONS[func])(
                *args, **kwargs
            )
        return func(*args, **kwargs)


@contextlib.contextmanager
def selection_mode(refusal: Callable[[str], Exception]) -> Iterator[Callable[[], SelectionMode]]:
    """Use while a step is captured; yields the mode's class, for use in backward passes, which run outside the mode.

    ``refusal`` makes the error for an unsupported use of selected rows, given its text.
    """

    def check(given: Sequence[Any]) -> None:
        for v in tensors_in(given):
            refuse(v, "a torch.autograd.Function is called with", "what it does to rows that do not count is not known")

    refusal_makers.append(refusal)
    plain = builtins.len
    builtins.len = lambda of: _sizes(of)[0] if type(of) is MaskedRows else plain(of)
    try:
        with without_functions_of_autograd(check), SelectionMode():
            yield SelectionMode
    finally:
        builtins.len = plain
        refusal_makers.pop()


def check_results(results: Any) -> None:
    """Raise CaptureError where a step returns selected rows."""
    for v in pytree.tree_leaves(results):
        if isinstance(v, MaskedRows):
            origin = v._selection.origin
            refuse(
                v, "the step returns, or keeps,", "a result has a fixed size",
                instead=f"return {origin.source} and {origin.mask}, and select outside of the job",
            )  # fmt: skip
