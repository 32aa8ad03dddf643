"""Runs: sets of indices of one dim, as half-open ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "Runs",
    "difference",
    "intersection",
    "length",
    "position",
    "position_of_each",
    "selection",
    "stretches",
    "union",
]

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of indices, ascending; two runs do not touch."""


def length(runs: Runs) -> int:
    """The number of indices in some runs."""
    return sum(hi - lo for lo, hi in runs)


def union(ranges: Iterable[tuple[int, int]]) -> Runs:
    """The indices that are in any of these ranges, which may overlap and be in any order."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        elif lo < hi:
            out.append((lo, hi))
    return tuple(out)


def selection(runs: Runs, ranges: Sequence[tuple[int, int]]) -> Runs:
    """The logical indices at some ranges (start, length) of the positions in ``runs``."""
    out: list[tuple[int, int]] = []
    for start, n in ranges:
        before = 0
        for lo, hi in runs:
            first, last = max(start - before, 0), min(start + n - before, hi - lo)
            before += hi - lo
            if first < last:
                if out and out[-1][1] == lo + first:
                    out[-1] = (out[-1][0], lo + last)
                else:
                    out.append((lo + first, lo + last))
    return tuple(out)


def intersection(a: Runs, b: Runs) -> Runs:
    """The indices in both."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if lo < hi:
            found.append((lo, hi))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def difference(a: Runs, b: Runs) -> Runs:
    """The indices of ``a`` that are not in ``b``."""
    out = []
    for start, stop in a:
        lo = start
        for x, y in b:
            if y <= lo or x >= stop:
                continue
            if lo < x:
                out.append((lo, x))
            lo = y
        if lo < stop:
            out.append((lo, stop))
    return tuple(out)


def position_of_each(runs: Runs, indices: Iterable[int]) -> list[int]:
    """Where ascending indices are among those of some runs."""
    found: list[int] = []
    before = at = 0
    for index in indices:
        while at < len(runs) and runs[at][1] <= index:
            before += runs[at][1] - runs[at][0]
            at += 1
        if at == len(runs) or index < runs[at][0]:
            raise AssertionError(f"{index} is not in {runs}")
        found.append(before + index - runs[at][0])
    return found


def position(runs: Runs, index: int) -> int:
    """Where an index is among those of some runs."""
    before = 0
    for lo, hi in runs:
        if lo <= index < hi:
            return before + index - lo
        before += hi - lo
    raise AssertionError(f"{index} is not in {runs}")


def stretches(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Numbers, in their order, as stretches of equal steps: (first, step, how many); the step of one number is 0."""
    begin = 0
    while begin < len(numbers):
        end, step = begin + 1, 0
        if end < len(numbers):
            step = numbers[end] - numbers[begin]
            while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
                end += 1
        yield numbers[begin], step, end - begin
        begin = end
