"""Measure latency and bandwidth of a send between two ranks of this machine, and print them as JSON.

Run it with ``actorflow run link_probe.py --devices 2``.  It measures the whole path that the tokens of a register take
in a run.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from torch import Tensor

import actorflow as flow

HOPS = 32  # sends in a call; the difference between calls with many and no sends excludes the call itself
SMALL, LARGE = 16, 1 << 20  # elements of a tensor that travels inside a message, and of one that does not
CALLS = 9


def measure(elements: int, hops: int) -> float:
    """The median time of a call that sends a tensor back and forth ``hops`` times, in seconds."""

    @flow.global_function(type="predict", name=f"hops {hops}, {elements} elements")
    def job(x: Tensor) -> Tensor:
        for hop in range(hops + 1):
            with flow.scope.placement("cpu", [hop % 2]):
                x = x + 1
        return x[:1]

    x = torch.zeros(elements)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        float(job(x))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def added(elements: int) -> float:
    """The median time of the addition between two sends, in seconds."""
    x, times = torch.zeros(elements), []
    for _ in range(CALLS):
        start = time.perf_counter()
        torch.add(x, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print latency (seconds) and bandwidth (bytes per second) as one line of JSON, on the master."""
    hop = {n: (measure(n, HOPS) - measure(n, 0)) / HOPS - added(n) for n in (SMALL, LARGE)}
    bandwidth = 4 * (LARGE - SMALL) / max(hop[LARGE] - hop[SMALL], 1e-9)
    if flow.env.is_master():
        print(json.dumps({"latency": max(hop[SMALL], 1e-9), "bandwidth": bandwidth}))


if __name__ == "__main__":
    main()
