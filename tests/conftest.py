"""What all tests share: one thread, the same random numbers, a process that is alone, no GPU test without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from actorflow.runtime import cluster, start

settings.register_profile("actorflow", deadline=None, derandomize=True)
settings.load_profile("actorflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tests run several ranks at a time, on few cores


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # what a run finds out about ops says nothing about the next one
        patch.setenv("ACTORFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _alone_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_current", cluster._current)  # `actorflow plan` pretends another one, for good
    monkeypatch.setattr(start, "_asked", start.Asked())
    monkeypatch.setattr(start, "_settled", False)
