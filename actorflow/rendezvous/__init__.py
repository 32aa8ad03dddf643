"""How a process finds its place in a run: what was asked for, who started it, its address and its device."""
