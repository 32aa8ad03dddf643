"""Trace selections whose size depends on values, such as ``x[mask]``, as whole tensors with a mask of their rows.

``tensor.py`` defines ``MaskedRows``, which stands for a selection while a step is captured.  ``selecting.py`` makes
these.  The other files have rules for functions of torch that take selected rows: row by row, as a reduction or as a
loss.  Other functions are refused.
"""

from actorflow_compiler.masked.calls import SelectionMode, check_results, selection_mode
from actorflow_compiler.masked.tensor import MaskedRows

__all__ = ["MaskedRows", "SelectionMode", "check_results", "selection_mode"]
