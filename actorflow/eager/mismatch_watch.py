"""Publish this rank's state in the ranks' common store, and detect on a thread that it would wait forever.

A rank that waits for a peer that will never join its collective gets an error within seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from actorflow.eager.mismatch import (
    CollectiveWait,
    RankState,
    ScriptEnd,
    decode_state,
    encode_state,
    find_mismatch,
    show_rank,
)
from actorflow.script_state.user_code import line_of
from actorflow.support import background
from actorflow.support.terminal import say

__all__ = ["StatusStore", "MismatchWatch"]

TICK = 0.5  # seconds between two checks
PATIENCE = 1.0  # seconds in one collective after which a rank reads the others' states
SILENT = 60.0  # seconds without a heartbeat after which a rank counts as lost, where nothing else says it sooner
SLOW = 15.0  # seconds of waiting after which a line names what is awaited
NEWS = 6.0  # seconds to wait for the cause of a broken connection to become known
GONE = 2.5  # after a connection has broken: seconds without a heartbeat after which a rank counts as lost


class StatusStore(Protocol):
    """The methods of ``torch.distributed.Store`` that are used."""

    def set(self, key: str, value: str, /) -> None:
        """Set the value of a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have a value."""


class MismatchWatch:
    """Tells the other ranks which collective this one is in, and decides when it would wait forever.

    ``store`` is a connection that only this object uses.  ``wake`` is called once, on the watching thread, when there
    is a verdict: it has to make the main thread's blocked call fail.  A rank without a heartbeat for ``silent``
    seconds counts as lost.
    """

    def __init__(
        self, store: StatusStore, rank: int, world: int, wake: Callable[[], object], silent: float = SILENT
    ) -> None:
        self._longest = silent
        self._store, self._rank, self._world, self._wake = store, rank, world, wake
        self._main = threading.get_ident()
        self._now: tuple[CollectiveWait, float] | None = None
        self._entered: dict[tuple[int, ...], int] = {}
        self._ended: ScriptEnd | None = None
        self._beat = 0
        self._last_beats: dict[int, tuple[int, float]] = {}  # rank → its last heartbeat, and when it was first seen
        self._suspected: tuple[str, int] | None = None  # the mismatch seen at the last check, and in which collective
        self._entries = 0
        self._printed_wait = False
        self._close = threading.Event()
        self._lost_store = False
        self.verdict: str | None = None
        self.lost = False  # whether the verdict is that a rank was lost
        self._decided = threading.Event()
        self._thread = background.start(self._run, "actorflow-mismatch", self._close.set)

    # -- the main thread -------------------------------------------------------------------------

    def enter(self, waiting: CollectiveWait) -> None:
        """Record that this rank enters a collective."""
        self._entered[waiting.ranks] = waiting.number + 1
        self._entries += 1
        self._now = (waiting, time.monotonic())

    def leave(self) -> None:
        """Record that this rank has left the collective."""
        self._now = None

    def give_up(self, waiting: CollectiveWait) -> None:
        """Record that this rank has given up the collective, which it then never completes."""
        self._entered[waiting.ranks] = waiting.number

    def finish(self, how: str) -> None:
        """Record that this rank joins no further collective; waits briefly, so that ranks waiting for it learn why."""
        if self._ended is not None:
            return
        self._ended = ScriptEnd(how)
        self._close.set()
        self._thread.join(NEWS)

    def why(self, error: BaseException, waiting: CollectiveWait) -> tuple[str, bool]:
        """Why a transfer has failed, and whether a rank was lost; takes a few seconds at most."""
        begun = time.monotonic()
        silent: list[int] = []
        while not self._decided.wait(TICK) and not silent and time.monotonic() - begun < NEWS:
            silent = [
                r for r in waiting.peers if time.monotonic() - max(begun, self._last_beats.get(r, (0, 0.0))[1]) > GONE
            ]
        if self.verdict is not None:
            return self.verdict, self.lost
        if self._lost_store:
            lost = "rank 0, which keeps the ranks' common store, or the launcher that does,"
        else:
            lost = " and ".join(f"rank {r}" for r in silent) or f"one of ranks {list(waiting.peers)}"
        return (
            f"{lost} was lost while rank {self._rank} waited in a collective: {error}\n"
            f"{show_rank(self._rank, self._state(waiting))}"
        ), True

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._publish()
            while not self._close.wait(TICK):
                self._check_peers()
            self._publish()
            begun = time.monotonic()
            while self._ended and (staying := self._is_awaited()) is not False and time.monotonic() - begun < NEWS:
                if staying is None and time.monotonic() - begun > 2 * TICK:
                    break
                time.sleep(TICK / 10)  # a store's own wait cannot be interrupted
        except Exception:  # the store is gone, with the process that served it
            self._lost_store = True
            self._decided.set()

    def _check_peers(self) -> None:
        now = self._now
        self._publish()
        if self.verdict is not None:
            return
        waited = time.monotonic() - now[1] if now else 0.0
        if now is None or waited < PATIENCE:
            self._suspected, self._printed_wait = None, False
            return
        states = self._read(now[0])
        why = find_mismatch(states) or self._silent(states, waited)
        suspicion = (why, self._entries) if why else None
        if why and suspicion == self._suspected and self._now is now:
            self._decide(why)
        self._suspected = suspicion
        if waited > SLOW and not self._printed_wait:
            self._printed_wait = True
            self._print_wait(now[0], states, waited)

    def _is_awaited(self) -> bool | None:
        """Whether a rank waits for this one and has not yet read that this one will not come.

        None where a rank may have begun to wait, since published states are up to a tick old.  False where none will.
        """
        if self._store.check(["verdict"]):
            return False
        me = self._state(None)
        others = [str(r) for r in range(self._world) if r != self._rank and self._store.check([str(r)])]
        states = [decode_state(self._store.get(key).decode())[0].doing for key in others]
        if any(isinstance(d, CollectiveWait) and self._rank in d.peers and not me.has_passed(d) for d in states):
            return True
        return False if all(isinstance(d, ScriptEnd) for d in states) else None

    def _decide(self, why: str) -> None:
        if self._store.check(["verdict"]):  # another rank was first; use its verdict, so that all report the same
            why = self._store.get("verdict").decode()
        else:
            self._store.set("verdict", why)
        self.verdict = why
        self._decided.set()
        self._wake()

    def _publish(self) -> None:
        self._beat += 1
        now = self._now
        self._store.set(str(self._rank), encode_state(self._state(now[0] if now else None), self._beat))
        broken = self._store.check(["verdict"]) if self.verdict is None and now else False
        if broken:
            self.verdict = self._store.get("verdict").decode()
            self._decided.set()
            self._wake()

    def _state(self, waiting: CollectiveWait | None) -> RankState:
        return RankState(self._ended or waiting, dict(self._entered), line_of(self._main))

    def _read(self, waiting: CollectiveWait) -> dict[int, RankState]:
        """The states of the ranks that this one waits for, of those that these wait for, and so on."""
        states = {self._rank: self._state(waiting)}
        wanted = list(waiting.peers)
        while wanted:
            rank = wanted.pop()
            key = str(rank)
            if rank in states or not self._store.check([key]):
                continue
            states[rank], beat = decode_state(self._store.get(key).decode())
            if self._last_beats.get(rank, (0, 0.0))[0] != beat:
                self._last_beats[rank] = (beat, time.monotonic())
            doing = states[rank].doing
            if isinstance(doing, CollectiveWait):
                wanted += doing.peers
        fresh = time.monotonic() - 4 * TICK
        return {
            rank: state
            for rank, state in states.items()
            if rank == self._rank or isinstance(state.doing, ScriptEnd) or self._last_beats[rank][1] > fresh
        }

    def _silent(self, states: Iterable[int], waited: float) -> str | None:
        for rank, (_, heard) in self._last_beats.items():
            silent = time.monotonic() - heard
            if rank not in states and silent > self._longest and waited > self._longest:
                self.lost = True
                return f"rank {rank} was lost: it has given no sign of life for {silent:.0f} s"
        return None

    def _print_wait(self, waiting: CollectiveWait, states: dict[int, RankState], waited: float) -> None:
        late = [r for r in waiting.peers if r not in states or not states[r].is_in(waiting)]
        lines = [show_rank(r, states[r]) if r in states else f"  rank {r} says nothing" for r in late]
        say(
            f"rank {self._rank} has waited {waited:.0f} s for others\n"
            + "\n".join([show_rank(self._rank, self._state(waiting)), *lines])
        )
