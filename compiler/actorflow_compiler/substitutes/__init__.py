"""Replace calls of torch in a trace by other ops with the same results."""
