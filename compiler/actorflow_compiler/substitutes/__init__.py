"""Calls of torch that a trace writes in other ops, with the same results."""
