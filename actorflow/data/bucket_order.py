"""The order in which rows of variable length are given: all rows of a batch are of one bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from actorflow.data.lengths import Integers, RowLengths
from actorflow.data.order import EpochDraw, Picked, ShuffledOrder
from actorflow_compiler.core.errors import DataError

__all__ = ["BucketOrder"]


class BucketOrder:
    """Rows in the order of ``base``, put into the smallest bucket that holds them.

    A batch is given when its bucket has as many rows as a batch; what is left of the buckets at the end of an epoch are
    its last, shorter batches, smallest bucket first, unless they are dropped.

    Raises DataError where a sample is longer than the largest bucket, as soon as lengths are known.
    """

    def __init__(self, base: ShuffledOrder, buckets: tuple[int, ...], lengths: RowLengths) -> None:
        self._base, self._buckets, self._lengths = base, buckets, lengths
        self._which: Integers | None = None  # the number of the bucket of each sample
        self._loaded: tuple[Mapping[str, Any], str] | None = None  # a state to be compared with lengths, once known
        if lengths.known is not None:
            self._found()

    @property
    def rows(self) -> int:
        """Rows of an epoch, with those that are dropped."""
        return self._base.rows

    @property
    def batch_size(self) -> int:
        """See ``BatchOrder``."""
        return self._base.batch_size

    @property
    def text(self) -> str:
        """See ``BatchOrder``."""
        known = "" if self._which is None else f", lengths {self._lengths.digest}"
        return f"{self._base.text}, of buckets {_list(self._buckets)}{known}"

    def begin(self) -> EpochDraw:
        """See ``BatchOrder``."""
        return self._base.begin()

    def set_epoch(self, epoch: int) -> None:
        """See ``BatchOrder``."""

    def batches(self, epoch: int, row: int, draw: EpochDraw) -> Iterator[Picked]:
        """The batches of an epoch from a row on, which must be the first one of a batch."""
        which, size = self._found(), self._base.batch_size
        order = self._base.indices(epoch).numpy()
        of_row = which[order]
        full: list[Integers] = []  # places before the rows were put into buckets, [batches, size]
        rests: list[Integers] = []
        for bucket in range(len(self._buckets)):
            places = np.flatnonzero(of_row == bucket)
            whole = len(places) // size * size
            full.append(places[:whole].reshape(-1, size))
            rests.append(places[whole:])
        batches = np.concatenate(full)
        batches = batches[np.argsort(batches[:, -1], kind="stable")]  # one is given when its last row comes
        for number in range(min(row // size, len(batches)), len(batches)):
            places = batches[number]
            yield Picked(number * size, tuple(order[places].tolist()), self._buckets[of_row[places[0]]])
        at = len(batches) * size
        for bucket, places in enumerate(rests):
            if len(places) and at >= row and not self._base.drop_last:
                yield Picked(at, tuple(order[places].tolist()), self._buckets[bucket])
            at += len(places)

    def ends(self, row: int) -> bool:
        """Whether no batch begins at this row or behind it."""
        return row >= (self._full_rows() if self._base.drop_last else self.rows)

    def count(self) -> int:
        """The number of batches of a whole epoch."""
        full = self._full_rows() // self._base.batch_size
        return full + (0 if self._base.drop_last else int((self._rests() > 0).sum()))

    # -- position --------------------------------------------------------------------------------------

    def state_dict(self, within: bool = False) -> dict[str, Any]:
        """See ``BatchOrder``: what identifies the order."""
        digest = self._lengths.digest if self._which is not None else None
        if digest is None and self._loaded is not None:
            digest = self._loaded[0].get("lengths")
        return {
            **self._base.state_dict(within),
            "buckets": list(self._buckets),
            "lengths": digest,
            "batch_size": self._base.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any], name: str) -> None:
        """Check a saved order.  Raises DataError if it is another one: now, or when lengths are found."""
        mine = {**self._base.state_dict(), "buckets": list(self._buckets)}
        for key, value in mine.items():
            found = state.get(key)
            found = list(found) if key == "buckets" and isinstance(found, list | tuple) else found
            if found != value and not (key == "seed" and not self._base.shuffle):
                raise DataError(
                    f"{name}: a position of a source with {key}={found!r} was loaded; this one has {key}={value!r}, "
                    f"so that other rows would follow; expected: the same dataset, buckets, shuffle and seed (ranks "
                    f"and workers may differ), or a source that begins anew: leave its state out"
                )
        size = state.get("batch_size")
        if state.get("row") and size != self._base.batch_size:
            raise DataError(
                f"{name}: row {state['row']} of an epoch in batches of {size} was loaded, and this source has "
                f"batch_size={self._base.batch_size}: with buckets the batch size decides which rows were given "
                f"before, so that an epoch goes on with the same one only; pass batch_size={size}, or change it where "
                f"an epoch ends"
            )
        self._loaded = ({**state}, name)
        if self._which is not None:
            self._compare(self._which)

    def _compare(self, which: Integers) -> None:
        """Raise DataError if a loaded state does not fit the lengths."""
        if self._loaded is None:
            return
        (state, name), self._loaded = self._loaded, None
        digest = state.get("lengths")
        if digest is not None and digest != self._lengths.digest:
            raise DataError(
                f"{name}: a position of a source whose samples have other lengths was loaded (lengths={digest!r}; here "
                f"{self._lengths.digest!r}), so that other rows would follow; expected: the same dataset, or a source "
                f"that begins anew: leave its state out"
            )
        row = state.get("row", 0)
        starts = np.cumsum([0, *self._rests(which)]) + self._full_rows(which)
        if row not in starts and (row > starts[0] or row % self._base.batch_size):
            raise DataError(
                f"{name}: row {row} was loaded, at which no batch begins; a position between two was expected"
            )

    # -- parts -----------------------------------------------------------------------------------------

    def _found(self) -> Integers:
        """The number of the bucket of each sample."""
        if self._which is None:
            lengths = self._lengths.values()
            if (odd := np.flatnonzero(lengths > self._buckets[-1])).size:
                others = f" (and {len(odd) - 1:,} samples more are too long)" if len(odd) > 1 else ""
                raise DataError(
                    f"{self._lengths.name}: sample {odd[0]} is {lengths[odd[0]]} long, and the largest of buckets "
                    f"{_list(self._buckets)} holds {self._buckets[-1]}{others}; add a bucket of {lengths.max()}, or "
                    f"crop samples in the dataset"
                )
            self._which = np.searchsorted(np.array(self._buckets), lengths).astype(np.int64)
            self._compare(self._which)
        return self._which

    def _rests(self, which: Integers | None = None) -> Integers:
        """Of each bucket, the rows that fill no batch."""
        counts = np.bincount(self._found() if which is None else which, minlength=len(self._buckets))
        return counts % self._base.batch_size

    def _full_rows(self, which: Integers | None = None) -> int:
        return self.rows - int(self._rests(which).sum())


def _list(buckets: tuple[int, ...]) -> str:
    return ", ".join(map(str, buckets))
