"""Index and assign by numbers that calls may change (``x[i]``, ``x[i] = y``), with ``i`` as data of the graph.

``i`` is a tensor without dims, a symbolic number, or a slice between two such numbers whose distance is constant.  The
numbers that ``narrow``, ``select`` and ``roll`` take are handled in the same way.  torch would read the number, and its
result is a view of ``x``.  Here the result is a copy, so a step that changes it in place afterwards is refused.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.expressions import apart
from actorflow_compiler.core.torch_internals import is_fake, node_of, replaced_functions, replaced_indexing
from actorflow_compiler.numbers.ops import number_tensor
from actorflow_compiler.numbers.symbolic import NumberEnv, SymNumber, expression_of
from actorflow_compiler.numbers.unbacked import is_unbacked
from actorflow_compiler.values.host_programs import HostProgramFinder
from actorflow_compiler.values.reads import place_of

__all__ = ["STANDS_FOR_A_VIEW", "Indexing"]

STANDS_FOR_A_VIEW = "stands_for_a_view"  # attribute of a copy where PyTorch has a view


@dataclass(frozen=True, slots=True)
class _IndexedCopy:
    """A copy that stands for ``whole[i]``, the versions of both as it was made, and the line."""

    copy: Tensor
    version: int
    whole: Tensor
    before: int
    place: str
    env: NumberEnv | None  # of the index, if symbolic numbers are its only data


class Indexing:
    """Replaces indexing with numbers that are data of the graph, and checks the copies that stand for views."""

    def __init__(self) -> None:
        self._copies: list[_IndexedCopy] = []
        self.again = False  # whether to capture the step again, with views for some lines

    @contextlib.contextmanager
    def replacing_indexing(self) -> Iterator[None]:
        """Use while the step runs."""
        with replaced_indexing(self._get, self._set), replaced_functions(BY_NUMBERS, self._called):
            yield

    def check(self) -> None:
        """Raise CaptureError for a copy that was changed, or is used after its original has changed.

        In PyTorch the copy would be a view.  If the index consists of symbolic numbers, no error is raised: the step is
        captured again, with a view at that line and the plan specialized to the value of the number.
        """
        for one in self._copies:
            if one.copy._version != one.version:
                if self._notes(one):
                    continue
                raise CaptureError(
                    f"{one.place}\n  what x[i] gives is changed in place, and so x would be, with i data; "
                    f"expected: x[i] = y, x[i] += y, or x.index_copy_, index_add_ or index_put_"
                )
            copy, whole = node_of(one.copy), node_of(one.whole)
            if one.whole._version == one.before or copy is None or whole is None:
                continue
            if HostProgramFinder(copy[0].graph, copy[1], (), ()).is_outdated(copy[0], whole[0]) and not self._notes(
                one
            ):
                raise CaptureError(
                    f"{one.place}\n  what x[i] gives is used after x has changed, and has changed with it, with i "
                    f"data; expected: x[i].clone(), if what it was before is wanted, else x[i] once more"
                )

    def _notes(self, one: _IndexedCopy) -> bool:
        if one.env is None:
            return False
        one.env.views.add(one.place)
        self.again = True
        return True

    def _called(self, name: str, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor) and is_fake(args[0]):
            made = BY_NUMBERS[name](args[0], args[1:], kwargs)
            if made is not NotImplemented:
                return made
        return plain(*args, **kwargs)

    def _get(self, plain: Callable[..., Any], x: Tensor, index: Any) -> Any:
        at = _numbers(x, index)
        if not at:
            return plain(x, index)
        whole = x
        for dim, rows, _ in at.values():
            x = x.index_select(dim, rows)
        found = plain(x, _index_within(index, at))
        vars(found if found._base is None else found._base)[STANDS_FOR_A_VIEW] = True
        given = [n for item in (index if isinstance(index, tuple) else (index,)) for n in _ends(item) if _is_open(n)]
        numbers = next((n.env for n in given if type(n) is SymNumber), None)
        numbers = numbers if all(type(n) is SymNumber for n in given) else None
        self._copies.append(_IndexedCopy(found, found._version, whole, whole._version, _here(), numbers))
        return found

    def _set(self, plain: Callable[..., Any], x: Tensor, index: Any, value: Any) -> None:
        if isinstance(value, Tensor):  # x[i] += y changes the copy of x[i], and assigns it to x[i]
            self._copies = [one for one in self._copies if one.copy is not value]
        at = _numbers(x, index)
        value = number_tensor(value, x.dtype, x.device)
        if not at:
            plain(x, index, value)
            return
        taken, part = [], x
        for dim, rows, _ in at.values():
            taken.append((part, dim, rows))
            part = part.index_select(dim, rows)
        part = part.clone()
        plain(part, _index_within(index, at), value)
        for number, (whole, dim, rows) in enumerate(reversed(taken)):
            if number == len(taken) - 1:
                whole.index_copy_(dim, rows, part)
            else:
                part = whole.index_copy(dim, rows, part)


At = dict[int, tuple[int, Tensor, Any]]  # position in an index → (dim of x, rows, index within these rows)


def _numbers(x: Tensor, index: Any) -> At:
    """The positions at which an index has numbers that calls may change, or slices between such numbers."""
    items = index if isinstance(index, tuple) else (index,)
    ends = [end for item in items for end in _ends(item) if _is_open(end)]
    if not ends or any(type(end) is SymNumber and _here() in end.env.views for end in ends):
        return {}
    taken = [_dims(item) for item in items]
    rest = x.dim() - sum(taken)
    found: At = {}
    dim = 0
    for position, item in enumerate(items):
        if _is_open(item) and 0 <= dim < x.dim():
            rows = _rows(item, x.shape[dim], x.device)
            if rows is not None:
                found[position] = dim, rows, slice(None) if isinstance(item, slice) else 0
        dim += rest if item is Ellipsis else taken[position]
    return found


def _ends(item: Any) -> tuple[Any, ...]:
    return (item.start, item.stop) if isinstance(item, slice) else (item,)


def _is_open(item: Any) -> bool:
    if isinstance(item, slice):
        return any(_is_number(end) for end in _ends(item))
    return _is_number(item) or _is_tensor(item)


def _here() -> str:
    return place_of(traceback.extract_stack())


def _is_tensor(item: Any) -> bool:
    whole = isinstance(item, Tensor) and item.dim() == 0 and not item.is_floating_point() and not item.is_complex()
    return whole and item.dtype != torch.bool and is_fake(item)


def _rows(item: Any, size: int, device: torch.device) -> Tensor | None:
    """The rows that an item of an index selects in a dim of ``size``; None where these or their count stay constant."""
    if _is_tensor(item):
        return _row_index(item, size)
    if isinstance(item, slice):
        return _between(item, size, device)
    if not isinstance(item, int):
        return None
    if is_unbacked(item):
        return _row_index(item.tensor.to(device), size)
    if -size <= item < 0:  # the comparison becomes a condition of the plan
        item = item + size
    return number_tensor(item, torch.int64, device).reshape(1) if 0 <= item < size else None


def _between(item: slice, size: int, device: torch.device) -> Tensor | None:
    """The rows of a slice whose ends have a constant distance and are within ``size``; None for other slices.

    For symbolic numbers, "within" becomes a condition of the plan; for unbacked ones, ops raise if it does not hold.
    """
    start, stop, step = item.start, item.stop, item.step
    if step not in (None, 1) or not (isinstance(start, int) and isinstance(stop, int)):
        return None
    count = apart(_operand(stop), _operand(start))
    if count is None or count <= 0:
        return None
    if not (is_unbacked(start) or is_unbacked(stop)) and not (start >= 0 and stop <= size):
        return None
    first: Tensor = number_tensor(start, torch.int64, device)
    return first + torch.arange(count, device=device)


def _operand(end: Any) -> Any:
    return end.expression if is_unbacked(end) else expression_of(end)


def _dims(item: Any) -> int:
    """The number of dims that an item of an index takes; 0 for an ellipsis."""
    if item is None or item is Ellipsis or type(item) is bool:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _index_within(index: Any, at: At) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    return tuple(at[position][2] if position in at else item for position, item in enumerate(items))


def _row_index(i: Tensor, size: int) -> Tensor:
    """A number as an index tensor of one row; a negative number counts from the end."""
    i = i.detach().long()
    return torch.where(i < 0, i + size, i).reshape(1)


def _narrow(x: Tensor, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``narrow(x, dim, start, length)``, which never goes beyond the end."""
    names = ("dim", "start", "length")
    values = dict(zip(names, given, strict=False)) | {**kwargs}
    start: Any = values.get("start")
    length: Any = values.get("length")
    if values.keys() != {*names} or not _is_number(start) or type(length) is not int:
        return NotImplemented
    dim = int(values["dim"]) % x.dim()
    if not is_unbacked(start) and not (start >= 0 and start + length <= x.shape[dim]):
        return NotImplemented
    return x[(slice(None),) * dim + (slice(start, start + length),)]


def _select(x: Tensor, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``select(x, dim, index)``."""
    values = dict(zip(("dim", "index"), given, strict=False)) | {**kwargs}
    if values.keys() != {"dim", "index"} or not _is_number(values["index"]):
        return NotImplemented
    return x[(slice(None),) * (int(values["dim"]) % x.dim()) + (values["index"],)]


def _roll(x: Tensor, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``roll(x, shift, dim)``."""
    values = dict(zip(("shifts", "dims"), given, strict=False)) | {**kwargs}
    shift, dim = values.get("shifts"), values.get("dims")
    if not values.keys() <= {"shifts", "dims"} or not _is_number(shift):
        return NotImplemented
    if not isinstance(shift, int) or not (dim is None or type(dim) is int) or not x.numel():
        return NotImplemented
    flat = x.flatten() if dim is None else x
    along = 0 if dim is None else dim
    rows = torch.arange(flat.shape[along], device=x.device) - number_tensor(shift, torch.int64, x.device)
    return flat.index_select(along, torch.remainder(rows, flat.shape[along])).reshape(x.shape)


def _is_number(value: Any) -> bool:
    """Whether a value is a symbolic number of this capture, or an unbacked one."""
    return (type(value) is SymNumber and not value.env.ended) or is_unbacked(value)


BY_NUMBERS: dict[str, Callable[[Tensor, Sequence[Any], Mapping[str, Any]], Any]] = {
    "narrow": _narrow, "select": _select, "roll": _roll,
}  # fmt: skip
