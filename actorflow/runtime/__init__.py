"""The runtime of one rank: the worker, which executes plans by firing actors and exchanges messages with its peers."""
