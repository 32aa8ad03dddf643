"""Measure latency and bandwidth of a send between two ranks of this machine, and print them as JSON.

Run it with ``actorflow run link_probe.py --devices 2``.  It measures the whole path that the tokens of a register take
in a run.  Of each kind of call the shortest counts, which other processes have disturbed least.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

import actorflow as flow

HOPS = 32  # sends in a call; the difference between calls with many and no sends excludes the call itself
SMALL, LARGE = 16, 1 << 20  # elements of a tensor that travels inside a message, and of one that does not
WARM, CALLS = 2, 30  # of each kind: those that are not counted, and those that are
COPIES = 0.1  # of the seconds of a copy within one rank, that a send takes at least: else something disturbed the calls


def sending(elements: int, hops: int) -> Callable[[], object]:
    """A call that sends a tensor back and forth ``hops`` times."""

    @flow.global_function(type="predict", name=f"hops {hops}, {elements} elements")
    def job(x: Tensor) -> Tensor:
        for hop in range(hops + 1):
            with flow.scope.placement("cpu", [hop % 2]):
                x = x + 1
        return x[:1]

    x = torch.zeros(elements)
    return lambda: float(job(x))


def adding(elements: int) -> Callable[[], object]:
    """The addition between two sends, which reads and writes as many bytes as a copy, into memory that is there."""
    x, out = torch.zeros(elements), torch.zeros(elements)
    return lambda: torch.add(x, 1, out=out)


def shortest(calls: list[Callable[[], object]]) -> list[float]:
    """The shortest time of each call, in seconds; they take turns, so that what disturbs one disturbs all."""
    least = [float("inf")] * len(calls)
    for number in range(WARM + CALLS):
        for k, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if number >= WARM:
                least[k] = min(least[k], time.perf_counter() - start)
    return least


def link_of(small: float, large: float, copy: float) -> dict[str, float | str]:
    """The link by the seconds of a small and a large send, and of a copy of the large tensor within one rank.

    ``"latency"`` is in s, ``"bandwidth"`` in bytes/s.  Where they cannot be true, ``"failed"`` says so instead.
    """
    if small <= 0 or large - small < COPIES * copy:
        taken = f"{small:.1e} s for {SMALL} floats and {large:.1e} s for {LARGE:,}"
        return {"failed": f"other processes disturb it: {taken}"}
    return {"latency": small, "bandwidth": 4 * (LARGE - SMALL) / (large - small)}


def main() -> None:
    """Print latency (seconds) and bandwidth (bytes per second), or why there are none, as JSON, on the master."""
    sizes = (SMALL, LARGE)
    calls = [call for n in sizes for call in (sending(n, HOPS), sending(n, 0), adding(n))]
    small, none, add, large, none_large, copy = shortest(calls)
    found = link_of((small - none) / HOPS - add, (large - none_large) / HOPS - copy, copy)
    if flow.env.is_master():
        print(json.dumps(found))


if __name__ == "__main__":
    main()
