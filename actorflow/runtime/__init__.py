"""One process of a run: the worker that fires actors and what connects it to its peers."""
