"""Thin tests of many parameters for `make test`: mark as slow all but a few representatives of each matrix.

A matrix is a parametrised test with the marker ``matrix``.  The representatives cover each value of each parameter at
least once; ``every=n`` keeps only every nth of them.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

__all__ = ["thin"]


def thin(items: list[pytest.Item]) -> None:
    """Mark as slow what a matrix has beside its representatives."""
    matrices: dict[tuple[object, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            matrices[item.parent, item.originalname].append(item)
    for matrix in matrices.values():
        marker = matrix[0].get_closest_marker("matrix")
        assert marker is not None
        kept = _each_choice(matrix)[:: marker.kwargs.get("every", 1)]
        for item in matrix:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _each_choice(matrix: list[pytest.Function]) -> list[pytest.Function]:
    """Few of the tests, of which each value of each parameter is in one: the first that bring the most new values."""
    of = {item: frozenset(item.callspec.indices.items()) for item in matrix}
    missing = frozenset[tuple[str, int]]().union(*of.values())
    kept = []
    while missing:
        best = max(matrix, key=lambda item: len(of[item] & missing))  # the first of several
        kept.append(best)
        missing -= of[best]
    return sorted(kept, key=matrix.index)
