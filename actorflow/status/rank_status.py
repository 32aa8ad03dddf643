"""Describe what a rank is doing and which ranks it waits for, as plain data."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from actorflow.support.collective_waits import (
    MadeCalls,
    calls_made,
    collectives_entered,
    has_made,
    in_progress,
    made_of_json,
)
from actorflow.support.refusals import REFUSALS
from actorflow.support.requests import Request
from actorflow_compiler.plan.plan import Collective, Send
from actorflow_scheduler.events import Wait, WaitReason, explain, name

if TYPE_CHECKING:
    from actorflow.runtime.installed_plan import InstalledPlan
    from actorflow.runtime.worker import Worker
    from actorflow.standins.logical_batch import RowsRead

__all__ = [
    "ObservedSession",
    "RankStatus",
    "StatusRequest",
    "QueueWait",
    "observe_session",
    "own_status",
    "own_wait",
    "waits_of",
]


@dataclass(frozen=True, slots=True)
class StatusRequest(Request):
    """Asks a rank for its status."""


class ObservedSession(Protocol):
    """The part of a session's interface that this module uses."""

    @property
    def calls(self) -> int:
        """The number of calls that the script has made."""

    @property
    def reads(self) -> RowsRead | None:
        """Rows of a data source that the script's thread reads now, or waits for."""

    @property
    def worker(self) -> Worker | None:
        """The worker that executes the calls; None until a job has been compiled."""


_observed: Callable[[], ObservedSession | None] = lambda: None  # noqa: E731 -- until there is a session


@dataclass(frozen=True, slots=True)
class QueueWait:
    """The wait of a queue for other ranks."""

    actor: str  # the actor that cannot fire or end
    why: str  # as text: waits for register 3 (empty) filled by send F0 of rank 0
    ranks: tuple[int, ...]  # the ranks that could end the wait
    meets: str = ""  # id of the collective that it is in: it does not wait for ``ranks`` that are in it, too
    channel: str = ""  # of the collective, where its calls are counted …
    number: int = 0  # … and which of them it is: it does not wait for ``ranks`` that have made it


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank is doing and waiting for."""

    rank: int
    host: str
    pid: int
    line: str  # the script's line at which the main thread is; empty if it is not known
    calls: int = 0  # number of calls of jobs that the script has made
    early: bool = False  # a call waits for other ranks to make it
    doing: str = ""  # the firing in progress on the compute thread
    busy: bool = False  # it computes, sends or reads, even if other queues wait
    rows: str = ""  # of a data source, which it waits for: rows 32-63 of epoch 0 of the loader of train.py:31
    moved: int = 0  # grows with every event of the rank (``Worker.moved``)
    waits: tuple[QueueWait, ...] = ()
    text: str = ""  # ``Worker.explain``
    made: Mapping[str, MadeCalls] = field(default_factory=dict, hash=False)  # of each channel of collectives

    def to_json(self) -> dict[str, Any]:
        """The status as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RankStatus:
        """The status from its JSON data."""
        waits = tuple(QueueWait(**{**wait, "ranks": tuple(wait["ranks"])}) for wait in found["waits"])
        return cls(**{**found, "waits": waits, "made": made_of_json(found["made"])})

    def has_made(self, call: QueueWait) -> bool:
        """Whether this rank has been in the collective that another one is in."""
        return has_made(self.made, call.channel, call.number, call.meets)


def observe_session(observed: Callable[[], ObservedSession | None]) -> None:
    """Set the function that returns this process's session, or None while there is none."""
    global _observed
    _observed = observed


def own_status(rank: int) -> RankStatus:
    """The status of this process.  For any thread, at any time."""
    line = ""
    if "torch" in sys.modules:  # else nothing of the script has run yet
        from actorflow.script_state.user_code import line_of

        line = line_of(threading.main_thread().ident or 0)
    here = (rank, socket.gethostname(), os.getpid(), line)
    session = _observed()
    entered, own = collectives_entered(), tuple(_in_collective())
    if session is None or session.worker is None:
        text = "\n".join(filter(None, ("no job is compiled yet", REFUSALS.text())))
        calls = 0 if session is None else session.calls
        return RankStatus(*here, calls, moved=entered, waits=own, text=text, made=calls_made())
    worker = session.worker
    job, early, doing = worker.standing()
    moved = worker.moved() + entered
    waits = own if job is None else (*own, *waits_of(job, rank))
    reads = session.reads
    rows = worker.awaited or ("" if reads is None else f"{reads.text} of {reads.source}")
    busy = bool(doing) or bool(rows) or (job is not None and _sends(job))
    early = early or bool(worker.missing_calls)
    text = "\n".join(filter(None, (worker.explain(), REFUSALS.text())))
    return RankStatus(*here, session.calls, early, doing, busy, rows, moved, waits, text, calls_made())


def _in_collective() -> Iterator[QueueWait]:
    """The collective of global tensors or of ``flow.comm`` that the script is in."""
    now = in_progress()
    if now is not None:
        yield QueueWait("the script", f"is in {now.what}", now.peers, now.meets, now.channel, now.number)


def own_wait(rank: int, other: int) -> str:
    """What this rank waits for from another one, in short; empty where nothing is known.  For any thread."""
    session = _observed()
    if session is None or session.worker is None:
        return ""
    missing = session.worker.missing_calls
    if other in missing:
        return f"call {missing[other]}, which it has not made"
    job, early, _ = session.worker.standing()
    waits = () if job is None else tuple(waits_of(job, rank))
    found = next((f"{wait.actor} {wait.why}" for wait in waits if other in wait.ranks), "")
    if not found and early and other == 0:  # which tells all ranks when all have come to a call
        return "its word that all ranks have made the next call"
    return found


def waits_of(job: InstalledPlan, rank: int) -> Iterator[QueueWait]:
    """The waits of a rank's queues for other ranks."""
    plan, machine = job.plan, job.machine
    for id in machine.unfinished():
        actor = plan.actor(id)
        waits = machine.waits(id)
        comm = actor.comm
        if not waits and isinstance(comm, Collective):
            others = tuple(r for r in comm.ranks if r != rank)
            yield QueueWait(
                actor.name, f"is in {comm.label} {comm.id} with ranks {list(comm.ranks)}", others, str(comm.id)
            )
        for wait in waits:
            ranks = tuple(sorted(_ranks(job, wait) - {rank}))
            if ranks:
                yield QueueWait(name(plan, id), explain(plan, wait), ranks)


def _sends(job: InstalledPlan) -> bool:
    """Whether a send of this rank is under way."""
    running = (id for id in job.machine.unfinished() if not job.machine.waits(id))
    comms = (job.plan.actor(id).comm for id in running)
    return any(isinstance(comm, Send) for comm in comms)


def _ranks(job: InstalledPlan, wait: Wait) -> set[int]:
    """The ranks of the actors that could end a wait."""
    if wait.reason == WaitReason.EMPTY:
        return {job.plan.actor(a).rank for a in wait.on}
    return {job.plan.home(job.plan.register(wait.register))} if wait.reason == WaitReason.FULL else set()
