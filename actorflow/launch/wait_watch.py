"""End a run whose ranks wait for each other for ever in collectives of ``flow.comm`` that do not meet."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress

from actorflow.control.cluster import Cluster
from actorflow.rendezvous.failure import FailureKind
from actorflow.status.graph import edges, standing_circle
from actorflow.status.rank_status import RankStatus, StatusRequest
from actorflow.support import background
from actorflow.support.collective_waits import in_progress, told_circle
from actorflow_compiler.core.errors import ActorflowError

__all__ = ["watch_waits"]

TICK = 1.0  # seconds between two looks at this rank
PATIENCE = 5.0  # seconds in one collective after which a rank asks the others; each later time it waits twice as long


def watch_waits(run: Cluster) -> None:
    """Watch on a thread whether this rank waits in a circle: then the run ends with an error that shows the circle."""
    closed = threading.Event()
    background.start(lambda: _watch(run, closed), "actorflow-waits", closed.set)


def _watch(run: Cluster, closed: threading.Event) -> None:
    patience = PATIENCE
    while not closed.wait(TICK):
        now = in_progress()
        if now is None or time.monotonic() - now.since < patience:
            patience = patience if now else PATIENCE
            continue
        patience *= 2
        before = _standings(run)
        if closed.wait(TICK):
            return
        after = _standings(run)
        circle = standing_circle(before, after)
        if run.rank in circle and in_progress() is now:
            graph = edges(after)
            steps = zip(circle, [*circle[1:], circle[0]], strict=True)
            reasons = [f"{graph[rank][other]} ({after[rank].line})" for rank, other in steps]
            run.abort(FailureKind.CALL, told_circle(circle, reasons))
            return


def _standings(run: Cluster) -> dict[int, RankStatus]:
    """What this rank, those that it waits for, those that these wait for, and so on, say of themselves."""
    found: dict[int, RankStatus] = {}
    wanted = [run.rank]
    while wanted:
        rank = wanted.pop()
        if rank in found:
            continue
        with suppress(ActorflowError):  # it is about to end, or is lost, which others tell
            found[rank] = RankStatus.from_json(json.loads(run.pull(rank, StatusRequest())))
            wanted += {other for wait in found[rank].waits for other in wait.ranks}
    return found
