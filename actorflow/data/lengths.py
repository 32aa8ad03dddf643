"""Find the length of each sample of a dataset: given, computed, or measured once by all ranks together."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

from actorflow.control.cluster import Alone
from actorflow.data.data_source import other_data
from actorflow.data.element_random import ElementRandom
from actorflow.session.process import current
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ActorflowError, DataError

__all__ = ["Integers", "RowLengths", "lengths_of"]

Integers = np.ndarray[Any, np.dtype[np.int64]]
Measure = Callable[[int], dict[str, int]]
"""Index of a sample → the size of dim 0 of each of its tensors that has one, by path."""
Over = Callable[[Callable[[int], Any], Sequence[int]], Iterable[Any]]
"""What calls a function with each of some indices, in order, and gives the results: ``map``, or workers."""


class RowLengths:
    """The length of each sample of a dataset, int64[samples].

    ``given`` are the lengths, or None: ``measure`` finds them, when they are first wanted.  Ranks share that work, so
    all of them have to want the lengths at the same point of the script.  ``how`` says what measuring does, for a note;
    without it each rank measures all samples, and says nothing.  ``over`` calls it for a rank's share of the indices.

    Raises DataError for lengths that are no whole numbers, for another number of them than there are samples, and where
    a sample cannot be measured.
    """

    def __init__(
        self,
        name: str,
        count: int,
        given: Any = None,
        measure: Measure | None = None,
        how: str = "",
        over: Over = map,
        seeds: Any = None,
    ) -> None:
        assert (given is None) != (measure is None)
        self.name, self.count = name, count
        self._measure, self._how = measure, how
        self._over = over
        self._seeds = seeds  # what may draw random numbers when a sample is measured
        self._known = None if given is None else _checked(given, count, name)

    @property
    def known(self) -> Integers | None:
        """The lengths, if they have been found."""
        return self._known

    def values(self) -> Integers:
        """The lengths; found now, if they have not been."""
        if self._known is None:
            assert self._measure is not None
            self._known = self._found(self._measure)
            self._measure = None
        return self._known

    @property
    def digest(self) -> str:
        """What tells these lengths from others: 8 hexadecimal digits."""
        return f"{zlib.crc32(np.ascontiguousarray(self.values(), '<i8').tobytes()):08x}"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_seeds": None, "_over": map}

    # -- parts -----------------------------------------------------------------------------------------

    def _found(self, measure: Measure) -> Integers:
        shared = self._how and get_worker_info() is None
        cluster = current().context.cluster if shared else None
        alone = cluster is None or isinstance(cluster, Alone) or cluster.world == 1
        world, rank = (1, 0) if cluster is None or alone else (cluster.world, cluster.rank)
        if shared and rank == 0:
            sharing = f", shared by {world} ranks" if world > 1 else ""
            say(f"{self.name}: {self._how}{sharing}")
        mine = self._share(measure, self.count * rank // world, self.count * (rank + 1) // world)
        if cluster is None or alone:
            error, values = _joined([mine], self.count)
        else:
            tag = f"the lengths of samples of {self.name}"
            every = cluster.gather(tag, mine.to_bytes(self.count))
            reply = None
            if every is not None:
                shares = [_Share.from_bytes(said) for said in every]
                error = other_data([f"{count:,} samples" for count, _ in shares])
                values = np.empty(0, np.int64)
                if not error:
                    error, values = _joined([share for _, share in shares], self.count)
                reply = [_Share(error, ("",), values.reshape(-1, 1)).to_bytes(self.count)] * world
            found = _Share.from_bytes(cluster.scatter(tag, reply))[1]
            error, values = found.error, found.sizes[:, 0]
        if error:
            raise DataError(f"{self.name}: {error}")
        return _checked(values, self.count, self.name)

    def _share(self, measure: Measure, lo: int, hi: int) -> _Share:
        """What these samples have.  An error is returned, not raised, as other ranks have to hear of it."""
        work = _Measured(measure)
        paths: tuple[str, ...] | None = None
        rows: list[list[int]] = []
        with ElementRandom(self._seeds).aside():
            try:
                for index, sizes in enumerate(self._over(work, range(lo, hi)), lo):
                    if isinstance(sizes, str):
                        return _Share(sizes)
                    paths = tuple(sizes) if paths is None else paths
                    if tuple(sizes) != paths:
                        return _Share(
                            f"sample {index} has tensors at {_list(tuple(sizes))}, and sample {lo} at {_list(paths)}; "
                            f"the same were expected: pass lengths="
                        )
                    rows.append(list(sizes.values()))
            except DataError as error:
                return _Share(str(error))
        paths = paths or ()
        return _Share("", paths, np.array(rows, np.int64).reshape(len(rows), len(paths)))


class _Share:
    """What one rank has measured: sizes are int64[samples, paths]."""

    def __init__(self, error: str, paths: tuple[str, ...] = (), sizes: Integers | None = None) -> None:
        self.error, self.paths = error, paths
        self.sizes: Integers = np.empty((0, len(paths)), np.int64) if sizes is None else sizes

    def to_bytes(self, count: int) -> bytes:
        """With the number of samples of the whole dataset."""
        head = json.dumps([count, self.error, list(self.paths), len(self.sizes)]).encode()
        return head + b"\n" + zlib.compress(np.ascontiguousarray(self.sizes, "<i8").tobytes(), 1)

    @staticmethod
    def from_bytes(said: bytes) -> tuple[int, _Share]:
        """The inverse of ``to_bytes``."""
        head, _, body = said.partition(b"\n")
        count, error, paths, rows = json.loads(head)
        sizes = np.frombuffer(zlib.decompress(body), "<i8").astype(np.int64).reshape(rows, len(paths))
        return count, _Share(error, tuple(paths), sizes)


class _Measured:
    """Measures a sample; text for what has failed, as workers cannot send any error."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def __call__(self, index: int) -> dict[str, int] | str:
        try:
            return self._measure(index)
        except ActorflowError as error:
            return str(error)
        except Exception as error:
            return f"the length of sample {index} cannot be found: {type(error).__name__}: {error}"


class _Computed:
    """The user's function, as what measures a sample."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function

    def __call__(self, index: int) -> dict[str, int]:
        value = self._function(index)
        number = value.item() if isinstance(value, Tensor | np.generic | np.ndarray) and np.size(value) == 1 else value
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise DataError(f"lengths({index}) returned {value!r:.60}; a whole number from 0 on was expected")
        return {"": number}


def _joined(shares: Sequence[_Share], count: int) -> tuple[str, Integers]:
    """What is wrong, or nothing, and the lengths that ranks have measured together.

    The length of a sample is the size of those of its tensors whose size is not the same in all samples.
    """
    none = np.empty(0, np.int64)
    for share in shares:
        if share.error:
            return share.error, none
    shares = [share for share in shares if len(share.sizes)]
    if not shares:
        return "", none
    paths = shares[0].paths
    for share in shares:
        if share.paths != paths:
            return f"samples have tensors at {_list(paths)}, and others at {_list(share.paths)}: pass lengths=", none
    sizes = np.concatenate([share.sizes for share in shares])
    if not paths:
        return "its samples have no tensor with a dim: pass lengths=, or samples with a tensor of [length, ...]", none
    varying = [at for at in range(len(paths)) if (sizes[:, at] != sizes[0, at]).any()] or [0]
    for at in varying[1:]:
        if (odd := np.flatnonzero(sizes[:, at] != sizes[:, varying[0]])).size:
            row, one, other = int(odd[0]), paths[varying[0]], paths[at]
            return (
                f"sample {row} has {sizes[row, varying[0]]} along dim 0 of {one!r}, and {sizes[row, at]} of {other!r}: "
                f"which of them is its length is not known: pass lengths=, and pad the others in the dataset"
            ), none
    return "", sizes[:, varying[0]].copy()


def lengths_of(given: Any, dataset: Any) -> tuple[Any, Measure | None]:
    """The lengths that are known, and what computes them: both None where samples have to be read.

    Raises DataError for what is neither a sequence nor a function.
    """
    if given is None:
        own = getattr(dataset, "lengths", None)
        return (own, None) if _is_sequence(own) else (None, None)
    if _is_sequence(given):
        return given, None
    if callable(given):
        return None, _Computed(given)
    raise DataError(
        f"lengths={given!r:.60} was found; a sequence with the length of each sample was expected, or a function that "
        f"returns that of a sample whose index it gets"
    )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray | Tensor) and not isinstance(value, str | bytes)


def _checked(given: Any, count: int, name: str) -> Integers:
    if len(given) != count:
        raise DataError(f"{name}: {len(given):,} lengths were found for {count:,} samples; one for each was expected")
    found = np.asarray(given)
    if found.size == 0:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        odd = next(
            (f": {value!r:.40} is that of sample {at}" for at, value in enumerate(given) if not _whole(value)), ""
        )
        raise DataError(
            f"{name}: lengths of {found.dtype}{list(found.shape)} were found{odd}; whole numbers were expected"
        )
    if (low := np.flatnonzero(found < 0)).size:
        raise DataError(f"{name}: the length of sample {low[0]} is {found[low[0]]}; a number from 0 on was expected")
    return found.astype(np.int64)


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _list(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths)) or "no place"
