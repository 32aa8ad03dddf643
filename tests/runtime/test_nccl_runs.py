"""Whole trainings whose communications leave in the order of the plan, on one thread of each rank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from actorflow.devices import Cpu, Device
from actorflow.runtime.collective_order import nccl_calls
from actorflow.session.planes import RankLocation, choose_planes
from actorflow.testing.local_cluster import LocalCluster
from actorflow.transport.memory import MemoryPlane, Switchboard
from actorflow.transport.messages import DataPlane
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Collective, Plan, TensorSpec
from actorflow_compiler.plan.verify import verify
from models import CASES
from runtime.fake_device import Bench, staged
from trained import Layout, plan_of, train, train_planned

STEPS = 3
LAYOUTS = {
    "data": Layout(2),
    "tensor": Layout(2, hints={r".*weight": Split(0)}),
    "pipeline": Layout(2, 4, pipeline=True),
    "data × pipeline": Layout(4, 4, pipeline=True),
    "ZeRO 3": Layout(2, 2, prepare=lambda model: zero(model, 3)),
}


class Meeting(MemoryPlane):
    """A plane on which a send ends when its receive does, and all calls come from one thread; it notes them."""

    def __init__(self, rank: int, board: Switchboard) -> None:
        super().__init__(rank, board, torch.device("cpu"))
        self.made: list[tuple[str, tuple[int, ...]]] = []
        self._thread: int | None = None

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        self._note("send", (self._rank, to))
        super().send(to, tensors)
        self._board.take(((-1,), to, self._rank))

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        self._note("receive", (source, self._rank))
        found = super().receive(source, specs)
        self._board.put(((-1,), self._rank, source), [])
        return found

    def collective(self, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        self._note(comm.kind, comm.ranks)
        return super().collective(comm, tensors, specs)

    def _note(self, kind: str, ranks: tuple[int, ...]) -> None:
        here = threading.get_ident()
        assert self._thread in (None, here), "two threads make calls"
        self._thread = here
        self.made.append((kind, ranks))


def on_gpus(plan: Plan) -> Plan:
    return verify(choose_planes(plan, [RankLocation("here", f"GPU {rank}", nccl=True) for rank in range(plan.world)]))


class Marked:
    """A switchboard on which what is handed over is ready only when its mark has passed, as on a GPU."""

    def __init__(self, board: Switchboard, device: Device) -> None:
        self._board, self._device = board, device

    def put(self, key: Any, parts: Any) -> None:
        self._board.put(key, (parts, self._device.here().mark()))  # type: ignore[arg-type]

    def take(self, key: Any) -> Any:
        parts, mark = self._board.take(key)  # type: ignore[misc]
        here = self._device.here()
        here.wait(mark)  # type: ignore[arg-type]
        here.use(t for tensors in parts for t in tensors)
        return [[t.clone() for t in tensors] for tensors in parts]  # a receive is into memory of its own

    def close(self) -> None:
        self._board.close()


def run(
    name: str, monkeypatch: pytest.MonkeyPatch, device: Callable[[int], Device]
) -> tuple[list[float], dict[str, Tensor]]:
    """Train, all communications over ``Meeting``; check that each rank made the calls of its plan, in order."""
    plan, values, optimizer = plan_of(CASES["mlp"], LAYOUTS[name], 8)
    plan, board = on_gpus(plan), Switchboard()
    planes: dict[int, Meeting] = {}

    def meet(rank: int, on: Device) -> dict[str, DataPlane]:
        return {"nccl": planes.setdefault(rank, Meeting(rank, Marked(board, on)))}  # type: ignore[arg-type]

    monkeypatch.setattr("trained.LocalCluster", functools.partial(LocalCluster, planes=meet, stage=staged))
    monkeypatch.setattr("trained.share", lambda plan, machines: plan)
    found = train(CASES["mlp"], plan, values, optimizer, [8] * STEPS, device)
    for rank, plane in planes.items():
        one = [(call.kind, call.ranks) for call in nccl_calls(plan, rank)]
        assert one
        assert plane.made == one * STEPS
    return found


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("data", "tensor")), "pipeline"])
def test_a_training_makes_the_calls_of_its_plan_in_order_and_gives_the_same_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, state, _ = train_planned(CASES["mlp"], LAYOUTS[name], [8] * STEPS)
    losses, found = run(name, monkeypatch, Cpu)
    assert losses == wanted
    assert {key: value.tolist() for key, value in found.items()} == {key: v.tolist() for key, v in state.items()}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", ["data × pipeline", "ZeRO 3"])
def test_devices_that_run_ahead_make_the_same_calls_and_read_nothing_early(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, state, _ = train_planned(CASES["mlp"], LAYOUTS[name], [8] * STEPS)
    bench = Bench(seed=3)
    losses, found = run(name, monkeypatch, bench.device)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
    assert not bench.wrongs
    assert not bench.syncs
