"""The parts of ``benchmarks/gpu.py``; each is a module that is run with a kind of device and prints lines of JSON."""
