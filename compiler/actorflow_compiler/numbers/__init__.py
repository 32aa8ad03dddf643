"""Python numbers that calls may change, and ``x.item()`` in arithmetic, as values of the graph."""
