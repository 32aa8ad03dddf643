"""Which placement and which pipeline stage each op has."""
