"""Let all ranks agree whether a call that failed on one of them is given up, or the run ends.

A two-phase commit, which only a failure begins: the rank that failed tells the coordinator, every rank holds the call
and votes, and the coordinator decides.  Pure: no clock, no I/O, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Coordinator", "Decision", "Failed", "Hold", "Order", "Vote", "Word"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank → the coordinator: a body of a call has failed here, and the call is held."""

    call: int  # its number in the worker, equal on all ranks
    text: str  # the error, as its script would get it
    cause: str  # the name of the builtin exception behind it; empty where it is none
    message: str  # that of the cause
    line: str = ""  # of the user's code, where scripts take back what the call has changed there; see ``Hold``


@dataclass(frozen=True, slots=True)
class Vote:
    """A rank → the coordinator: the call is held here."""

    call: int
    obstacle: str  # why it cannot be given up; empty where it can


@dataclass(frozen=True, slots=True)
class Hold:
    """The coordinator → every rank: start nothing more of a call, and vote.

    With a ``line`` it can only be given up where no later call has been issued: each script takes back what the call
    has changed of it, as if the step had ended at that line.
    """

    call: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The coordinator → every rank: what becomes of a call that is held."""

    failed: Failed  # what came first
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
    """What the ranks say of calls that have failed; messages of one rank come in their order.

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

    def hear(self, rank: int, word: Word) -> Order | None:
        """What every rank is told because of it."""
        if isinstance(word, Failed):
            if word.call in self._open:  # it has failed on another rank, too
                return None
            self._open[word.call] = _Open(word, set(range(self._world)))
            return Hold(word.call, word.line)
        entry = self._open[word.call]
        entry.missing.discard(rank)
        if word.obstacle:
            entry.obstacles[rank] = word.obstacle
        if entry.missing:
            return None
        del self._open[word.call]
        obstacles = [f"rank {rank}: {why}" for rank, why in sorted(entry.obstacles.items())]
        return Decision(entry.failed, "; ".join(obstacles[:3]))
