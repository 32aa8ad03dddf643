"""Make selections by values: ``x[mask]``, ``x[mask] = y``, ``nonzero`` and ``torch.where(mask)``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.masked.keys import MaskKey, known_indices, version
from actorflow_compiler.masked.selection_source import SelectionSource, selection_here
from actorflow_compiler.masked.tensor import (
    MaskedRows,
    Selection,
    common_selection,
    filled,
    refuse,
    repeated_rows,
    same_rows,
    tensors_in,
    wrap,
)

__all__ = [
    "BROADCAST", "SELECTING_FUNCTIONS", "get_item", "index_column", "is_selecting", "masked_select", "row_numbers",
    "set_item", "where_of_mask", "wrap_zeroed",
]  # fmt: skip

BROADCAST: Any = torch.broadcast_tensors  # has no types
Index = tuple[Any, ...]
FULL = slice(None)
OWN_ROW = -2  # ``_index_dim`` of ``torch.arange(len(rows))``, by which each row gets its own element


def is_mask(x: Any) -> bool:
    """Whether an index is a mask."""
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) and x.dim() > 0


def select(x: Tensor, mask: Tensor, at: int = 0, key: Any = None, origin: SelectionSource | None = None) -> MaskedRows:
    """``x[:, …, mask]`` with ``at`` full slices before the mask.

    ``key`` and ``origin`` are those of the selection; by default they are made from the mask and the user's line.
    """
    count = mask.dim()
    if x.shape[at : at + count] != mask.shape:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {at} does not match the shape of the indexed tensor "
            f"{list(x.shape)}"
        )
    origin = origin or selection_here(x.dim() - at - count)
    if count > 1 and mask.shape[-1] > 1 and mask.stride(-1) == 0:  # the mask is expanded along its last dim
        rows = select(x, mask.select(-1, 0), at, origin=origin)
        selection = repeated_rows(rows._selection, mask.shape[-1])
        made = wrap(rows._whole.flatten(at, at + 1), at, selection)
        made._make_dynamic = _dynamic_selection(x, at, mask)
        return made
    flat = mask.reshape(-1).to(torch.bool, copy=True)
    selection = Selection(flat, MaskKey(mask) if key is None else key, origin, mask.shape)
    made = wrap_zeroed(x.flatten(at, at + count - 1), at, selection)
    made._make_dynamic = _dynamic_selection(x, at, mask)
    return made


def _dynamic_selection(x: Tensor, at: int, mask: Tensor) -> Callable[[], Tensor | None]:
    """A function that makes torch's result, of dynamic size; it returns None once ``x`` or the mask was written."""
    before = version(x), version(mask)
    index: Any = (*[FULL] * at, mask)
    return lambda: x[index] if (version(x), version(mask)) == before else None


def wrap_zeroed(whole: Tensor, at: int, selection: Selection) -> MaskedRows:
    """Selected rows of a tensor, with zeros in rows that are not selected."""
    return wrap(filled(wrap(whole, at, selection), 0), at, selection)


def masked_select(x: Tensor, mask: Tensor) -> MaskedRows:
    """``torch.masked_select``."""
    if isinstance(x, MaskedRows) or isinstance(mask, MaskedRows):
        again: MaskedRows = get_item(x, mask)
        return again
    key = MaskKey(mask)
    whole, spread = BROADCAST(x, mask)
    return select(whole, spread, key=key if spread.shape == mask.shape else (key, spread.shape))


def index_table(x: Tensor) -> MaskedRows:
    """``x.nonzero()``: a table with a row of indices for each selected element."""
    mask = x if x.dtype == torch.bool else x != 0
    flat = mask.reshape(-1).clone()
    selection = Selection(flat, MaskKey(mask), selection_here(0), mask.shape)
    index = torch.arange(flat.shape[0], device=x.device)
    each = [index // math.prod(mask.shape[d + 1 :]) % mask.shape[d] for d in range(mask.dim())]
    made = wrap_zeroed(torch.stack(each, 1), 0, selection)
    made._wrapped_index_dim = -1
    return made


def index_column(table: MaskedRows, d: int) -> MaskedRows:
    """The indices along dim ``d``: a column of the table that ``index_table`` makes."""
    made = wrap(table._whole[:, d], 0, table._selection)
    made._wrapped_index_dim = d % len(table._selection.shape)
    return made


def nonzero(x: Tensor, *, as_tuple: bool = False) -> Any:
    """``torch.nonzero``."""
    known = known_indices(x) if x.dim() else None
    if known is not None:
        return known if as_tuple else torch.stack(known, 1)
    if x.dim() == 0:
        return x.nonzero(as_tuple=as_tuple)  # type: ignore[call-overload]  # torch refuses it
    table = index_table(x)
    return tuple(index_column(table, d) for d in range(x.dim())) if as_tuple else table


def where_of_mask(condition: Tensor) -> Any:
    """``torch.where`` with one argument."""
    return nonzero(condition, as_tuple=True)


def row_numbers(selection: Selection) -> MaskedRows:
    """``torch.arange(len(rows))``: the number of each row among the selected ones."""
    made = wrap_zeroed(selection.mask.cumsum(0) - 1, 0, selection)
    made._wrapped_index_dim = OWN_ROW
    return made


SELECTING_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.masked_select: masked_select, Tensor.masked_select: masked_select,
    torch.nonzero: nonzero, Tensor.nonzero: nonzero, torch.argwhere: nonzero, Tensor.argwhere: nonzero,
}  # fmt: skip


def is_selecting(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function of plain tensors selects by values."""
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(is_mask(i) or _is_list_of_truths(i) for i in index)
    if func in (torch.where, Tensor.where):
        return len(args) + len(kwargs) == 1
    return func in SELECTING_FUNCTIONS and "out" not in kwargs


def _is_list_of_truths(index: Any) -> bool:
    return isinstance(index, list) and bool(index) and all(isinstance(i, bool) for i in index)


def _as_tuple(x: Tensor, index: Any) -> Index:
    """An index as a tuple without Ellipsis; lists of bools and uint8 masks are converted."""
    entries = list(index if isinstance(index, tuple) else (index,))
    for i, entry in enumerate(entries):
        if _is_list_of_truths(entry):
            entries[i] = torch.tensor([j for j, kept in enumerate(entry) if kept], dtype=torch.long, device=x.device)
        elif isinstance(entry, Tensor) and entry.dtype == torch.uint8 and entry.dim():
            entries[i] = entry.bool()
    taken = sum(e.dim() if is_mask(e) and not _is_rows(e) else e is not None and e is not Ellipsis for e in entries)
    for i, entry in enumerate(entries):
        if entry is Ellipsis:
            return (*entries[:i], *[FULL] * (x.dim() - taken), *entries[i + 1 :])
    return tuple(entries)


def _is_rows(x: Any) -> bool:
    return isinstance(x, MaskedRows)


def _without_known(index: Index) -> Index:
    """An index with masks whose values are known replaced by indices."""
    out: list[Any] = []
    for i in index:
        known = known_indices(i) if is_mask(i) and not _is_rows(i) else None
        out += [i] if known is None else known
    return tuple(out)


def get_item(x: Tensor, index: Any) -> Any:
    """``x[index]`` if ``x`` or the index has selected rows, or a mask is in the index."""
    if isinstance(x, MaskedRows):
        return _of_selected(x, index)
    found = _without_known(_as_tuple(x, index))
    if tensors_in(found):
        return _by_rows(x, found)
    masks = [i for i, entry in enumerate(found) if is_mask(entry)]
    if len(masks) != 1:
        return x[found]
    (i,) = masks
    before, mask, after = found[:i], found[i], found[i + 1 :]
    plain = all(e is None or isinstance(e, slice | int) for e in (*before, *after))
    first = next((j for j, e in enumerate(before) if isinstance(e, int)), i)
    apart = any(not isinstance(e, int) for e in before[first:]) or (
        any(e is None or isinstance(e, slice) for e in before) and any(isinstance(e, int) for e in after)
    )
    if not plain or apart:
        return x[found]  # torch raises, as its size depends on values
    at = sum(not isinstance(e, int) for e in before)
    made = select(x[before] if before else x, mask, at)
    return _of_selected(made, (*[FULL] * (at + 1), *after)) if after else made


def _by_rows(x: Tensor, index: Index) -> Any:
    """Index a plain tensor by selected rows of indices: each of these takes one row of the tensor."""
    rows = tensors_in(index)
    lead = next(i for i, e in enumerate(index) if _is_rows(e))
    inside = index[lead : lead + len(rows)]
    if is_mask(index[lead]) if lead < len(index) else False:
        refuse(rows[0], "a mask that is itself selected indexes a whole tensor with", "they are fewer than its rows")
    masks = [e for e in index[:lead] if is_mask(e)]
    if lead == 1 and len(index) == 2 and masks and masks[0].dim() == 1:  # x[mask, y[mask]]
        made = select(x, masks[0])
        common_selection([made, *rows])
        at = torch.arange(made._whole.shape[0], device=x.device)
        return wrap_zeroed(made._whole[at, filled(rows[0], 0)], 0, made._selection)
    after = index[lead + len(rows) :]
    basic = all(e is None or isinstance(e, slice | int) for e in after)
    if not lead and basic and any(e != FULL for e in after):
        return _of_selected(_by_rows(x, inside), (FULL, *after))
    plain = all(isinstance(e, slice) and e == FULL for e in (*index[:lead], *after))
    if not plain or not all(_is_rows(e) and e.dim() == 1 for e in inside):
        refuse(rows[0], "an index has, beside others,", "only x[:, rows], x[rows] and x[rows, columns] are known")
    selection = common_selection(rows)
    shape, which = selection.shape, [r._index_dim for r in rows]
    if which == [*range(len(shape))] and x.shape[lead : lead + len(shape)] == shape:
        return wrap_zeroed(x.flatten(lead, lead + len(shape) - 1), lead, selection)
    d = which[0]
    if len(rows) == 1 and d is not None and d >= 0 and x.shape[lead] == shape[d]:
        for other in range(len(shape)):
            x = x if other == d else x.unsqueeze(lead + other)
        spread = x.expand(*x.shape[:lead], *shape, *x.shape[lead + len(shape) :])
        return wrap_zeroed(spread.flatten(lead, lead + len(shape) - 1), lead, selection)
    found = x[(*index[:lead], *(filled(r, 0) for r in rows))]
    return wrap_zeroed(found, lead, selection)


def _of_selected(v: MaskedRows, index: Any) -> Any:
    """Index selected rows."""
    entries = _without_known(_as_tuple(v, index))
    rows = tensors_in(entries)
    if rows:
        if len(entries) == 1 and is_mask(rows[0]):
            return _select_by_selected_mask(v, rows[0])
        first, *others = entries
        if _is_rows(first) and first._index_dim == OWN_ROW and v._row_dim == 0 and others:
            return _own_elements(v, first, others)
        refuse(v, "an index has", "rows of a selection are taken by a mask of the same selection, or gather(1, …)")
    if v._index_dim == -1 and len(entries) == 2 and entries[0] == FULL and isinstance(entries[1], int):
        return index_column(v, entries[1])
    d = to = 0
    at = -1
    for entry in entries:
        if entry is None:
            to += 1
            continue
        columns = isinstance(entry, list) and all(type(e) is int for e in entry)
        if not columns and (isinstance(entry, bool) or not isinstance(entry, slice | int | Tensor)):
            refuse(v, "an index picks among the columns of", "only a slice, a number or a row of numbers does so")
        if d == v._row_dim:
            if not isinstance(entry, slice) or entry != FULL:
                refuse(
                    v, f"[{_index_text(entry)}] takes some of", "which ones depends on values",
                    instead="a mask that has those alone, x[mask & …], or their numbers in the whole tensor",
                )  # fmt: skip
            at = to
        elif isinstance(entry, Tensor) and (entry.dim() != 1 or is_mask(entry)):
            refuse(v, "an index picks among the columns of", "only a slice, a number or a row of numbers does so")
        d, to = d + 1, to + (not isinstance(entry, int))
    if sum(isinstance(e, Tensor | list) for e in entries) > 1:
        refuse(v, "an index picks among the columns of", "only a slice, a number or a row of numbers does so")
    if any(isinstance(e, Tensor | list) for e in entries) and any(isinstance(e, int) for e in entries):
        refuse(v, "an index picks among the columns of", "only a slice, a number or a row of numbers does so")
    at = to + v._row_dim - d if at < 0 else at
    return wrap(v._whole[entries], at, v._selection)


def _own_elements(v: MaskedRows, own: MaskedRows, others: Sequence[Any]) -> MaskedRows:
    """``rows[torch.arange(len(rows)), y]``: an element of each row, by indices of that row."""
    if any(not (isinstance(o, int) or (_is_rows(o) and o.dim() == 1)) for o in others):
        refuse(v, "an index has", "beside their own numbers only one number for each of them is known")
    selection = common_selection([v, own, *tensors_in(others)])
    at = torch.arange(v._whole.shape[0], device=v._whole.device)
    return wrap_zeroed(v._whole[(at, *(filled(o, 0) if _is_rows(o) else o for o in others))], 0, selection)


def _index_text(entry: Any) -> str:
    if isinstance(entry, slice):
        return ":".join(
            "" if e is None else "n" if isinstance(e, Tensor) else str(e) for e in (entry.start, entry.stop)
        )
    return "…" if isinstance(entry, Tensor) else str(entry)


def _select_by_selected_mask(v: MaskedRows, mask: MaskedRows) -> MaskedRows:
    """Selected rows, selected again by a mask of the same selection."""
    selection = common_selection([v, mask])
    dims = mask._whole.dim()
    if v._row_dim != 0 or mask._row_dim != 0 or v._whole.shape[:dims] != mask._whole.shape:
        refuse(v, "a mask selects among", f"it is of shape {list(mask._whole.shape)}, and they {list(v._whole.shape)}")
    both = filled(mask, False)
    key = ("and", selection.key, MaskKey(mask._whole))
    made = Selection(both.reshape(-1).clone(), key, selection_here(v._whole.dim() - dims), both.shape)
    return wrap_zeroed(v._whole.flatten(0, dims - 1), 0, made)


def set_item(x: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``, in place."""
    entries = _as_tuple(x, index)
    if isinstance(x, MaskedRows):
        if isinstance(value, Tensor) and not _fits_columns(x, entries, value):
            refuse(x, "an assignment changes some of", "only numbers can be assigned there", "0")
        if len(entries) == 1 and _is_rows(entries[0]):
            common_selection([x, entries[0]])
            x._whole[filled(entries[0], False)] = value
            return
        if tensors_in(entries) or len(entries) <= x._row_dim or entries[x._row_dim] != FULL:
            refuse(x, "an assignment changes some of", "which ones depends on values", "0")
        x._whole[entries] = value._whole if isinstance(value, MaskedRows) else value
        return
    rows = tensors_in(entries)
    mask: Tensor | None = None
    if rows:
        selection = common_selection(rows)
        if [r._index_dim for r in rows] == [*range(len(selection.shape))] and len(rows) == len(entries):
            mask, key = selection.mask.view(selection.shape), selection.key
    elif len(entries) == 1 and is_mask(entries[0]):
        mask, key = entries[0], MaskKey(entries[0])
    if (
        not rows
        and isinstance(value, Tensor)
        and not _is_rows(value)
        and _needs_gradient(value)
        and _assign_to_all_rows(x, entries, value)
    ):
        return
    if mask is None or not isinstance(value, MaskedRows):
        if (rows and mask is None) or isinstance(value, MaskedRows):
            refuse(
                (rows or [value])[0], "an assignment has", "it has to be to a mask, of rows of the same mask",
                instead="x[mask] = y[mask], or x = torch.where(mask, y, x)",
            )  # fmt: skip
        x[mask if rows else index] = value
        return
    if not (
        same_rows(value._selection, Selection(mask, key, value._selection.origin, mask.shape)) and value._row_dim == 0
    ):
        refuse(
            value, "an assignment has", f"they are not sure to be those of {value._selection.origin.mask}",
            instead="one mask for both sides, in a variable: keep = …; x[keep] = y[keep]",
        )  # fmt: skip
    rest = x.dim() - mask.dim()
    if value._whole.dim() - 1 != rest:
        refuse(value, "an assignment has", f"they have {value._whole.dim() - 1} dims each, where {rest} were expected")
    new = value._whole.view(*mask.shape, *value._whole.shape[1:]).to(x.dtype)
    x.copy_(torch.where(mask.view(*mask.shape, *[1] * rest), new, x))


def _fits_columns(x: MaskedRows, entries: Index, value: Tensor) -> bool:
    """Whether ``x[:, columns] = value`` assigns a row of ``value`` to each row, or the same values to all rows."""
    plain = all(entry is None or (isinstance(entry, slice | int) and not isinstance(entry, bool)) for entry in entries)
    if not plain or len(entries) <= x._row_dim or x._whole[entries].dim() == 0:
        return False
    changed: MaskedRows = _of_selected(x, entries)  # refuses an index that takes some of the rows
    before = changed.dim() - value.dim()  # the number of dims over which ``value`` broadcasts
    if isinstance(value, MaskedRows):
        common_selection([x, value])
        return before >= 0 and before + value._row_dim == changed._row_dim
    return before > changed._row_dim or (before >= 0 and value.shape[changed._row_dim - before] == 1)


def _needs_gradient(value: Tensor) -> bool:
    """Whether the assigned value needs a gradient; torch's own backward pass would select by the mask."""
    return torch.is_grad_enabled() and value.requires_grad


def _assign_to_all_rows(x: Tensor, entries: Index, value: Tensor) -> bool:
    """``x[:, mask, 1:] = value`` of a value that is the same for all rows; False where each row may have its own."""
    masks = [i for i, entry in enumerate(entries) if is_mask(entry)]
    if len(masks) != 1 or value.dtype != x.dtype:
        return False
    (at,) = masks
    mask, after = entries[at].bool(), entries[at + 1 :]
    if any(entry != FULL for entry in entries[:at]) or any(type(entry) not in (slice, int) for entry in after):
        return False
    part = x[(*[FULL] * (at + mask.dim()), *after)]  # a view of x
    rest = part.dim() - at - mask.dim()
    if value.dim() > rest:
        if value.shape[-1 - rest] != 1 or value.dim() > at + 1 + rest:
            return False
        lead, own = value.shape[: value.dim() - 1 - rest], value.shape[value.dim() - rest :]
        value = value.reshape(*lead, *[1] * mask.dim(), *own)
    part.copy_(torch.where(mask.view(*mask.shape, *[1] * rest), value, part))
    return True
