"""Format the status of a run as text."""

from __future__ import annotations

import time
from collections.abc import Iterator

from actorflow.status.graph import edges, verdict
from actorflow.status.rank_status import RankStatus
from actorflow.status.sockets import RunInfo, RunStatus
from actorflow_compiler.core.units import seconds_text

__all__ = ["to_text"]


def to_text(run: RunInfo, found: RunStatus) -> str:
    """Which ranks wait for which ranks, followed by each rank's own description."""
    return "\n".join(_lines(run, found)) + "\n"


def _lines(run: RunInfo, found: RunStatus) -> Iterator[str]:
    words = " ".join((run.script, *run.argv))
    age = seconds_text(max(0.0, time.time() - run.began))
    yield f"run {run.pid}: {words}, {run.world} rank{'s' * (run.world != 1)}, for {age}"
    graph = edges(found.standings)
    for rank in range(run.world):
        standing = found.standings.get(rank)
        if standing is None:
            yield f"  rank {rank} {found.silent.get(rank, 'is on another machine and does not answer')}"
            continue
        yield f"  rank {rank} ({standing.host}, pid {standing.pid}){_doing(standing)}"
        for other, why in sorted(graph[rank].items()):
            yield f"    waits for rank {other}: {why}"
    yield f"  {verdict(run.world, found.standings, found.before)}"
    for rank in sorted(found.standings):
        yield ""
        yield from found.standings[rank].text.splitlines()


def _doing(standing: RankStatus) -> str:
    rows = f"waits for {standing.rows}" if standing.rows else ""
    script = f"script at {standing.line}" if standing.line else ""
    return "".join(f", {what}" for what in (standing.doing, rows, script) if what)
