"""Ops that torch does not have, and layouts that some of torch's kernels require of operands."""
