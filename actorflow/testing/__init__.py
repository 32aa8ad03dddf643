"""Ranks as threads of one process, for tests, benchmarks and trying things out without starting processes."""
