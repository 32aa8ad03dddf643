"""Sample what a rank is doing, and show the difference of two samples as a row of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actorflow.runtime.recorder import clock
from actorflow.runtime.worker import Worker
from actorflow.status.rank_status import waits_of
from actorflow.support.requests import Request

__all__ = ["HEADER", "RankPulse", "PulseRequest", "pulse_row", "take_pulse"]

HEADER = ("rank", "state", "compute", "comm", "send", "registers", "waits for")


@dataclass(frozen=True, slots=True)
class PulseRequest(Request):
    """Asks a rank for its pulse."""


@dataclass(frozen=True, slots=True)
class RankPulse:
    """What one rank is doing at one moment."""

    rank: int
    at: int  # ns of the rank's clock
    doing: str  # the firing in progress on the compute thread; empty if there is none
    under_way: bool  # whether calls are under way
    busy: Mapping[str, int]  # queue → ns that it has worked so far
    taken: int  # slots of registers that hold a token, or to which a token is on its way
    slots: int  # of all registers that this rank holds
    waits: tuple[str, ...]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RankPulse:
        """The pulse from its JSON data."""
        return cls(**{**found, "waits": tuple(found["waits"])})


def take_pulse(rank: int, worker: Worker | None) -> RankPulse:
    """Sample what a rank is doing now.  ``busy`` is empty without a recorder."""
    if worker is None:
        return RankPulse(rank, clock(), "", False, {}, 0, 0, ())
    job, early, doing = worker.standing()
    taken = slots = 0
    if job is not None:
        for register, (complete, coming) in job.machine.tokens().items():
            taken += complete + coming
            slots += job.plan.register(register).slots
    waits = [] if job is None else [f"{w.actor} {w.why}" for w in waits_of(job, rank)]
    if worker.awaited:
        waits.insert(0, worker.awaited)
    if early:
        waits.insert(0, "other ranks to make the next call")
    busy = {} if worker.record is None else dict(worker.record.busy)
    return RankPulse(rank, clock(), doing, job is not None, busy, taken, slots, tuple(waits))


def pulse_row(before: RankPulse | None, now: RankPulse) -> tuple[str, ...]:
    """The table row, with the columns of ``HEADER``, for what a rank did between two samples."""
    span = 0 if before is None else now.at - before.at
    shares: Counter[str] = Counter()
    for queue, busy in now.busy.items():
        earlier = 0 if before is None else before.busy.get(queue, 0)
        kind = queue.partition(":")[0]
        shares[kind] = max(shares[kind], busy - earlier)  # the busiest of several queues of a kind, such as sends

    def share(kind: str) -> str:
        return f"{min(1.0, shares[kind] / span):.0%}" if span else "–"

    state = now.doing or ("waits" if now.under_way else "idle")
    fill = f"{now.taken} of {now.slots}" if now.slots else "–"
    first = now.waits[0] if now.waits else ""
    more = f" (+{len(now.waits) - 1})" if len(now.waits) > 1 else ""
    return (str(now.rank), state, share("compute"), share("comm"), share("send"), fill, first + more)
