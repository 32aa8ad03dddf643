"""Check that all ranks issue the same common steps in the same order.

The ledger is on the master.  It uses no clock and no I/O.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from actorflow.control.drops import NO_DROPS, DropSet
from actorflow_compiler.core.errors import CallError


class StepKind(enum.StrEnum):
    """The kinds of common steps."""

    CALL = "call"  # of a job
    GATHER = "gather"
    SCATTER = "scatter"
    END = "end"  # of the script


@dataclass(frozen=True, slots=True)
class CommonStep:
    """Something that every rank must do in the same order: a call, a gather, a scatter, or the end of its script."""

    kind: StepKind
    tag: str = ""  # a text that must be equal on all ranks
    text: str = ""  # the call as source text
    call: int = 0  # number of the call, as the frontend counts
    dropped: DropSet = NO_DROPS  # with a call: plans and variables that this rank's script has released


class Ledger:
    """Compares the n-th step of every rank with the n-th of all others.

    >>> ledger = Ledger(world=2)
    >>> ledger.issue(0, CommonStep(StepKind.GATHER, "plans"))
    False
    >>> ledger.issue(1, CommonStep(StepKind.GATHER, "plans"))
    True
    """

    def __init__(self, world: int) -> None:
        self._issued = [0] * world  # steps of each rank
        self._calls = [0] * world  # calls of each rank
        self._ended = [False] * world
        self._open: deque[_OpenStep] = deque()  # steps that some ranks have yet to issue
        self._completed = 0

    def issue(self, rank: int, step: CommonStep) -> bool:
        """Record a rank's next step; returns True if all ranks have issued this step now.

        Raises CallError when another rank's step of the same number differs.
        """
        number = self._issued[rank]
        self._issued[rank] += 1
        self._calls[rank] += step.kind == StepKind.CALL
        self._ended[rank] |= step.kind == StepKind.END
        place = number - self._completed
        if place == len(self._open):
            self._open.append(_OpenStep(rank, step, self._describe(rank, step)))
            self._check_ended(rank)
        entry = self._open[place]
        if (entry.step.kind, entry.step.tag) != (step.kind, step.tag):
            raise CallError(_differs(entry, rank, step, self._describe(rank, step)))
        entry.count += 1
        if entry.count < len(self._issued):
            return False
        self._open.popleft()  # ranks go in order, so it is the oldest one
        self._completed += 1
        return True

    def waiting(self) -> list[int]:
        """The ranks that have not yet issued the oldest open step."""
        return [r for r, n in enumerate(self._issued) if n == self._completed] if self._open else []

    def missing_step(self, rank: int) -> str:
        """What a rank has not done and another one has, as text; empty where it has done all that others have."""
        number = self._issued[rank] - self._completed
        if number >= len(self._open):
            return ""
        entry = self._open[number]
        return f"rank {entry.rank} {entry.text.partition(' [')[0]}, which it has not"  # without what guards it

    def _check_ended(self, rank: int) -> None:
        """Raise CallError for a new step if a rank has ended before it, since the step could never complete."""
        for other, ended in enumerate(self._ended):
            if ended and other != rank:
                entry, step = self._open[-1], CommonStep(StepKind.END)
                raise CallError(_differs(entry, other, step, self._describe(other, step)))

    def _describe(self, rank: int, step: CommonStep) -> str:
        count = self._calls[rank]
        if step.kind == StepKind.END:
            return f"came to the end of its script after {count} call{'s' * (count != 1)}"
        if step.kind == StepKind.CALL:
            return f"made call {count}: {step.text}"
        return f"is at {step.kind} {step.tag!r}, after {count} call{'s' * (count != 1)}"


@dataclass(slots=True)
class _OpenStep:
    rank: int  # the first that issued it
    step: CommonStep
    text: str
    count: int = 0  # ranks that have issued it


def _differs(entry: _OpenStep, rank: int, step: CommonStep, text: str) -> str:
    both = f"rank {entry.rank} {entry.text}\n  rank {rank} {text}"
    if StepKind.END in (entry.step.kind, step.kind):
        head = "a script ended while another rank went on"
    elif entry.step.kind == step.kind == StepKind.CALL:
        head = "a call differs between ranks"
    else:
        head = "ranks do different things"
    return (
        f"{head}:\n  {both}\n"
        "Every rank runs the whole script and must make the same calls, with the same arguments, in the same order; "
        "look for a branch or a loop that depends on the rank, on time or on unseeded random numbers, or a sampler "
        "that gives each rank other rows (DistributedSampler): a job takes whole batches, and each rank uses its rows."
    )
