"""Run the body of a source on whole arguments of the call, or on the rows of them alone that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorflow.runtime.bodies.kernels import Kernel, Kernels
from actorflow_compiler.plan.plan import Body
from actorflow_compiler.plan.source_rows import over_rows, rows_read

__all__ = ["SourceKernel"]


class SourceKernel:
    """The kernels of one source: for each set of arguments of which it gets only rows, one."""

    def __init__(self, kernels: Kernels, body: Body, names: Sequence[str]) -> None:
        self._kernels, self._body, self._names = kernels, body, names
        self._taken = {at: rows for at, rows in rows_read(body).items() if rows is not None}
        self._made: dict[frozenset[str], Kernel] = {}

    def __call__(self, operands: list[Any]) -> Sequence[Any]:
        """The outputs, of the operands and, behind them, the names of those of which only the rows are there."""
        by_rows: frozenset[str] = operands.pop()
        kernel = self._made.get(by_rows)
        if kernel is None:
            alone = {at: rows for at, rows in self._taken.items() if self._names[at] in by_rows}
            kernel = self._made[by_rows] = self._kernels.kernel(over_rows(self._body, alone))
        return kernel(operands)
