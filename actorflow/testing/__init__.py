"""Run ranks as threads of one process, for tests, benchmarks and experiments."""
