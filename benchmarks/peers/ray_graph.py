"""Ray's compiled graph that passes tensors of 64 bytes to an actor and takes what it answers: suite.py starts it.

A tensor is passed to the actor and a number back, so that it is two hand-overs, where a plan of ours hands on a tensor
and gets its slot back.  What Python does for each of them is within both.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "pipelines"))

from turns import Steps, take_turns

PASSED = 1000  # tensors in a step


def token() -> Tensor:
    """What is passed: float32[16]."""
    return torch.full((16,), 0.5)


class Taker:
    """Takes the first number."""

    def take(self, x: Any) -> float:
        """Of float32[16]."""
        return float(x[0])


def made(name: str) -> Steps:
    """Contenders are called "Ray, 1 in flight" and so on."""
    import ray
    from ray.dag import InputNode

    flight = int(name.split()[1])
    if not ray.is_initialized():
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(num_cpus=2, include_dashboard=False, logging_level="error", configure_logging=False)
    taker = ray.remote(Taker).remote()
    with InputNode() as given:
        graph = taker.take.bind(given)
    compiled = graph.experimental_compile(_max_inflight_executions=flight, _max_buffered_results=flight)
    x: np.ndarray[Any, Any] = token().numpy()  # Ray passes it faster than a tensor of torch

    def steps(count: int) -> float:
        for _ in range(count):
            taken, asked = 0.0, deque[Any]()
            for _ in range(PASSED):
                if len(asked) == flight:
                    taken += ray.get(asked.popleft())
                asked.append(compiled.execute(x))
            while asked:
                taken += ray.get(asked.popleft())
        return taken / PASSED

    return steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    take_turns(sys.argv[1], 0, lambda name: (made(name), dict))
