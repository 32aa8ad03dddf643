"""How many messages are drawn for each door, from which seed, and what became of them."""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator

import psutil
import pytest

from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalReason
from fewer import fewer

WARM = 0.2  # of the messages come before memory is measured
SOME = 150  # messages, unless it is said how many
MANY = 5000  # messages from which on memory is measured
ROOM = 16 << 20  # bytes by which a process may grow, whatever the number of messages


class Tally:
    """Counts what became of messages."""

    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.reasons: Counter[RefusalReason] = Counter()
        self.passed = 0  # messages that a rank could have sent
        self._start = 0
        self._before: dict[str, dict[RefusalReason, int]] = {}  # door → its counts when it was first asked

    @property
    def count(self) -> int:
        return sum(self.reasons.values())

    def add(self, refused: MessageRefused | None) -> None:
        if refused is None:
            self.passed += 1
            return
        self.reasons[refused.reason] += 1
        self.measure(self.count)

    def measure(self, refused: int) -> None:
        """So many have been refused: memory is measured from when they are enough for all to be warm."""
        if not self._start and refused >= WARM * self.messages:
            self._start = _memory()

    def refused_at(self, door: str) -> int:
        """How many messages a door of this process has refused in this test, as it counts them itself."""
        now = REFUSALS.of(door)
        self._before.setdefault(door, now)
        for reason, count in now.items():
            self.reasons[reason] = count - self._before[door].get(reason, 0)
        self.measure(self.count)
        return self.count

    def check(self) -> None:
        """All were refused, and memory is flat."""
        assert self.count >= self.messages
        if self.messages >= MANY:
            assert self._start, "memory was not measured"
            grown = _memory() - self._start
            assert grown < ROOM, f"{self.count} messages have left {grown / 1e6:.1f} MB"


def _memory() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed counts no more
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.fixture
def messages(request: pytest.FixtureRequest) -> int:
    number: int = request.config.getoption("--messages")
    return number or fewer(SOME)


@pytest.fixture
def drawn_from(request: pytest.FixtureRequest) -> int:
    number: int = request.config.getoption("--from-seed")
    return number


@pytest.fixture
def tally(messages: int, request: pytest.FixtureRequest) -> Iterator[Tally]:
    made = Tally(messages)
    yield made
    each = ", ".join(f"{reason} {count}" for reason, count in sorted(made.reasons.items()))
    print(f"\n{request.node.name}: {made.count} refused ({each}); {made.passed} that a rank could have sent")


Named = Callable[[], Tally]
