"""Start the ranks of a node or of a Ray cluster, watch them, and gather their output."""
