"""Measure latency and bandwidth of sends and collectives of two ranks of this machine, and print them as JSON.

Run it with ``actorflow run link_probe.py --devices 2``.  It measures the whole path that the tokens of a register take
in a run.  Of each kind of call the shortest counts, which other processes have disturbed least.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import actorflow as flow

HOPS, SUMS = 32, 6  # sends or sums in a call; the difference between calls with many and none excludes the call itself
SMALL, LARGE = 16, 1 << 20  # elements of a tensor that travels inside a message, and of one that does not
LONG = 7 << 20  # elements of a tensor that caches hold little of, as of gradients when they are added up
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


def summing(elements: int, hops: int) -> Callable[[], object]:
    """A call that adds up rows of two ranks ``hops`` times, in all-reduces; each is multiplied with the sum before."""
    ranks, rows, whole = flow.placement("cpu", [0, 1]), flow.sbp.split(0), flow.sbp.broadcast

    @flow.global_function(type="predict", name=f"sums {hops}, {elements} elements")
    def job(x: Any) -> Any:  # torch's own Tensor has no to_global
        x = y = x.to_global(ranks, rows)
        for _ in range(hops):
            y = x * y.sum(0).to_global(ranks, whole)
        return y[:, :1].to_global(ranks, whole)

    x = torch.ones(2, elements)
    return lambda: job(x).cpu()


def multiplying(elements: int) -> Callable[[], object]:
    """What one rank computes between two such sums, into memory that is there."""
    x, total, out = torch.ones(1, elements), torch.empty(elements), torch.empty(1, elements)
    return lambda: torch.mul(x, torch.sum(x, 0, out=total), out=out)


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


def link_of(small: float, large: float, copy: float, elements: int = LARGE) -> dict[str, float | str]:
    """The link by the seconds of a small send or sum, one of so many elements, and a copy of these within one rank.

    ``"latency_s"`` is in s, ``"bytes_per_s"`` in bytes/s.  Where they cannot be true, ``"failed"`` says so instead.
    """
    if small <= 0 or large - small < COPIES * copy:
        taken = f"{small:.1e} s for {SMALL} floats and {large:.1e} s for {elements:,}"
        return {"failed": f"other processes disturb it: {taken}"}
    return {"latency_s": small, "bytes_per_s": 4 * (elements - SMALL) / (large - small)}


def main() -> None:
    """Print the links of sends and of collectives, or why there are none, as JSON, on the master.

    In an all-reduce of two ranks, each moves as many bytes as in a send.
    """
    found = {}
    for name, communicating, computing, hops, size in (
        ("sends", sending, adding, HOPS, LARGE), ("collectives", summing, multiplying, SUMS, LONG),
    ):  # fmt: skip
        calls = [call for n in (SMALL, size) for call in (communicating(n, hops), communicating(n, 0), computing(n))]
        small, none, alone, large, none_large, copy = shortest(calls)
        found[name] = link_of((small - none) / hops - alone, (large - none_large) / hops - copy, copy, size)
    if flow.env.is_master():
        print(json.dumps(found))


if __name__ == "__main__":
    main()
