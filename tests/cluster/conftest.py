"""Clusters whose ranks are threads of this process, and runs of the real launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from actorflow.runtime.cluster import Cluster
from actorflow.runtime.settings import Settings

LIMIT = 30.0  # seconds after which a test is taken to hang


def free_port() -> int:
    """A port of the loopback that nobody has."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Ranks:
    """Some ranks of one run, each driven by a thread of its own."""

    def __init__(self) -> None:
        self.clusters: list[Cluster] = []
        self.exits: dict[int, list[int]] = {}

    def make(self, settings: Settings) -> Cluster:
        """One rank, not joined yet; its process does not really end after a failure."""
        codes = self.exits.setdefault(settings.rank, [])
        cluster = Cluster(settings, exit=codes.append)
        self.clusters.append(cluster)
        return cluster

    def each(self, work: Callable[[Cluster], Any]) -> list[Any]:
        """Do the same on every rank at once: what each returned or raised, in order of rank."""
        return self.apart(*[lambda cluster=cluster: work(cluster) for cluster in self.clusters])

    def apart(self, *works: Callable[[], Any]) -> list[Any]:
        """Do different things at once: what each returned or raised."""
        results: list[Any] = [TimeoutError("it hangs")] * len(works)

        def do(index: int) -> None:
            try:
                results[index] = works[index]()
            except Exception as e:
                results[index] = e

        threads = [threading.Thread(target=do, args=(i,), daemon=True) for i in range(len(works))]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LIMIT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return results

    def close(self) -> None:
        """Let the gRPC threads of all ranks end."""
        for cluster in self.clusters:
            if cluster._thread.is_alive():
                cluster._loop.call_soon_threadsafe(cluster._control._over.set)
                cluster._thread.join(5.0)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """No ranks yet."""
    made = Ranks()
    yield made
    made.close()


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Settings of one rank after another of one run on this host."""
    common = Settings(master_port=free_port(), token="secret", join_timeout=10.0, script=__file__)

    def of(rank: int, world: int, **changes: Any) -> Settings:
        changes = {"devices": world, **changes}
        return replace(common, rank=rank, local_rank=rank, world=world, **changes)

    return of


@pytest.fixture
def joined(ranks: Ranks, settings: Callable[..., Settings]) -> Callable[[int], Ranks]:
    """A run of some ranks that have joined."""

    def of(world: int) -> Ranks:
        for rank in range(world):
            ranks.make(settings(rank, world))
        assert ranks.each(lambda cluster: cluster.join()) == [None] * world
        return ranks

    return of


class Run:
    """One launcher of a script and what became of it."""

    def __init__(self, folder: Path, script: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.script = script
        self._out = (folder / f"{os.urandom(4).hex()}.out").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "actorflow", "run", str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
        )

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(LIMIT)

    @property
    def output(self) -> str:
        """What the terminal shows."""
        self._out.seek(0)
        return self._out.read()

    def ranks_left(self) -> list[int]:
        """The processes of ranks that still run."""
        return [pid for pid in _processes() if str(self.script) in _command(pid)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a launcher: ``start(text of the script, "--devices", "2", …)``; its files are in the test's folder."""
    runs: list[Run] = []

    def begin(text: str, *arguments: str, env: dict[str, str] | None = None) -> Run:
        script = tmp_path / "script.py"
        script.write_text(text)
        logs = ("--log-dir", str(tmp_path / f"logs{len(runs)}"))
        runs.append(Run(tmp_path, script, *logs, *arguments, env=env))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()  # its ranks die with it
            run.process.wait(LIMIT)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has just ended
        return ""
