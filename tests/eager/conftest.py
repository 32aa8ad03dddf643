"""Two and four ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actorflow.eager.threads import Threads


@pytest.fixture(scope="session")
def two() -> Iterator[Threads]:
    with Threads(2) as made:
        yield made


@pytest.fixture(scope="session")
def four() -> Iterator[Threads]:
    with Threads(4) as made:
        yield made
