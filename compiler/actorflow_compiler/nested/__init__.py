"""Trace nested tensors of constant lengths as packed rows and those lengths.

``tensor.py`` is what a nested tensor is while a step is captured; ``construction.py`` makes one; the others define for
each function of torch what it does over packed rows.
"""

from actorflow_compiler.nested.calls import call
from actorflow_compiler.nested.construction import replaced_nested_tensors
from actorflow_compiler.nested.tensor import NestedRows, check_results, dispatchers

__all__ = ["NestedRows", "check_results", "replaced_nested_tensors"]

dispatchers.append(call)
