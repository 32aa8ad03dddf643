"""Graph rewrites before layouts are chosen: decompositions, and micro-batches."""
