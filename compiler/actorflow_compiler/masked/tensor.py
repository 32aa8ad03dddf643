"""A tensor subclass for selected rows: it holds the whole tensor, and the mask of the rows that are selected.

Rows that are not selected hold finite numbers that nobody sees.  Whoever reduces over rows, or calls a function that is
not finite everywhere, puts other numbers in their place first (``filled``).  The gradient of that is exactly zero in
such rows, whatever comes back, so that no NaN of theirs reaches a parameter.
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

COUNTS = "_actorflow_counts"  # what a count has its selection in
dispatchers: list[Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = []  # ``calls.py`` enters the one there is


class Selection:
    """Which rows count: ``mask``, bool ``[N]``; equal ``key``, equal mask.

    ``shape`` is the mask's as the step has it.  ``each`` is another selection, and how many times each of its rows is
    one of this.
    """

    def __init__(
        self,
        mask: Tensor,
        key: Hashable,
        told: SelectionSource,
        shape: Sequence[int],
        each: tuple[Selection, int] | None = None,
    ) -> None:
        self.mask, self.key, self.told, self.each = mask, key, told, each
        self.shape = tuple(shape)
        self._count: Tensor | None = None

    @property
    def count(self) -> Tensor:
        """How many rows count; int64, without dims."""
        if self._count is None:
            self._count = self.mask.sum()
            vars(self._count)[COUNTS] = self
        return self._count


class MaskedRows(Tensor):
    """The rows of ``_whole`` along dim ``_at`` that ``_chosen`` says count.

    What reaches it without a rule is refused; it never runs a kernel.  ``_raw`` makes the tensor whose size depends on
    values, and knows whether it still would.  ``_position`` is d for the indices along dim d of what ``_chosen`` was
    made of; -1 for the table of all of them.  Both hold until it is written.
    """

    _whole: Tensor
    _at: int
    _chosen: Selection
    _plainly: Callable[[], Tensor | None] | None
    _index: int | None
    _begun: int  # the version of ``_whole`` as it was wrapped

    @staticmethod
    def __new__(cls, whole: Tensor, at: int, chosen: Selection) -> MaskedRows:
        """Wrap; nothing is copied."""
        shape, dtype, device = whole.shape, whole.dtype, whole.device
        made: MaskedRows = make_wrapper(cls, shape, dtype=dtype, device=device, requires_grad=whole.requires_grad)
        assert shape[at] == chosen.mask.shape[0], (shape, at, chosen.mask.shape)
        made._whole, made._at, made._chosen = whole, at, chosen
        made._plainly = made._index = None
        made._begun = version(whole)
        return made

    @property
    def _position(self) -> int | None:
        return self._index if version(self._whole) == self._begun else None

    def _raw(self) -> Tensor | None:
        written = self._plainly is None or version(self._whole) != self._begun
        return None if written or self._plainly is None else self._plainly()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatchers[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # of a method that is no more
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (first, *_) = tensors_in((args, kwargs))
        refuse(first, f"{func} cannot see", "a library calls it on selected rows", "0")

    def __len__(self) -> int:
        refuse(
            self, "len() asks for the number of", "it has to be a number at once",
            instead=f"{self._chosen.told.named}.sum(), or x.shape[0], which is a tensor and divides as well"
            + suggested_rewrite(traceback.extract_stack(sys._getframe(1))),
        )  # fmt: skip

    def __iter__(self) -> Any:
        if self._at == 0:
            refuse(self, "a loop goes over", "its length depends on values", "0")
        return iter(self.unbind(0))


def selection_of_count(size: Any) -> Selection | None:
    """The selection whose rows a size says the number of; None for any other size."""
    return getattr(size, COUNTS, None) if isinstance(size, Tensor) else None


def refuse(of: MaskedRows, what: str, why: str, fill: str = "0", instead: str = "") -> NoReturn:
    """Raise CaptureError, at the user's line, for what cannot be done to selected rows.

    ``what`` is followed by "the rows that … selects".  Expected is ``instead``, or the line with ``fill`` where the
    mask does not choose.
    """
    told = of._chosen.told
    place = place_of(traceback.extract_stack(sys._getframe(1)))
    text = told.refusal(what, why, instead or told.rewritten(fill), place)
    raise refusal(text)


def read_refusal(name: str) -> Exception:
    """The error of a function that reads values."""
    return refusal(TEXTS.get(name, LOOKS_AT_A_VALUE))


def tensors_in(tree: Any) -> list[MaskedRows]:
    """The selections among arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, MaskedRows)]


def wrap(whole: Tensor, at: int, chosen: Selection) -> MaskedRows:
    """What was computed row by row of a selection."""
    return MaskedRows(whole, at, chosen)


def broadcast_mask(chosen: Selection, whole: Tensor, at: int) -> Tensor:
    """The mask in a shape that broadcasts against ``whole``."""
    return chosen.mask.view([-1 if d == at else 1 for d in range(whole.dim())])


def filled(v: MaskedRows, value: float | bool) -> Tensor:
    """The whole tensor with ``value`` in rows that do not count."""
    if v._whole.dtype == torch.bool:
        rows = broadcast_mask(v._chosen, v._whole, v._at)
        return v._whole | ~rows if value else v._whole & rows
    whole = v._whole
    return torch.where(
        broadcast_mask(v._chosen, whole, v._at), whole, value if whole.is_floating_point() else int(value)
    )


def same_rows(a: Selection, b: Selection) -> bool:
    """Whether two selections are sure to be of the same rows."""
    return a is b or a.key == b.key


def common_selection(of: Sequence[MaskedRows]) -> Selection:
    """The selection that all are of; refuses others."""
    first = of[0]
    for other in of[1:]:
        if not same_rows(first._chosen, other._chosen):
            mine, theirs = first._chosen.told.mask, other._chosen.told.mask
            refuse(
                other, "selections are paired, one of", f"they are selected by {theirs} and others by {mine}, which "
                "were not found to be the same",
                instead="one mask for both, in a variable: keep = …; a[keep], b[keep]",
            )  # fmt: skip
    return first._chosen


def repeated_rows(chosen: Selection, times: int) -> Selection:
    """Each row as so many rows."""
    if times == 1:
        return chosen
    mask = chosen.mask[:, None].expand(-1, times).reshape(-1)
    return Selection(mask, ("each", chosen.key, times), chosen.told, (*chosen.shape, times), (chosen, times))


def only_first(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[MaskedRows, int]:
    """The first argument, which alone may be selected."""
    rows = tensors_in((args, kwargs))
    if not args or args[0] is not rows[0] or len(rows) > 1:
        refuse(rows[0], f"{name} takes, beside others,", "only its first argument may be selected rows")
    return rows[0], rows[0]._at


def refuse_pairs(v: MaskedRows, what: str) -> NoReturn:
    """Refuse what meets each other row."""
    mask = v._chosen.told.named
    refuse(
        v, what, "each meets each, or a row of a whole tensor that is not one of them",
        instead=f"the pairs of all rows, of which a mask selects: pairs[{mask}[:, None] & {mask}[None, :]]",
    )  # fmt: skip


def normalized_dim(dim: int, of: int) -> int:
    """A dim from 0 on."""
    if not -of <= dim < max(of, 1):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-of}, {of - 1}], but got {dim})")
    return dim % max(of, 1)
