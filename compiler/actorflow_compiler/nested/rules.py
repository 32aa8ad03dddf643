"""Names of functions of torch go in; a table of what each does to nested tensors comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actorflow_compiler.masked.rules import Rule, named
from actorflow_compiler.nested.tensor import NestedRows, refuse

__all__ = ["RULES", "dim_of_rows", "rule"]

RULES: dict[Any, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for all functions with these names."""

    def enter(function: Rule) -> Rule:
        for name in names:
            found = named(name)
            assert found, name
            RULES.update(dict.fromkeys(found, function))
        return function

    return enter


def dim_of_rows(x: NestedRows, dim: int, name: str) -> int:
    """Where a dim of a nested tensor is among its packed rows.  Raises for the batch dim."""
    dims = x._rows.dim() + 1
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    dim %= dims
    if not dim:
        refuse(x, f"{name} along dim 0", "that mixes sequences of different lengths")
    return dim - 1
