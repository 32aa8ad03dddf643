"""What a choice of layouts costs, in seconds: bytes moved, work done more than once, memory held."""

from __future__ import annotations

BANDWIDTH = 2e9  # bytes/s between two devices
LATENCY = 1e-4  # s for each communication that an op waits for
GROUPED = 1e-5  # s for each that travels in a bucket with others: gradients, new values of variables, gathered weights
LOCAL = 1e-7  # s for a layout that is reached without communication
FORBIDDEN = 1.0  # s for what a way of working excludes: another cut of the batch, a weight gathered under "tensor"
REDUNDANT = 1e-6  # s for each floating-point operation done more than once: far above its price, a last resort
BYTE_HELD = 1e-14  # s for each byte of a copy that could have been a part; only breaks ties
FREE_KINDS = frozenset({"batch", "argument", "constant", "scalar", "piece"})  # every rank has all of these
