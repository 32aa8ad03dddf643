"""Trace nested tensors whose sequences have constant lengths, as packed rows and these lengths.

``tensor.py`` defines ``NestedRows``, which stands for a nested tensor while a step is captured.  ``construction.py``
makes these.  The other files have rules that compute functions of torch over packed rows.
"""

from actorflow_compiler.nested.calls import call
from actorflow_compiler.nested.construction import replaced_nested_tensors
from actorflow_compiler.nested.tensor import NestedRows, check_results, dispatchers

__all__ = ["NestedRows", "check_results", "replaced_nested_tensors"]

dispatchers.append(call)
