"""The logical graph, which each compiler pass takes and returns."""
