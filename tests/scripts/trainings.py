"""Train each case of a script under layouts, as a job and eagerly, and print a line for each that says what differs.

    actorflow run tests/scripts/NAME.py --devices 2 -- every LAYOUT …

trains every case under every layout; ``in turn`` instead of ``every`` trains each case once, under another layout than
its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["EVERY", "IN_TURN", "Cases", "main", "off", "trainings"]

T = TypeVar("T")
Cases = Callable[[str], Sequence[T]]  # those of a layout
EVERY, IN_TURN = "every", "in turn"
EXACT = 1e-9  # float64 to the last digits


def trainings(cases: Cases[T], layouts: Sequence[str], how: str) -> list[tuple[str, T]]:
    """Layouts and cases, in the order in which they are trained."""
    of = {layout: list(cases(layout)) for layout in layouts}
    if how == EVERY:
        return [(layout, case) for layout in layouts for case in of[layout]]
    assert how == IN_TURN, how
    found = []
    for number, case in enumerate(dict.fromkeys(case for layout in layouts for case in of[layout])):
        first = number % len(layouts)
        found.append((next(layout for layout in [*layouts[first:], *layouts[:first]] if case in of[layout]), case))
    return sorted(found, key=lambda training: layouts.index(training[0]))


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


def off(difference: float) -> str:
    """In words, how far float64 numbers are apart; nothing where they are equal to the last digits."""
    return "" if difference < EXACT else f"off by {difference}"
