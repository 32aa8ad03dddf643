"""What all tests share: one thread for each process, the same random numbers, and no GPU test without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

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


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
