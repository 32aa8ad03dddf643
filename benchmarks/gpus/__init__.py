"""The parts of ``benchmarks/gpu.py``: modules that are run with a device type and print lines of JSON."""
