"""Train each case of a script under layouts, as a job and eagerly, and print a line for each that says what differs.

    actorflow run tests/scripts/NAME.py --devices 2 -- every LAYOUT …

trains every case under every layout; ``some`` instead of ``every`` trains each case once, under another layout than its
neighbours.  Of many cases it trains representatives: of pairs each first part once, beside another second part than its
neighbours; and of more than a few of these, or of others, two or three.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["EVERY", "SOME", "Cases", "apart", "in_float64", "main", "off", "trainings"]

T = TypeVar("T")
Cases = Callable[[str], Sequence[T]]  # those of a layout
EVERY, SOME = "every", "some"
FEW = 4  # cases, all of which are trained
SEVERAL = 2  # that represent more
EXACT = 1e-9  # float64 to the last digits


def trainings(cases: Cases[T], layouts: Sequence[str], how: str) -> list[tuple[str, T]]:
    """Layouts and cases, in the order in which they are trained."""
    of = {layout: list(cases(layout)) for layout in layouts}
    if how == EVERY:
        return [(layout, case) for layout in layouts for case in of[layout]]
    assert how == SOME, how
    found = []
    several = list(dict.fromkeys(case for layout in layouts for case in of[layout]))
    for number, case in enumerate(_representatives(several)):
        first = number % len(layouts)
        found.append((next(layout for layout in [*layouts[first:], *layouts[:first]] if case in of[layout]), case))
    return sorted(found, key=lambda training: layouts.index(training[0]))


def _representatives(cases: Sequence[T]) -> Sequence[T]:
    """Some of many cases, as the module says; all of few."""
    if len(cases) > FEW and isinstance(cases[0], tuple):
        by_first: dict[object, list[T]] = {}
        for case in cases:
            assert isinstance(case, tuple)
            by_first.setdefault(case[0], []).append(case)
        cases = [group[number % len(group)] for number, group in enumerate(by_first.values())]
    # tests of one device that take every nth case begin with the first
    return cases if len(cases) <= FEW else cases[1 :: max(2, len(cases) // SEVERAL)]


def main(cases: Cases[T], wrong: Callable[[str, T], str], title: Callable[[T], str] = str) -> None:
    """Train what the command line asks for, and end with status 1 where anything differs on this rank.

    ``wrong`` trains a case under a layout, as jobs and eagerly, and returns what differs, in words.
    """
    how, *layouts = sys.argv[1:]
    status = 0
    for layout, case in trainings(cases, layouts, how):
        try:
            told = wrong(layout, case)
        except Exception as error:
            told = f"raised {type(error).__name__}: {error}"
        print(f"{layout}, {title(case)}: {f'WRONG, {told}' if told else 'right'}", flush=True)
        status = status or int(bool(told))
    sys.exit(status)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """A context in which new tensors are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def apart(wanted: Iterable[Tensor], found: Iterable[Tensor]) -> float:
    """The largest difference between an element of a tensor and of its counterpart; infinite where one is NaN."""
    gaps = ((a.detach() - b.detach()).abs().max() for a, b in zip(wanted, found, strict=True))
    return max(float(gap.nan_to_num(float("inf"))) for gap in gaps)


def off(difference: float) -> str:
    """In words, how far float64 numbers are apart; nothing where they are equal to the last digits."""
    return "" if difference < EXACT else f"off by {difference}"
