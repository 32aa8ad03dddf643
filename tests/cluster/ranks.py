"""Clusters whose ranks are threads of this process."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actorflow.control.cluster import Cluster
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.settings import Settings
from actorflow.support.requests import Request

LIMIT = 200.0  # seconds after which a test is taken to hang
SOON = 28.0  # seconds; some 5 are needed, and torch's agent by itself takes 30 to end what stands still


@dataclass(frozen=True, slots=True)
class Word(Request):
    """Asks for something by a word for it."""

    word: str


def free_port() -> int:
    """A port that nobody has, and that nobody else is given meanwhile.

    It is below those that the kernel chooses from, and each process of tests that run in parallel has its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000 + worker, max(lowest, 20_000), workers)  # tests seed the others
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port


def until(there: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + LIMIT
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
        left = [cluster for cluster in self.clusters if cluster._thread.is_alive()]
        for cluster in left:
            if not cluster._joined.done():  # it waits for others
                cluster.abort(FailureKind.ENDED, "was told to end, since the test is over")
        for cluster in left:
            cluster._control_plane._done = True  # what breaks from now on is meant to
        for cluster in left:
            cluster._soon(cluster._control_plane._over.set)  # one may have ended meanwhile, as its neighbour has
        for cluster in left:
            cluster._thread.join(5.0)
