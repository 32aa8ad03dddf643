"""Ranks in this process, and launchers in others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actorflow.control import join
from actorflow.rendezvous.settings import Settings
from cluster.ranks import LIMIT, Ranks, free_port
from cluster.runs import Run


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """No ranks yet."""
    made = Ranks()
    yield made
    made.close()


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Settings of one rank after another of one run on this host."""
    common = Settings(master_port=free_port(), token="secret", join_timeout=LIMIT, script=__file__)

    def of(rank: int, world: int, **changes: Any) -> Settings:
        changes = {"devices": world, **changes}
        return replace(common, rank=rank, local_rank=rank, world=world, **changes)

    return of


@pytest.fixture
def joined(ranks: Ranks, settings: Callable[..., Settings]) -> Callable[..., Ranks]:
    """A run of some ranks that have joined."""

    def of(world: int, **changes: Any) -> Ranks:
        for rank in range(world):
            ranks.make(settings(rank, world, **changes))
        assert ranks.each(lambda cluster: cluster.join()) == [None] * world
        return ranks

    return of


@pytest.fixture
def give_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What ends a master's wait for missing ranks, as if ``join_timeout`` had passed: for them time is turned on."""
    turned = [0.0]
    monkeypatch.setattr(join, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + turned[0]))
    return lambda: turned.append(turned.pop() + LIMIT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a launcher: ``start(text of the script, "--devices", "2", …)``; its files are in the test's folder."""
    runs: list[Run] = []

    def begin(text: str, *arguments: str, env: dict[str, str] | None = None, python: str = sys.executable) -> Run:
        script = tmp_path / "script.py"
        script.write_text(text)
        logs = ("--log-dir", str(tmp_path / f"logs{len(runs)}"))
        runs.append(Run(tmp_path, script, *logs, *arguments, env=env, python=python))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()  # its ranks die with it
            run.process.wait(LIMIT)
