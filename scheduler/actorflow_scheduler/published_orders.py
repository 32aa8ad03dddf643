"""Published pipeline schedules: the order of each rank's tasks for given numbers of ranks and micro-batches.

- gpipe: Huang et al., GPipe (arXiv:1811.06965).
- 1f1b: Narayanan et al., PipeDream-Flush (arXiv:2006.09503).
- interleaved: Narayanan et al., Megatron-LM (arXiv:2104.04473); groups of micro-batches as in Megatron Core.
- zb-h1, zb-h2: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), the handcrafted schedules.
- zb-v: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv:2405.15362).

Users choose them by name, and the search in ``portfolio.py`` starts from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class TaskKind(StrEnum):
    """What a task computes."""

    FORWARD = "F"
    BACKWARD = "B"  # only the gradients of inputs if there are W tasks
    WEIGHT = "W"  # the gradients of parameters


F, B, W = TaskKind


class StageTask(NamedTuple):
    """One stage's forward, backward or weight gradients for one micro-batch ("piece")."""

    stage: int
    kind: TaskKind
    piece: int


PublishedOrder = tuple[tuple[StageTask, ...], ...]  # for each rank of the pipeline, its tasks in order


def gpipe(ranks: int, pieces: int) -> PublishedOrder:
    """All forward, then all backward."""
    return tuple(
        (*(StageTask(k, F, i) for i in range(pieces)), *(StageTask(k, B, i) for i in range(pieces)))
        for k in range(ranks)
    )


def one_f_one_b(ranks: int, pieces: int) -> PublishedOrder:
    """The fewest pieces in flight that keep all ranks busy: rank k holds at most ranks-k."""
    return tuple(tuple(_in_turns(k, pieces, ranks - k - 1)) for k in range(ranks))


def zb_h1(ranks: int, pieces: int) -> PublishedOrder:
    """1F1B with weight gradients delayed so far that every rank holds as many pieces as rank 0 of 1F1B."""
    return tuple(tuple(_in_turns(k, pieces, ranks - k - 1, lag=k)) for k in range(ranks))


def zb_h2(ranks: int, pieces: int) -> PublishedOrder:
    """Rank k begins with 2(ranks-k)-1 forward pieces; every rank holds up to 2·ranks-1 pieces, and none idles."""
    return tuple(tuple(_in_turns(k, pieces, 2 * (ranks - k - 1), lag=2 * k)) for k in range(ranks))


def _in_turns(stage: int, pieces: int, ahead: int, lag: int | None = None) -> Iterator[StageTask]:
    """Forward for ``ahead`` pieces, then forward and backward alternately; W of a piece ``lag`` backwards later."""
    backward = 0
    for forward in range(pieces + ahead):
        if forward < pieces:
            yield StageTask(stage, F, forward)
        if forward >= ahead:
            yield StageTask(stage, B, backward)
            if lag is not None and backward >= lag:
                yield StageTask(stage, W, backward - lag)
            backward += 1
    if lag is not None:
        for piece in range(max(0, pieces - lag), pieces):
            yield StageTask(stage, W, piece)


def interleaved(ranks: int, pieces: int, rounds: int) -> PublishedOrder:
    """Interleaved 1F1B with ``rounds`` stages on each rank, stage s on rank s mod ranks.

    Each stage of a rank computes a group of pieces before the rank's next stage does.  A group has as many pieces as
    there are ranks, if that divides the number of pieces.  Otherwise it has the next larger number with which the last
    group is not shorter than the number of ranks, or all pieces.
    """
    group = next((n for n in range(ranks, pieces) if not 0 < pieces % n < ranks), pieces)
    starts = range(0, pieces, group)
    turns = [(r, i) for s in starts for r in range(rounds) for i in range(s, min(s + group, pieces))]
    order = []
    for k in range(ranks):
        forward = [StageTask(r * ranks + k, F, i) for r, i in turns]
        backward = [StageTask((rounds - 1 - r) * ranks + k, B, i) for r, i in turns]
        ahead = min(2 * (ranks - k - 1) + (rounds - 1) * group, len(turns))
        pairs = zip(forward[ahead:], backward, strict=False)
        order.append((*forward[:ahead], *(t for pair in pairs for t in pair), *backward[len(turns) - ahead :]))
    return tuple(order)


def zb_v(ranks: int, pieces: int) -> PublishedOrder:
    """Two stages on each rank, k on the way down and 2·ranks-1-k on the way up; needs no more memory than 1F1B.

    With fewer than 2·ranks-1 pieces it is the schedule for 2·ranks-1, without the tasks of the missing pieces.
    """
    return tuple(
        tuple(t for t in _v_tasks(k, ranks, max(pieces, 2 * ranks - 1)) if t.piece < pieces) for k in range(ranks)
    )


def _v_tasks(k: int, ranks: int, pieces: int) -> Iterator[StageTask]:
    down, up = k, 2 * ranks - 1 - k
    done: dict[tuple[int, TaskKind], int] = {}

    def do(stage: int, *kinds: TaskKind) -> Iterator[StageTask]:
        for kind in kinds:
            piece = done.get((stage, kind), 0)
            done[stage, kind] = piece + 1
            yield StageTask(stage, kind, piece)

    for _ in range(2 * (ranks - k) - 1):  # until the first piece comes back up
        yield from do(down, F)
    for _ in range(k):
        yield from do(up, F)
        yield from do(down, F)
    for _ in range(ranks - k):  # until the first gradient comes back
        yield from do(up, F, B, W)
    for _ in range(pieces - ranks):
        if done[down, F] < pieces:
            yield from do(down, F)
        yield from do(down, B, W)
        yield from do(up, F, B, W)
    for _ in range(k):
        yield from do(down, B)
        yield from do(up, B)
    for _ in range(ranks - k):
        yield from do(down, B, W)
    for stage in (up, down):
        while done[stage, W] < pieces:
            yield from do(stage, W)
