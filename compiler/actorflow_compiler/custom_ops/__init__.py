"""Ops that torch does not have, and which kernels depend on memory layout."""
