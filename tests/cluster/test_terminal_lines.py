"""Lines of actorflow on the terminal stay whole beside those of other threads and processes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from actorflow.support.terminal import say


def test_a_line_and_its_end_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: written.append("flushed")))
    say("waiting for rank 1")
    assert written == ["actorflow: waiting for rank 1\n", "flushed"]


def test_where_standard_error_is_closed_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    say("waiting for rank 1")
