"""Pack documents of tokens into rows of one length, one behind the other, with the segments that they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from actorflow.data.lengths import Integers, RowLengths, lengths_of
from actorflow_compiler.core.errors import DataError
from actorflow_compiler.core.user_code import UserLines

__all__ = ["PackedRows", "packed", "segment_mask"]

_WINDOW = 64  # rows that may still get a document, where documents are not cut
_IGNORED = -100  # of targets: torch's cross_entropy leaves them out
_lines = UserLines()


def packed(
    documents: Any,
    length: int = 1024,
    *,
    eos: int | None = None,
    split: bool = True,
    lengths: Sequence[int] | Callable[[int], int] | None = None,
    padding: int = 0,
) -> PackedRows:
    """Make a dataset of rows of ``length`` tokens of documents, for ``flow.data.loader``.

    ``documents`` is map-style, as a list or a column of Hugging Face's datasets is: each document is a tensor or an
    array of dim 1, or a list, of whole numbers.  ``eos`` is put behind each of them.  They are packed in their order:
    with ``split`` one behind the other, and cut where a row is full; else each goes whole into the first row with room
    for it, of the last 64 that are begun, and rows are padded.  ``lengths`` are those of the documents (without
    ``eos``), or a function that returns that of a document for its index (default: the documents' own ``lengths``; else
    the ranks read each document once, together, with a note).

    A row is a dictionary of int64[length] tensors.  ``tokens``; ``segments``: the number in the row, from 0, of the
    document that a token is of, and -1 for padding; ``positions``: a token's place in its segment, from 0; ``targets``:
    the next token of the same segment, and -100 where there is none.  What is cut is a segment of its own on either
    side, so that positions stay below ``length``, and no token needs one of another row.  See ``segment_mask``.

    Raises DataError for documents of another form; where ``split`` is false, for one that is longer than a row.

    >>> rows = flow.data.packed(documents, length=1024, eos=2)
    >>> loader = flow.data.loader(rows, batch_size=16, shuffle=True)
    >>> for batch in loader:
    ...     loss = train_step(batch["tokens"], batch["segments"], batch["positions"], batch["targets"])
    """
    name = f"flow.data.packed of {_lines.here() or 'the script'}"
    for what, value, least in (("length", length, 1), ("eos", eos, None), ("padding", padding, None)):
        odd = not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least)
        if odd and not (what == "eos" and value is None):
            raise DataError(f"{name}: {what}={value!r} was found; a whole number was expected, length from 1 on")
    if (
        isinstance(documents, str | bytes | Mapping)
        or not isinstance(documents, Sized)
        or not callable(getattr(documents, "__getitem__", None))
    ):
        raise DataError(
            f"{name}: a {type(documents).__qualname__} was found; documents with __getitem__ and __len__ were "
            f"expected, each a tensor, array or list of tokens: a list, or a column of a dataset (data['input_ids'])"
        )
    known, function = lengths_of(lengths, documents)
    count = len(documents)
    if known is not None:
        found = RowLengths(name, count, known)
    elif function is not None:
        found = RowLengths(name, count, None, function, "lengths= is called once for each document")
    else:
        in_memory = type(documents) in (list, tuple) or isinstance(documents, Tensor | np.ndarray)
        how = (
            f"each of its {count:,} documents is read once, to find its length (spare that: pass lengths=, a sequence "
            f"or a function of the index, or give the documents an attribute lengths)"
        )
        found = RowLengths(name, count, None, _Counted(documents), "" if in_memory else how, seeds=documents)
    return PackedRows(name, documents, found, _Packing(length, eos, split, padding))


def segment_mask(segments: Tensor, causal: bool = True) -> Tensor:
    """Which tokens attend to which, for ``scaled_dot_product_attention``: bool[rows, 1, length, length].

    ``segments`` are those of ``packed``: int[rows, length].  A token attends to those of its own segment, with
    ``causal`` only up to itself; padding to padding alone, so that every token attends to something.  In a job it may
    be called with any part of the rows.
    """
    mask = (segments.unsqueeze(-1) == segments.unsqueeze(-2)).unsqueeze(1)
    if not causal:
        return mask
    at = torch.arange(segments.shape[-1], device=segments.device)
    return mask & (at.unsqueeze(-1) >= at)


@dataclass(frozen=True, slots=True)
class _Packing:
    """How rows are filled."""

    length: int  # of a row
    eos: int | None
    split: bool
    padding: int


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What rows are made of: the pieces of row r are those from ``first[r]`` up to ``first[r + 1]``."""

    first: Integers  # [rows + 1]
    document: Integers  # of each piece: index of its document
    begin: Integers  # of each piece: its first token in the document, counted with eos
    end: Integers  # of each piece: behind its last token


class PackedRows(Dataset[dict[str, Tensor]]):
    """The rows that ``flow.data.packed`` makes of documents."""

    def __init__(self, name: str, documents: Any, lengths: RowLengths, packing: _Packing) -> None:
        self._name, self._documents, self._lengths, self._packing = name, documents, lengths, packing
        self._made: _Pieces | None = None

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._pieces().first) - 1

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """A row.  Raises DataError for a document that is not as its length says, IndexError behind the last row."""
        pieces, length = self._pieces(), self._packing.length
        row = range(len(self))[row]
        tokens = torch.full((length,), self._packing.padding)
        segments, positions = torch.full((length,), -1), torch.zeros(length, dtype=torch.int64)
        targets = torch.full((length,), _IGNORED)
        at = 0
        for segment, piece in enumerate(range(pieces.first[row], pieces.first[row + 1])):
            begin, end = int(pieces.begin[piece]), int(pieces.end[piece])
            here = slice(at, at + end - begin)
            tokens[here] = self._document(int(pieces.document[piece]))[begin:end]
            segments[here] = segment
            positions[here] = torch.arange(end - begin)
            targets[here.start : here.stop - 1] = tokens[here.start + 1 : here.stop]
            at = here.stop
        return {"tokens": tokens, "segments": segments, "positions": positions, "targets": targets}

    def _document(self, index: int) -> Tensor:
        tokens = _tokens(index, self._documents[index], self._name)
        expected = int(self._lengths.values()[index])
        if len(tokens) != expected:
            raise DataError(f"{self._name}: document {index} has {len(tokens)} tokens; its length says {expected}")
        eos = self._packing.eos
        return tokens if eos is None else torch.cat([tokens, torch.tensor([eos])])

    def _pieces(self) -> _Pieces:
        if self._made is None:
            sizes = self._lengths.values() + (self._packing.eos is not None)
            make = _cut if self._packing.split else self._fitted
            self._made = make(sizes, self._packing.length)
        return self._made

    def _fitted(self, sizes: Integers, length: int) -> _Pieces:
        """Whole documents, each in the first row with room for it of the last ones that are begun."""
        if (odd := np.flatnonzero(sizes > length)).size:
            behind = " with eos" * (self._packing.eos is not None)
            raise DataError(
                f"{self._name}: document {odd[0]} has {sizes[odd[0]]} tokens{behind}, and a row {length}; pass "
                f"length={sizes.max()}, or split=True, which cuts documents where a row is full"
            )
        room = np.zeros(_WINDOW, np.int64)  # of the rows that are begun, oldest first, behind those that are not there
        begun = 0  # rows
        row_of = np.empty(len(sizes), np.int64)
        for index, size in enumerate(sizes.tolist()):
            if not size:
                row_of[index] = -1
                continue
            at = int((room >= size).argmax())
            if room[at] < size:
                room[:-1] = room[1:]
                at, room[-1] = _WINDOW - 1, length
                begun += 1
            room[at] -= size
            row_of[index] = begun - _WINDOW + at
        documents = np.flatnonzero(row_of >= 0)
        documents = documents[np.argsort(row_of[documents], kind="stable")]
        first = np.searchsorted(row_of[documents], np.arange(begun + 1))
        return _Pieces(first, documents, np.zeros(len(documents), np.int64), sizes[documents])


def _cut(sizes: Integers, length: int) -> _Pieces:
    """Documents one behind the other, cut where a row is full."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.unique(np.concatenate([[0, total], ends, np.arange(0, total, length)])).astype(np.int64)
    starts, stops = cuts[:-1], cuts[1:]
    document = np.searchsorted(ends, starts, side="right")
    before = (ends - sizes)[document] if len(starts) else starts
    rows = -(-total // length)
    return _Pieces(np.searchsorted(starts, np.arange(rows + 1) * length), document, starts - before, stops - before)


def _tokens(index: int, document: Any, name: str) -> Tensor:
    """The tokens of a document, int64."""
    found: Any = document
    if not isinstance(document, Tensor):
        try:
            found = np.asarray(document)
        except (TypeError, ValueError):  # lists of different lengths
            found = None
    if found is not None and found.ndim == 1 and not len(found):
        return torch.empty(0, dtype=torch.int64)
    if isinstance(found, Tensor):
        whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    else:
        whole = found is not None and found.dtype.kind in "iu"
    if not whole or found.ndim != 1:
        what = f"a {type(document).__name__}" + ("" if found is None else f" of {found.dtype}{list(found.shape)}")
        raise DataError(
            f"{name}: document {index} is {what}; a tensor or an array of whole numbers of shape [tokens] was "
            f"expected, or a list of them"
        )
    return found.to(torch.int64) if isinstance(found, Tensor) else torch.from_numpy(found.astype(np.int64))


class _Counted:
    """Counts the tokens of a document."""

    def __init__(self, documents: Any) -> None:
        self._documents = documents

    def __call__(self, index: int) -> dict[str, int]:
        document = self._documents[index]
        if not isinstance(document, Sized) or isinstance(document, str | bytes | Mapping):
            raise DataError(
                f"document {index} is a {type(document).__name__}; a tensor, array or list of tokens was expected"
            )
        return {"": len(document)}
