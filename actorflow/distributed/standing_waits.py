"""Under torch's launcher, end a process that is deadlocked as ranks have called collectives in different orders.

Under ``actorflow run`` the control plane sees that (``launch/wait_watch.py``).  Here ranks that have waited for long
say so in the store in which they have met; others say nothing, and cost nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from actorflow.script_state.user_code import line_of
from actorflow.support import background
from actorflow.support.collective_waits import (
    MadeCalls,
    calls_made,
    collectives_entered,
    has_made,
    in_progress,
    made_of_json,
    told_circle,
)
from actorflow.support.terminal import say
from actorflow_scheduler.wait_graph import shortest_cycle

__all__ = ["StandingWait", "watch_waits_over"]

TICK = 0.5  # seconds between two looks
PATIENCE = 5.0  # seconds in one collective after which a rank tells the others that it waits


@dataclass(frozen=True, slots=True)
class StandingWait:
    """What a rank says that waits for long."""

    what: str  # "all_reduce of ranks [0, 1]"
    peers: tuple[int, ...]  # the other ranks that it needs
    meets: str  # equal on all ranks that are in it
    channel: str
    number: int  # of the call in its channel
    made: Mapping[str, MadeCalls]  # before it, by channel
    moved: int  # grows with every collective that the rank enters or leaves
    line: str  # of the script
    beat: int = 0  # grows for as long as the rank lives and waits

    def waits_for(self, other: StandingWait) -> bool:
        """Whether one of its peers has neither come to its collective nor been there."""
        if (self.channel, self.number, self.meets) == (other.channel, other.number, other.meets):
            return False
        return not has_made(other.made, self.channel, self.number, self.meets)

    @classmethod
    def from_json(cls, text: str) -> StandingWait:
        """What was written by ``json.dumps(asdict(…))``."""
        plain = json.loads(text)
        return cls(**{**plain, "peers": tuple(plain["peers"]), "made": made_of_json(plain["made"])})


def watch_waits_over(store: Any, rank: int) -> None:
    """Watch on a thread whether this rank waits in a circle: then the process says so, and ends with status 1.

    ``store`` is that in which the ranks have met, and ``rank`` this one's number there.
    """
    closed = threading.Event()
    board = store.clone()  # a connection of its own: a wait of the script's thread does not hold it up

    def work() -> None:
        try:
            found = _circle_around(board, rank, closed)
        except Exception:  # the store is gone, with the process that served it, and torch's launcher ends this one
            return
        if found:
            _end(found)

    background.start(work, "actorflow-waits", closed.set)


def _circle_around(board: Any, rank: int, closed: threading.Event) -> str | None:
    """Tell of this rank's waits until it stands in a circle: what is to be said of it; None when closed."""
    said, beat = False, 0
    seen: Mapping[int, StandingWait] = {}
    main = threading.main_thread().ident or 0
    while not closed.wait(TICK):
        now = in_progress()
        if now is None or time.monotonic() - now.since < PATIENCE:
            if said:
                board.set(_key(rank), "")
            said, seen = False, {}
            continue
        said, beat = True, beat + 1
        mine = StandingWait(
            now.what, now.peers, now.meets, now.channel, now.number, calls_made(), collectives_entered(),
            line_of(main), beat,
        )  # fmt: skip
        board.set(_key(rank), json.dumps(asdict(mine)))
        found = _standing(board, rank, mine)
        circle = standing_circle(seen, found)
        if rank in circle and in_progress() is now:
            return told_circle(circle, [f"the script is in {found[r].what} ({found[r].line})" for r in circle])
        seen = found
    return None


def _standing(board: Any, rank: int, mine: StandingWait) -> dict[int, StandingWait]:
    """The waits of this rank, of those that it waits for, of those that these wait for, and so on."""
    found = {rank: mine}
    wanted = [*mine.peers]
    while wanted:
        other = wanted.pop()
        if other in found or not board.check([_key(other)]):
            continue
        text = board.get(_key(other)).decode()
        if text:
            found[other] = StandingWait.from_json(text)
            wanted += found[other].peers
    return found


def standing_circle(before: Mapping[int, StandingWait], now: Mapping[int, StandingWait]) -> list[int]:
    """Ranks that wait for each other in a circle, each for the next.

    Each has said the same before, and lived since: so all have stood there at one moment.
    """
    still = {r: wait for r, wait in now.items() if r in before and _has_lived(before[r], wait)}
    graph = {
        rank: [r for r in wait.peers if r in still and wait.waits_for(still[r])] for rank, wait in sorted(still.items())
    }
    return list(shortest_cycle(graph))


def _has_lived(before: StandingWait, now: StandingWait) -> bool:
    """Whether a rank is where it was, and has said so anew."""
    return before.moved == now.moved and before.beat < now.beat


def _key(rank: int) -> str:
    return f"actorflow/waits/{rank}"


def _end(why: str, exit: Callable[[int], object] = os._exit) -> None:
    """Say why, and end the process: what its thread waits in, of Gloo's or NCCL's, cannot be made to return."""
    say(why)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    exit(1)
