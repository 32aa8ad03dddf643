"""While a step is compiled Python does not look through all its objects for garbage; before and after it does."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import StepToTrace, TensorArgument, capture
from actorflow_compiler.core import garbage_collection
from actorflow_compiler.core.garbage_collection import (
    collect_if_grown,
    forgotten_at_the_end,
    instances,
    kept_while_compiling,
    resident_bytes,
    young_only,
)
from actorflow_compiler.values.checks import BranchExplorer
from actorflow_compiler.values.gradients import GradientTracker


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_no_full_collection_falls_into_a_body_and_young_ones_do() -> None:
    full: list[int] = []

    def saw(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            full.append(info["generation"])

    gc.set_threshold(10, 1, 1)
    with young_only():
        gc.callbacks.append(saw)
        try:
            kept = [[[]] for _ in range(100_000)]
        finally:
            gc.callbacks.remove(saw)
    assert full
    assert max(full) == 1
    assert len(kept) == 100_000
    assert gc.get_threshold() == (10, 1, 1)


def test_the_last_body_to_end_restores_what_was_whatever_the_order_and_the_thread() -> None:
    first, second = young_only(), young_only()
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 10
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_looked_for_where_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resident_bytes() > 1 << 20
    with young_only():
        one = Cycle()
        for _ in range(2):  # it is old then
            gc.collect(1)
        left = weakref.ref(one)
        del one
        before, most = 1000 << 20, garbage_collection.GROWN
        # what else there is in this process comes and goes
        monkeypatch.setattr(garbage_collection, "resident_bytes", lambda: before + most * (left() is not None))
        assert collect_if_grown(before) == before
        assert left() is not None
        assert collect_if_grown(before - 1) == before
        assert left() is None


def test_what_a_script_sets_meanwhile_stays() -> None:
    with young_only():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)


def test_other_threads_go_on_making_tuples_while_objects_are_looked_for() -> None:
    """A tuple that is being made may not be held by anybody else, as whoever asks for all objects does."""
    many: list[list[int]] = [[] for _ in range(300_000)]  # so that it takes a while
    failed: list[BaseException] = []
    ended = threading.Event()

    def fill() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(30))
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    mine, interval = torch.ones(2), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        found = [instances(torch.Tensor) for _ in range(60)]
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        for thread in threads:
            thread.join()
    assert all(any(one is mine for one in each) for each in found)
    assert failed == []
    assert len(many) == 300_000


def test_a_step_that_fails_leaves_the_collector_as_it_was() -> None:
    @flow.global_function(type="predict")
    def step(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"meanwhile {gc.get_threshold()[2] > 10}")

    with pytest.raises(flow.ActorflowError, match="meanwhile True"):
        step(torch.ones(2, 2))
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("explores", [False, True])
def test_what_was_captured_is_gone_as_soon_as_nothing_else_holds_it(explores: bool) -> None:
    def captured() -> list[weakref.ref[Any]]:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            if explores and loss > 1e6:
                raise ValueError("diverged")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        state = find_state(step, model=model, optimizer=optimizer)
        argument = TensorArgument("x", (3, 4), torch.float32, True)
        checks = BranchExplorer() if explores else None
        found = capture(StepToTrace(lambda tensors: [step(*tensors)], [argument], state, True, checks=checks))
        assert len(found.checks) == explores
        return [weakref.ref(thing) for thing in (model, model.weight, optimizer)]

    gc.disable()
    try:
        assert [thing() for thing in captured()] == [None, None, None]
    finally:
        gc.enable()


def test_nothing_is_left_of_the_traces_of_a_job() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    @flow.global_function(type="train")
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    gc.collect()
    gc.disable()
    try:
        step(torch.randn(3, 4)).item()
        assert instances(GradientTracker) == []
    finally:
        gc.enable()


def test_what_is_kept_while_a_step_is_compiled_is_forgotten_then_also_after_an_error() -> None:
    class Found:
        pass

    @kept_while_compiling(maxsize=8)
    def find(number: int) -> Found:
        return Found()

    with forgotten_at_the_end():
        there = weakref.ref(find(1))
        assert find(1) is there()
    assert there() is None
    there = weakref.ref(find(1))
    with pytest.raises(ValueError, match="invalid literal"), forgotten_at_the_end():
        int("no plan")
    assert there() is None


def test_few_results_of_compiling_stay_for_the_next_step_and_many_are_forgotten() -> None:
    made = []

    @kept_while_compiling(maxsize=8, stay=2)
    def find(number: int) -> int:
        made.append(number)
        return number

    with forgotten_at_the_end():
        assert [find(1), find(2), find(1)] == [1, 2, 1]
    assert (find(1), made) == (1, [1, 2])
    with forgotten_at_the_end():
        find(3)
        assert (find(2), made) == (2, [1, 2, 3])  # not while a step is compiled
    find(3)
    assert made == [1, 2, 3, 3]
