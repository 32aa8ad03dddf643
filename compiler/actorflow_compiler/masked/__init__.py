"""Selections whose size depends on values, such as ``x[mask]``, go in; whole tensors, and which rows count, come out.

``tensor.py`` is what a selection is while a step is captured; ``selecting.py`` makes one; the others say of each
function of torch what it is over one: row by row, a reduction, a loss, or nothing that a plan could do.
"""

from actorflow_compiler.masked.calls import SelectionMode, check_results, selection_mode
from actorflow_compiler.masked.tensor import MaskedRows

__all__ = ["MaskedRows", "SelectionMode", "check_results", "selection_mode"]
