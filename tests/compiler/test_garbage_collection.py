"""While a step is compiled Python does not look through all its objects for garbage; before and after it does."""

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import actorflow as flow
from actorflow_compiler.core.garbage_collection import instances, young_only


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
