"""A process's calls of jobs: which plan holds, compiling one, issuing the call, what becomes of it."""
