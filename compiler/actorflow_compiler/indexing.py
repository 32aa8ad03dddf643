"""``x[i]`` and ``x[i] = y`` with ``i`` a tensor without dims go in; ops that take ``i`` as data come out.

torch would read the number.  What it gives is a view of ``x``; here it is a copy, so that a step which then changes it
in place is refused.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.decided import Small
from actorflow_compiler.errors import CaptureError
from actorflow_compiler.reads import place_of
from actorflow_compiler.torch_internals import is_fake, node_of, replaced_indexing

__all__ = ["Indexing"]


@dataclass(frozen=True, slots=True)
class _Taken:
    """What ``whole[i]`` gave, the versions of both then, and where."""

    copy: Tensor
    version: int
    whole: Tensor
    before: int
    place: str


class Indexing:
    """Follows what a step takes out of tensors so."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """While the step runs."""
        with replaced_indexing(self._get, self._set):
            yield

    def check(self) -> None:
        """Raise CaptureError for a copy that was changed, or is used after its origin has: PyTorch has a view."""
        for one in self._taken:
            if one.copy._version != one.version:
                raise CaptureError(
                    f"{one.place}\n  what x[i] gives is changed in place, and so x would be, with i a tensor; "
                    f"expected: x[i] = y, x[i] += y, or x.index_copy_, index_add_ or index_put_"
                )
            copy, whole = node_of(one.copy), node_of(one.whole)
            if one.whole._version == one.before or copy is None or whole is None:
                continue
            if Small(copy[0].graph, copy[1], (), ()).outdated(copy[0], whole[0]):
                raise CaptureError(
                    f"{one.place}\n  what x[i] gives is used after x has changed, and has changed with it, with i a "
                    f"tensor; expected: x[i].clone(), if what it was before is wanted, else x[i] once more"
                )

    def _get(self, plain: Callable[..., Any], x: Tensor, index: Any) -> Any:
        at = _numbers(x, index)
        if not at:
            return plain(x, index)
        whole = x
        for dim, i in at.values():
            x = x.index_select(dim, _counted(i, x.shape[dim]))
        found = plain(x, _first(index, at))
        place = place_of(traceback.extract_stack())
        self._taken.append(_Taken(found, found._version, whole, whole._version, place))
        return found

    def _set(self, plain: Callable[..., Any], x: Tensor, index: Any, value: Any) -> None:
        if isinstance(value, Tensor):  # x[i] += y changes what x[i] has given, and puts it back
            self._taken = [one for one in self._taken if one.copy is not value]
        at = _numbers(x, index)
        if not at:
            plain(x, index, value)
            return
        taken, part = [], x
        for dim, i in at.values():
            rows = _counted(i, part.shape[dim])
            taken.append((part, dim, rows))
            part = part.index_select(dim, rows)
        part = part.clone()
        plain(part, _first(index, at), value)
        for number, (whole, dim, rows) in enumerate(reversed(taken)):
            if number == len(taken) - 1:
                whole.index_copy_(dim, rows, part)
            else:
                part = whole.index_copy(dim, rows, part)


def _numbers(x: Tensor, index: Any) -> dict[int, tuple[int, Tensor]]:
    """Where in an index tensors without dims are that stand for numbers: position → (dim of ``x``, tensor)."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(_is_number(item) for item in items):
        return {}
    taken = [_dims(item) for item in items]
    rest = x.dim() - sum(taken)
    found, dim = {}, 0
    for position, item in enumerate(items):
        if _is_number(item):
            found[position] = dim, item
        dim += rest if item is Ellipsis else taken[position]
    return found


def _is_number(item: Any) -> bool:
    whole = isinstance(item, Tensor) and item.dim() == 0 and not item.is_floating_point() and not item.is_complex()
    return whole and item.dtype != torch.bool and is_fake(item)


def _dims(item: Any) -> int:
    """How many dims of a tensor an item of an index is for; none for an ellipsis."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _first(index: Any, at: dict[int, tuple[int, Tensor]]) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    return tuple(0 if position in at else item for position, item in enumerate(items))


def _counted(i: Tensor, size: int) -> Tensor:
    """A number, counted from the end where it is below zero, as an index of one row."""
    i = i.detach().long()
    return torch.where(i < 0, i + size, i).reshape(1)
