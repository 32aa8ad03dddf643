"""Tensors that are fed to jobs from the wrong device."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import actorflow as flow
from actorflow.script_state.arguments import CallArguments, flatten
from actorflow.session.input_devices import InputDevices
from actorflow_compiler.core.errors import CallError


class At:
    """Looks like a tensor that lies on a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def arguments(*devices: str) -> CallArguments:
    def job(x: Any, y: Any = None) -> None: ...

    made = flatten("step", inspect.signature(job), tuple(torch.zeros(2) for _ in devices), {})
    return replace(made, tensors=tuple(map(At, devices)))  # type: ignore[arg-type]


def look(fed: InputDevices, device: str, *devices: str, needed: tuple[str, ...] = ("x", "y")) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fed.look("step", arguments(*devices), needed, torch.device(device))
    return [str(one.message) for one in caught]


def test_a_tensor_on_another_device_is_told_of_once():
    fed = InputDevices(0, 1)
    (told,) = look(fed, "cuda:1", "cuda:0", "cuda:1")
    assert "step was called with x on cuda:0, and this rank works on cuda:1" in told
    assert look(fed, "cuda:1", "cuda:0", "cuda:1") == []
    assert len(look(fed, "cuda:1", "cuda:0", "cuda:0")) == 1  # y
    assert len(look(InputDevices(0, 1), "cpu", "cuda:0")) == 1


def test_a_tensor_on_the_cpu_is_where_batches_come_from():
    assert look(InputDevices(0, 1), "cuda:0", "cpu", "cuda:0") == []
    assert look(InputDevices(0, 1), "cuda", "cuda:0") == []
    assert look(InputDevices(0, 1), "cuda:1", "cuda:0", needed=()) == []  # the plan does not use it on this rank


def test_large_batches_that_many_ranks_load_whole_are_told_of_once(capsys: pytest.CaptureFixture[str]):
    def job(x: Any) -> None: ...

    def told(rank: int, world: int, rows: int) -> int:
        given = flatten("step", inspect.signature(job), (torch.zeros(rows, 1024),), {})
        devices = InputDevices(rank, world)
        for _ in range(2):
            devices.look("step", given, ("x",), torch.device("cpu"))
        return capsys.readouterr().err.count("a batch of 20.0 MiB, which each of 8 ranks has loaded whole")

    assert told(0, 8, 5120) == 1
    assert told(0, 8, 1024) == told(1, 8, 5120) == told(0, 4, 5120) == 0


def test_a_tensor_without_memory_is_refused():
    weight = torch.nn.Parameter(torch.ones(3))

    @flow.global_function(type="predict")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    with pytest.raises(CallError, match="x on the meta device, which has no values"):
        scaled(torch.empty(2, 3, device="meta"))
