"""A tensor subclass for selected rows: it holds the whole tensor, and the mask of its selected rows.

Rows that are not selected hold finite numbers without meaning.  A rule that reduces over rows, or calls a function that
is not finite everywhere, first replaces these numbers (``filled``).  The gradient of ``filled`` is exactly zero in
these rows, whatever the incoming gradient is, so that no NaN from them reaches a parameter.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.core.torch_internals import make_wrapper
from actorflow_compiler.masked.keys import version
from actorflow_compiler.masked.rules import refusal
from actorflow_compiler.masked.selection_source import SelectionSource
from actorflow_compiler.values.reads import LOOKS_AT_A_VALUE, TEXTS, place_of
from actorflow_compiler.values.where_suggestions import suggested_rewrite

__all__ = [
    "MaskedRows",
    "Selection",
    "only_first",
    "common_selection",
    "selection_of_count",
    "filled",
    "normalized_dim",
    "refuse_pairs",
    "read_refusal",
    "refuse",
    "repeated_rows",
    "broadcast_mask",
    "same_rows",
    "tensors_in",
    "wrap",
]

COUNTS = "_actorflow_counts"  # attribute of a tensor that is a count of selected rows: the selection
dispatchers: list[Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = []  # ``calls.py`` appends the only one


class Selection:
    """Which rows are selected.

    ``mask`` is bool ``[N]``; selections with equal ``key`` have equal masks.  ``shape`` is the shape of the
    mask in the step, before it is flattened.  ``each`` is (selection, n) if each row of that selection is n rows here.
    """

    def __init__(
        self,
        mask: Tensor,
        key: Hashable,
        origin: SelectionSource,
        shape: Sequence[int],
        each: tuple[Selection, int] | None = None,
    ) -> None:
        self.mask, self.key, self.origin, self.each = mask, key, origin, each
        self.shape = tuple(shape)
        self._count: Tensor | None = None

    @property
    def count(self) -> Tensor:
        """The number of selected rows; int64, without dims."""
        if self._count is None:
            self._count = self.mask.sum()
            vars(self._count)[COUNTS] = self
        return self._count


class MaskedRows(Tensor):
    """The rows of ``_whole`` along dim ``_row_dim`` that ``_selection`` selects.

    It never runs a kernel: a function without a rule is refused.  ``_dynamic`` makes the tensor that torch would
    select, whose size depends on values.  ``_index_dim`` is set for indices of selected elements, such as
    ``nonzero`` returns: d for the indices along dim d, -1 for the table of all indices, ``OWN_ROW`` of ``selecting.py``
    for numbers of rows.  Both are None once the tensor has been written.
    """

    _whole: Tensor
    _row_dim: int
    _selection: Selection
    _make_dynamic: Callable[[], Tensor | None] | None
    _wrapped_index_dim: int | None
    _wrapped_version: int  # the version of ``_whole`` when it was wrapped

    @staticmethod
    def __new__(cls, whole: Tensor, row_dim: int, selection: Selection) -> MaskedRows:
        """Wrap ``whole`` without a copy."""
        shape, dtype, device = whole.shape, whole.dtype, whole.device
        made: MaskedRows = make_wrapper(cls, shape, dtype=dtype, device=device, requires_grad=whole.requires_grad)
        assert shape[row_dim] == selection.mask.shape[0], (shape, row_dim, selection.mask.shape)
        made._whole, made._row_dim, made._selection = whole, row_dim, selection
        made._make_dynamic = made._wrapped_index_dim = None
        made._wrapped_version = version(whole)
        return made

    @property
    def _index_dim(self) -> int | None:
        return self._wrapped_index_dim if version(self._whole) == self._wrapped_version else None

    def _dynamic(self) -> Tensor | None:
        written = self._make_dynamic is None or version(self._whole) != self._wrapped_version
        return None if written or self._make_dynamic is None else self._make_dynamic()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatchers[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a disabled stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (first, *_) = tensors_in((args, kwargs))
        refuse(first, f"{func} cannot see", "a library calls it on selected rows", "0")

    def __len__(self) -> int:
        refuse(
            self, "len() asks for the number of", "it has to be a number at once",
            instead=f"{self._selection.origin.named}.sum(), or x.shape[0], which is a tensor and divides as well"
            + suggested_rewrite(traceback.extract_stack(sys._getframe(1))),
        )  # fmt: skip

    def __iter__(self) -> Any:
        if self._row_dim == 0:
            refuse(self, "a loop goes over", "its length depends on values", "0")
        return iter(self.unbind(0))


def selection_of_count(size: Any) -> Selection | None:
    """The selection whose count of rows ``size`` is; None for any other size."""
    return getattr(size, COUNTS, None) if isinstance(size, Tensor) else None


def refuse(of: MaskedRows, what: str, why: str, fill: str = "0", instead: str = "") -> NoReturn:
    """Raise CaptureError, at the user's line, for an operation that selected rows do not support.

    In the message, ``what`` is followed by "the rows that … selects".  It suggests ``instead``, or else the line
    rewritten over the whole tensor, with ``fill`` in rows that are not selected.
    """
    origin = of._selection.origin
    place = place_of(traceback.extract_stack(sys._getframe(1)))
    text = origin.refusal(what, why, instead or origin.rewritten(fill), place)
    raise refusal(text)


def read_refusal(name: str) -> Exception:
    """The error for a function that reads values."""
    return refusal(TEXTS.get(name, LOOKS_AT_A_VALUE))


def tensors_in(tree: Any) -> list[MaskedRows]:
    """The selected rows among arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, MaskedRows)]


def wrap(whole: Tensor, row_dim: int, selection: Selection) -> MaskedRows:
    """The selected rows of ``whole``, which was computed row by row."""
    return MaskedRows(whole, row_dim, selection)


def broadcast_mask(selection: Selection, whole: Tensor, at: int) -> Tensor:
    """The mask in a shape that broadcasts against ``whole``."""
    return selection.mask.view([-1 if d == at else 1 for d in range(whole.dim())])


def filled(v: MaskedRows, value: float | bool) -> Tensor:
    """The whole tensor with ``value`` in rows that are not selected."""
    if v._whole.dtype == torch.bool:
        rows = broadcast_mask(v._selection, v._whole, v._row_dim)
        return v._whole | ~rows if value else v._whole & rows
    whole = v._whole
    return torch.where(
        broadcast_mask(v._selection, whole, v._row_dim), whole, value if whole.is_floating_point() else int(value)
    )


def same_rows(a: Selection, b: Selection) -> bool:
    """Whether two selections are known to select the same rows."""
    return a is b or a.key == b.key


def common_selection(of: Sequence[MaskedRows]) -> Selection:
    """The selection that all these have.  Raises CaptureError where they are not known to select the same rows."""
    first = of[0]
    for other in of[1:]:
        if not same_rows(first._selection, other._selection):
            mine, theirs = first._selection.origin.mask, other._selection.origin.mask
            refuse(
                other, "selections are paired, one of", f"they are selected by {theirs} and others by {mine}, which "
                "were not found to be the same",
                instead="one mask for both, in a variable: keep = …; a[keep], b[keep]",
            )  # fmt: skip
    return first._selection


def repeated_rows(selection: Selection, times: int) -> Selection:
    """The selection in which each row of ``selection`` becomes ``times`` rows."""
    if times == 1:
        return selection
    mask = selection.mask[:, None].expand(-1, times).reshape(-1)
    return Selection(
        mask, ("each", selection.key, times), selection.origin, (*selection.shape, times), (selection, times)
    )


def only_first(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[MaskedRows, int]:
    """The first argument and its dim of rows.  Raises CaptureError if another argument has selected rows."""
    rows = tensors_in((args, kwargs))
    if not args or args[0] is not rows[0] or len(rows) > 1:
        refuse(rows[0], f"{name} takes, beside others,", "only its first argument may be selected rows")
    return rows[0], rows[0]._row_dim


def refuse_pairs(v: MaskedRows, what: str) -> NoReturn:
    """Raise CaptureError for a function that combines each row with every other row."""
    mask = v._selection.origin.named
    refuse(
        v, what, "each meets each, or a row of a whole tensor that is not one of them",
        instead=f"the pairs of all rows, of which a mask selects: pairs[{mask}[:, None] & {mask}[None, :]]",
    )  # fmt: skip


def normalized_dim(dim: int, of: int) -> int:
    """A dim of a tensor with ``of`` dims, as a number from 0 on.  Raises IndexError if it is out of range."""
    if not -of <= dim < max(of, 1):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-of}, {of - 1}], but got {dim})")
    return dim % max(of, 1)
