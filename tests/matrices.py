"""Thin tests of many parameters for `make test`: mark as slow all but a few representatives of each matrix.

A matrix is a parametrised test with the marker ``matrix``.  Its representatives cover each value of each parameter at
least once, or ``times`` times, and spread over the values of the others; ``every=n`` keeps only every nth of them.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest

__all__ = ["representatives", "thin"]


def thin(items: list[pytest.Item]) -> None:
    """Mark as slow what a matrix has beside its representatives."""
    matrices: dict[tuple[object, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow"):
            continue  # a slow one would represent its values, and not be run
        if item.get_closest_marker("matrix"):
            matrices[item.parent, item.originalname].append(item)
    for matrix in matrices.values():
        marker = matrix[0].get_closest_marker("matrix")
        assert marker is not None
        chosen = representatives([item.callspec.params for item in matrix], marker.kwargs.get("times", 1))
        kept = set(chosen[:: marker.kwargs.get("every", 1)])
        for number, item in enumerate(matrix):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def representatives(matrix: Sequence[Mapping[str, object]], times: int = 1) -> list[int]:
    """The numbers of few of the tests, given by their parameters, among which each value is ``times`` times.

    The next one is always the first of those that bring the most missing values, have the least in common with any
    that is kept, and whose values are used least.  A value of fewer than ``times`` tests is in all of them.
    """
    of = [frozenset((name, _value(x)) for name, x in params.items()) for params in matrix]
    used = Counter[tuple[str, object]]()
    shared = [0] * len(of)  # values that each has in common with the one of those kept that is most like it, as of …
    compared = [0] * len(of)  # … so many of those kept
    kept: list[int] = []
    for _ in range(times):
        left = [number for number in range(len(of)) if number not in kept]
        missing = frozenset[tuple[str, object]]().union(*(of[number] for number in left))

        def rank(n: int, missing: frozenset[tuple[str, object]]) -> tuple[int, int, int, int]:
            shared[n] = max([shared[n], *(len(of[n] & of[k]) for k in kept[compared[n] :])])
            compared[n] = len(kept)
            return -len(of[n] & missing), shared[n], sum(used[value] for value in of[n]), n

        ranks = [rank(number, missing) for number in left]  # a heap; what is kept makes no rank lower
        heapq.heapify(ranks)
        while missing:
            if (now := rank(ranks[0][-1], missing)) != ranks[0]:
                heapq.heapreplace(ranks, now)
                continue
            best = heapq.heappop(ranks)[-1]
            kept.append(best)
            missing -= of[best]
            used.update(of[best])
    return sorted(kept)


def _value(x: object) -> object:
    """What tells one value of a parameter from another, which ``callspec.indices`` do not: they number combinations."""
    return (type(x), x) if isinstance(x, str | int | float) else id(x)
