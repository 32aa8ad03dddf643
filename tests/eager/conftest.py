"""Two and four ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actorflow.testing.thread_ranks import ThreadRanks


@pytest.fixture(scope="session")
def two() -> Iterator[ThreadRanks]:
    with ThreadRanks(2) as made:
        yield made


@pytest.fixture(scope="session")
def four() -> Iterator[ThreadRanks]:
    with ThreadRanks(4) as made:
        yield made
