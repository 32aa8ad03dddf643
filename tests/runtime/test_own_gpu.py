"""A rank takes its own GPU: at once where it was told to compute there, else when something first uses CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorflow.launch.entry import _seed
from actorflow.rendezvous import device_assignment
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError


@dataclass
class Gpus:
    """Two GPUs that torch is made to believe in, and what is asked of them."""

    taken: list[str] = field(default_factory=list)
    waiting: list[tuple[Callable[[], object], Any]] = field(default_factory=list)
    broken: str = ""

    def take(self, device: torch.device) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.taken.append(str(device))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus()
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # of the other tests
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.take)
    monkeypatch.setattr(torch.cuda, "_queued_calls", found.waiting)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(device_assignment, "_kinds", ())
    return found


def rank(kind: str, devices: int = 2) -> Settings:
    return Settings(rank=1, local_rank=1, world=devices, devices=devices, device_type=kind)


def test_a_rank_that_was_told_to_compute_on_cuda_takes_its_gpu_at_once(gpus: Gpus) -> None:
    _seed(rank("cuda"))
    assert gpus.taken == ["cuda:1"]
    assert not gpus.waiting


def test_where_nothing_was_said_a_rank_touches_no_gpu_before_somebody_uses_cuda(gpus: Gpus) -> None:
    gpus.broken = "CUDA error: all CUDA-capable devices are busy or unavailable"
    _seed(rank(""))
    ((later, _),) = gpus.waiting
    gpus.broken = ""
    later()
    assert gpus.taken == ["cuda:1"]


def test_a_rank_that_first_uses_cuda_for_a_job_takes_the_gpu_that_the_job_gives_it_and_no_other(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(rank=2, local_rank=2, world=3, devices=3)
    _seed(settings)
    ((later, _),) = gpus.waiting

    def take(device: torch.device) -> None:
        if gpus.waiting:
            gpus.waiting.clear()
            later()  # torch starts CUDA before it sets the device
        gpus.take(device)

    monkeypatch.setattr(torch.cuda, "set_device", take)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    assert device_assignment.look_at_devices("cuda", settings, ("cuda", "cpu", "cuda")).index == 1
    assert gpus.taken == ["cuda:1", "cuda:1"]


@pytest.mark.parametrize("settings", [rank("cpu"), rank("", devices=1)], ids=["on CPUs", "alone"])
def test_who_needs_no_gpu_of_its_own_asks_for_none(gpus: Gpus, settings: Settings) -> None:
    _seed(settings)
    assert not gpus.taken
    assert not gpus.waiting


def test_a_gpu_that_cannot_be_used_is_named_with_torchs_words_and_what_to_do(gpus: Gpus) -> None:
    gpus.broken = "CUDA error: all CUDA-capable devices are busy or unavailable"
    message = r"rank 1 cannot use cuda:1 of .*: CUDA error: all CUDA-capable .*\n.*nvidia-smi.*--device-type cpu"
    with pytest.raises(ClusterError, match=message):
        _seed(rank("cuda"))
    with pytest.raises(ClusterError, match=message):
        device_assignment.look_at_devices("cuda", rank(""), ("cuda", "cuda"))
