"""Run a function as a job, on any number of devices and micro-batches, with all ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.script_state.search import find_state
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.hints.hints import resolve
from actorflow_scheduler.schedule import schedule

LAYOUTS = {"three devices": (3, 1), "four micro-batches": (1, 4), "both": (2, 2)}  # (devices, micro-batches)


def drawn(
    function: Callable[..., Any], *inputs: Tensor, world: int = 1, micro_batches: int = 1, calls: Sequence[int] = (0,)
) -> list[Tensor]:
    """What the function returns, for each of the calls; ``inputs`` are batches."""

    def step(tensors: list[Tensor]) -> list[Tensor]:
        made = function(*tensors)
        return list(made) if isinstance(made, tuple) else [made]

    state = find_state(function)
    arguments = [TensorArgument(f"x{i}", tuple(x.shape), x.dtype, True) for i, x in enumerate(inputs)]
    laid = compile_step(
        StepRequest(
            UserStep("drawn", step, arguments, state, train=True),
            TargetDevices(world),
            Preferences(resolve(state.modules), micro_batches),
        )
    )
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()}
    with LocalCluster(schedule(laid.cut()), variables=values) as cluster:
        given = {f"x{i}": x for i, x in enumerate(inputs)}
        return [result for number in calls for result in cluster.run(given, {SEED: number})]


def parts_of(numbers: Tensor, bins: int = 64) -> Tensor:
    """How many of numbers in [0, 1) fall into each of equal bins, as deviations in units of their standard error."""
    counts = torch.histc(numbers.double(), bins, 0, 1)
    expected = numbers.numel() / bins
    return (counts - expected) / (expected * (1 - 1 / bins)) ** 0.5
