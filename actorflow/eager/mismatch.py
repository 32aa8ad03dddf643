"""Detect ranks that would wait for each other forever, from the states that they publish.  Pure functions.

Global tensors need all ranks to run the same ops in the same order.  A rank that does not makes others wait in a
collective that it will never join.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from actorflow_scheduler.wait_graph import shortest_cycle

__all__ = [
    "ScriptEnd",
    "RankState",
    "CollectiveWait",
    "MADE_OTHERWISE",
    "find_mismatch",
    "decode_state",
    "show_rank",
    "encode_state",
]


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """A rank is in a collective and waits for its peers."""

    ranks: tuple[int, ...]  # that take part
    number: int  # of the collective, among those of the same ranks
    what: str  # "aten.mm.default: float32[4,5], S(0) on cpu:[0,1] -> B on cpu:[0,1]"
    peers: tuple[int, ...]  # that this rank sends to or receives from
    lineage: int = 0  # of the tensor that is moved

    def is_of(self, other: CollectiveWait) -> bool:
        """Whether two ranks are in one collective, perhaps with tensors that they have made in different ways."""
        return (self.ranks, self.number, self.what) == (other.ranks, other.number, other.what)


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """A rank has come to the end of its script."""

    how: str  # "has ended its script", "raised ValueError: no"


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that a rank publishes."""

    doing: CollectiveWait | ScriptEnd | None  # None: it computes
    entered: Mapping[tuple[int, ...], int] = field(default_factory=dict)  # collectives so far, by the ranks in them
    where: str = ""  # the line of the user's script

    def has_passed(self, other: CollectiveWait) -> bool:
        """Whether this rank has completed a collective."""
        entered = self.entered.get(other.ranks, 0)
        inside = isinstance(self.doing, CollectiveWait) and self.doing.ranks == other.ranks
        return entered - inside > other.number

    def is_in(self, other: CollectiveWait) -> bool:
        """Whether this rank is in the same collective."""
        d = self.doing
        return isinstance(d, CollectiveWait) and d.is_of(other) and d.lineage == other.lineage


MADE_OTHERWISE = (
    "are to exchange tensors that they have made in different ways: all ranks have to run the same ops on global "
    "tensors, with the same numbers; ACTORFLOW_CHECK_MISMATCH=1 shows the first one that differs"
)


def find_mismatch(states: Mapping[int, RankState]) -> str | None:
    """Why some ranks will wait forever: a peer has ended, or they are in different collectives; None if none will."""
    waits: dict[int, list[int]] = {}
    for rank, state in states.items():
        if not isinstance(state.doing, CollectiveWait):
            continue
        for peer in state.doing.peers:
            other = states.get(peer)
            if other is None or other.is_in(state.doing) or other.has_passed(state.doing):
                continue
            if isinstance(other.doing, ScriptEnd):
                return (
                    f"rank {rank} waits for rank {peer}, which {other.doing.how}: all ranks have to run the same "
                    f"ops on global tensors in the same order\n{show_rank(rank, state)}\n{show_rank(peer, other)}"
                )
            if isinstance(other.doing, CollectiveWait):
                waits.setdefault(rank, []).append(peer)
    if not waits:
        return None
    cycle = sorted(shortest_cycle(waits))
    if not cycle:
        return None
    who = " and ".join(f"rank {rank}" for rank in cycle)
    lines = "\n".join(show_rank(rank, states[rank]) for rank in cycle)
    doings = [state.doing for rank in cycle if isinstance((state := states[rank]).doing, CollectiveWait)]
    if all(doing.is_of(doings[0]) for doing in doings):
        return f"{who} {MADE_OTHERWISE}\n{lines}"
    return (
        f"{who} wait for each other in different ops, for ever: all ranks have to run the same ops on global tensors "
        f"in the same order\n{lines}"
    )


def show_rank(rank: int, state: RankState) -> str:
    """One line about a rank."""
    where = f" ({state.where})" if state.where else ""
    if isinstance(state.doing, CollectiveWait):
        others = ",".join(map(str, state.doing.ranks))
        return f"  rank {rank} is in collective {state.doing.number} of ranks [{others}]: {state.doing.what}{where}"
    if isinstance(state.doing, ScriptEnd):
        return f"  rank {rank} {state.doing.how}"
    return f"  rank {rank} is in no collective{where}"


# ---- as text, for a store that all ranks share


def encode_state(state: RankState, beat: int) -> str:
    """A state and the number of the heartbeat that it belongs to, as text."""
    doing = state.doing
    return json.dumps(
        {
            "beat": beat,
            "waiting": asdict(doing) if isinstance(doing, CollectiveWait) else None,
            "ended": doing.how if isinstance(doing, ScriptEnd) else None,
            "entered": [[list(ranks), n] for ranks, n in state.entered.items()],
            "where": state.where,
        }
    )


def decode_state(text: str) -> tuple[RankState, int]:
    """The state and heartbeat that ``encode_state`` was given."""
    found = json.loads(text)
    doing: CollectiveWait | ScriptEnd | None = None
    if found["waiting"]:
        waiting = found["waiting"]
        doing = CollectiveWait(**{**waiting, "ranks": tuple(waiting["ranks"]), "peers": tuple(waiting["peers"])})
    elif found["ended"] is not None:
        doing = ScriptEnd(found["ended"])
    entered = {tuple(ranks): n for ranks, n in found["entered"]}
    return RankState(doing, entered, found["where"]), found["beat"]
