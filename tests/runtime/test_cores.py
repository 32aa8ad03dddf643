"""Which cores a rank's compute thread runs on."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from actorflow.rendezvous.settings import cores_of
from actorflow.runtime import compute
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.worker import Worker
from actorflow.testing.local_cluster import MemoryTransport
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput
from runtime.fake_device import Bench, FakeDevice
from runtime.programs import V0, Program, body, on, spec, step


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
def test_every_core_belongs_to_one_rank() -> None:
    for devices in (2, 3, 4, 8):
        shares = [cores_of(rank, devices) for rank in range(devices)]
        assert sorted(core for share in shares for core in share) == list(range(8))
        assert min(map(len, shares)) == 8 // devices


@pytest.mark.usefixtures("eight_cores")
def test_a_rank_that_is_alone_or_one_of_too_many_is_left_to_the_kernel() -> None:
    assert cores_of(0, 1) == frozenset()
    assert cores_of(0, 9) == frozenset()


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "5"), ("OMP_PROC_BIND", "false"), ("GOMP_CPU_AFFINITY", "0-7")]
)
def test_what_users_say_of_threads_goes_before(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert cores_of(0, 2) == frozenset()


def test_a_worker_computes_on_the_cores_that_it_was_given_and_leaves_other_threads_alone() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    p = Program(name="single")
    (x,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    (y,) = p.actor("F", x, body=body(1, step("actorflow.cores", V0, outs=[1]), outputs=[1]), out=[spec(1)])
    p.result(y, on(0), (B,), (1,))
    seen: list[set[int]] = []

    def cores(x: Tensor) -> Tensor:
        seen.append(os.sched_getaffinity(0))
        return x + 1

    worker = Worker(0, MemoryTransport(0, []), gated=False, library={"cores": cores}, cores={core}, planes={})
    try:
        worker.install(0, p.plan())
        worker.issue(0, {"x": torch.zeros(1)}).wait(100)
    finally:
        worker.close()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("own", "ahead"), [(False, False), (True, False), (True, True)])
def test_only_a_worker_on_cores_of_its_own_whose_device_waits_for_it_looks_for_messages_before_it_sleeps(
    monkeypatch: pytest.MonkeyPatch, own: bool, ahead: bool
) -> None:
    patience: list[float] = []

    def made(seconds: float) -> Inbox:
        patience.append(seconds)
        return Inbox(seconds)

    monkeypatch.setattr(compute, "Inbox", made)
    device = FakeDevice(Bench(0), 0) if ahead else "cpu"
    cores = os.sched_getaffinity(0) if own else set()
    Worker(0, MemoryTransport(0, []), {}, device, gated=False, cores=cores).close()
    assert [seconds > 0 for seconds in patience] == [own and not ahead]
