"""Record the firings of all ranks on one clock, and report what a run waited for."""
