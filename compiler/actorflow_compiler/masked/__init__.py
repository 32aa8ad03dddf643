"""Trace selections whose size depends on values, such as ``x[mask]``, as whole tensors with a mask of their rows.

``tensor.py`` is what a selection is while a step is captured; ``selecting.py`` makes one; the others define for each
function of torch what it does to one: row by row, a reduction, a loss, or nothing that a plan could do.
"""

from actorflow_compiler.masked.calls import SelectionMode, check_results, selection_mode
from actorflow_compiler.masked.tensor import MaskedRows

__all__ = ["MaskedRows", "SelectionMode", "check_results", "selection_mode"]
