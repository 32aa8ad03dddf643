"""Views whose part had to be moved or copied: reads show the base as it is now, and writes reach the base.

Where a part is a true view of its base's part, PyTorch's own views do this, and nothing here is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor
from actorflow.eager.redistribution import part_in
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.torch_internals import make_wrapper

aten = torch.ops.aten


class LinkedView(GlobalTensor):
    """A view that holds a copy of the values that it shows."""

    __slots__ = ("_args", "_func", "_index", "_kwargs", "_moved", "_parent", "_seen")
    _parent: GlobalTensor
    _func: Any
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]
    _index: int | None  # number of the output that it is; None: the only one
    _moved: bool  # whether the part came from other ranks
    _seen: int | None  # the version of the base that it shows


def link_view(
    local: Tensor, spec: GlobalSpec, parent: GlobalTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    index: int | None, moved: bool,
) -> LinkedView:  # fmt: skip
    """The view that ``func`` makes of ``parent``; ``local`` is a copy."""
    made: LinkedView = make_wrapper(LinkedView, spec.shape, strides=spec.strides, dtype=spec.dtype, device=spec.device)
    made._local, made._spec, made._lineage, made._parent = local, spec, parent._lineage, parent
    made._func, made._args, made._kwargs, made._index, made._moved = func, args[1:], kwargs, index, moved
    made._seen = _version(parent)
    return made


def refresh(view: LinkedView) -> None:
    """Copy the values of the base again if it has changed since."""
    parent = view._parent
    if isinstance(parent, LinkedView):
        refresh(parent)
    now = _version(parent)
    if now is not None and now == view._seen:
        return
    with torch.no_grad():
        made = view._func(parent, *view._args, **view._kwargs)
    found = made if view._index is None else made[view._index]
    view._local = part_in(found, view._spec.layout, str(view._func))
    view._seen = now


def write_back(view: LinkedView) -> None:
    """Write the view's present values into its base."""
    parent = view._parent
    if isinstance(parent, LinkedView):
        refresh(parent)
    if not view._moved and str(view._func) in _RESHAPES:  # a copy on this rank only, and so without the others
        if parent._spec.here:
            parent._local.copy_(view._local.reshape(parent._local.shape))
    else:
        put = _PUT.get(str(view._func))
        if put is None:
            raise LayoutError(
                f"{view._func} has given a view of a tensor that lies as {parent._spec.layout}, of which this view had "
                f"to be copied, and a change of it in place cannot be brought to the tensor; change a clone() of it, "
                f"or bring the tensor to broadcast first: x.to_global(sbp=flow.sbp.broadcast)"
            )
        with torch.no_grad():
            new = put(parent, view, view._args, view._index or 0)
        local = part_in(new, parent._spec.layout, str(view._func))
        if parent._spec.here:
            parent._local.copy_(local)
    if isinstance(parent, LinkedView):
        write_back(parent)


def _version(tensor: Tensor) -> int | None:
    """The version counter of in-place changes; None in inference mode, where torch keeps none."""
    return None if tensor.is_inference() else tensor._version


_RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
Put = Callable[[Any, Any, tuple[Any, ...], int], Any]  # base, view, arguments, number of the output → the new base


def _as_base(base: Any, view: Any, args: tuple[Any, ...], index: int) -> Any:
    return aten.reshape.default(view.clone(), base.shape)


def _split(base: Any, view: Any, args: tuple[Any, ...], index: int) -> Any:
    sizes, dim = args[0], (args[1] if len(args) > 1 else 0)
    begin = index * sizes if isinstance(sizes, int) else sum(sizes[:index])
    return aten.slice_scatter.default(base, view, dim, begin, begin + view.shape[dim])


def _unbind(base: Any, view: Any, args: tuple[Any, ...], index: int) -> Any:
    return aten.select_scatter.default(base, view, args[0] if args else 0, index)


def _permute(base: Any, view: Any, args: tuple[Any, ...], index: int) -> Any:
    dims = [d % base.dim() for d in args[0]]
    return aten.permute.default(view, [dims.index(d) for d in range(len(dims))])


_PUT: dict[str, Put] = {
    "aten.select.int": lambda base, view, args, _: aten.select_scatter.default(base, view, *args),
    "aten.slice.Tensor": lambda base, view, args, _: aten.slice_scatter.default(base, view, *args),
    "aten.diagonal.default": lambda base, view, args, _: aten.diagonal_scatter.default(base, view, *args),
    "aten.as_strided.default": lambda base, view, args, _: aten.as_strided_scatter.default(base, view, *args),
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unbind.int": _unbind,
    "aten.transpose.int": lambda base, view, args, _: aten.transpose.int(view, *args),
    "aten.t.default": lambda base, view, args, _: aten.t.default(view),
    "aten.permute.default": _permute,
    "aten.view_as_real.default": lambda base, view, args, _: aten.view_as_complex.default(view),
    "aten.view_as_complex.default": lambda base, view, args, _: aten.view_as_real.default(view),
    "aten._conj.default": lambda base, view, args, _: aten._conj.default(view),
    "aten._neg_view.default": lambda base, view, args, _: aten.neg.default(view),
    **dict.fromkeys(
        (
            "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.unsqueeze.default",
            "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.alias.default",
            "aten.detach.default", "aten.lift_fresh.default",
        ),
        _as_base,
    ),
}  # fmt: skip
