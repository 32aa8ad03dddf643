"""Show a run while it goes on: a progress bar, a table of ranks, or plain lines."""
