"""How many drawn examples a test runs: a third of them in ``make test``, all in ``make test-all``.

What hypothesis draws is the same in each run, and the first third is as good as any other.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

__all__ = ["fewer", "set_up"]

SHARE = 3  # one in so many
LEAST = 2  # the first one that is drawn is the simplest there is
DRAWN = 100  # examples of a test that says nothing else
_share = 1


def set_up(config: pytest.Config) -> None:
    """Draw fewer where slow tests are left out; before test modules are imported."""
    global _share
    _share = SHARE if "not slow" in config.option.markexpr else 1
    settings.register_profile("actorflow", deadline=None, derandomize=True, max_examples=fewer(DRAWN))
    settings.load_profile("actorflow")


def fewer(number: int) -> int:
    """Of so many examples, those that this run draws."""
    return max(min(number, LEAST), number // _share)
