"""Let all ranks agree whether a call that failed on one of them is given up, or the run ends.

This is a two-phase commit that runs only after a failure: the rank that failed tells the coordinator, every rank holds
the call and votes, and the coordinator decides.  This module has no clock, no I/O and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actorflow.support.refusals import MessageRefused, RefusalReason

__all__ = ["Coordinator", "Decision", "Failed", "Hold", "Order", "Vote", "Word"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank → the coordinator: a body of a call has failed on this rank, which holds the call."""

    call: int  # the call's number in the worker, the same on all ranks
    text: str  # the error's message for the script
    cause: str  # class name of the builtin exception that caused it; empty if the cause is no builtin exception
    message: str  # of the cause
    line: str = ""  # of the user's code, at which scripts can take back the call's changes; see ``Hold``


@dataclass(frozen=True, slots=True)
class Vote:
    """A rank → the coordinator: this rank holds the call."""

    call: int
    obstacle: str  # why the call cannot be given up on this rank; empty if it can


@dataclass(frozen=True, slots=True)
class Hold:
    """The coordinator → every rank: start no more firings of a call, and vote.

    With a ``line``, the call can only be given up if no rank has issued a later call: each script takes back its
    changes, as if the step had failed at that line.
    """

    call: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The coordinator → every rank: whether to give up a held call or to end the run."""

    failed: Failed  # the first failure of the call that was reported
    obstacle: str  # why the run ends; empty: all ranks give the call up

    @property
    def call(self) -> int:
        """The number of the call."""
        return self.failed.call


Word = Failed | Vote
Order = Hold | Decision


@dataclass(slots=True)
class _Open:
    failed: Failed
    missing: set[int]  # ranks that have not voted
    obstacles: dict[int, str] = field(default_factory=dict)


class Coordinator:
    """Collects the votes on failed calls and decides.  Messages of one rank must come in the order they were sent.

    >>> coordinator = Coordinator(world=2)
    >>> failed = Failed(7, "label out of range", "IndexError", "Target 9 is out of bounds.")
    >>> coordinator.hear(1, failed)
    Hold(call=7)
    >>> coordinator.hear(0, Vote(7, ""))
    >>> coordinator.hear(1, Vote(7, "")).obstacle
    ''
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._open: dict[int, _Open] = {}
        self._decided: set[int] = set()  # calls

    def hear(self, rank: int, word: Word) -> Order | None:
        """Process a rank's message; return the order to send to every rank, or None.

        Raises MessageRefused for a word about a call that was decided, and for a vote that nobody waits for.
        """
        if word.call in self._decided:
            raise MessageRefused(RefusalReason.SEQUENCE, f"{word}", "no word on a call that was decided", rank)
        if isinstance(word, Failed):
            if word.call in self._open:  # it has failed on another rank, too
                return None
            self._open[word.call] = _Open(word, set(range(self._world)))
            return Hold(word.call, word.line)
        entry = self._open.get(word.call)
        if entry is None or rank not in entry.missing:
            raise MessageRefused(RefusalReason.SEQUENCE, f"{word}", "one vote, on a call that is held", rank)
        entry.missing.discard(rank)
        if word.obstacle:
            entry.obstacles[rank] = word.obstacle
        if entry.missing:
            return None
        del self._open[word.call]
        self._decided.add(word.call)
        obstacles = [f"rank {rank}: {why}" for rank, why in sorted(entry.obstacles.items())]
        return Decision(entry.failed, "; ".join(obstacles[:3]))
