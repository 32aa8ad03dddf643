"""Find the ranks for which the others wait in the end, or the cycle in which ranks wait for each other.

>>> from actorflow.status.rank_status import QueueWait
>>> waiting = RankStatus(0, "a", 1, "", waits=(QueueWait("F1@0", "waits for …", (2,)),))
>>> verdict(3, {0: waiting, 2: RankStatus(2, "a", 3, "t.py:9")})
'rank 0 waits for rank 2, which waits for no other rank: it is at t.py:9'
"""

from __future__ import annotations

from collections.abc import Mapping

from actorflow.status.rank_status import RankStatus
from actorflow_compiler.core.units import ranges_text
from actorflow_scheduler.wait_graph import shortest_cycle

__all__ = ["edges", "has_cycle", "standing_circle", "verdict"]


def edges(standings: Mapping[int, RankStatus]) -> dict[int, dict[int, str]]:
    """For each rank, the ranks that it waits for, each with the reason as text."""
    found: dict[int, dict[int, str]] = {rank: {} for rank in standings}
    inside = {(s.rank, w.meets) for s in standings.values() for w in s.waits if w.meets}
    for rank, standing in standings.items():
        if standing.early:
            for late in standings.values():
                if late.calls < standing.calls:
                    found[rank].setdefault(late.rank, f"call {late.calls}, which it has not made")
        for wait in standing.waits:
            for other in wait.ranks:
                comes = wait.meets and (other, wait.meets) in inside
                if not comes and not (other in standings and standings[other].has_made(wait)):
                    found[rank].setdefault(other, f"{wait.actor} {wait.why}")
    return found


def verdict(world: int, standings: Mapping[int, RankStatus], before: Mapping[int, RankStatus] | None = None) -> str:
    """Say in one sentence which ranks wait for which ranks in the end.

    The ranks were not asked at the same moment, so a cycle among them proves nothing yet: each may wait for a message
    that the next one has sent since.  ``before`` are the answers of an earlier round.  Ranks on which nothing has
    happened between the two rounds were all in this state at the same moment; only a cycle among these is a deadlock.
    """
    if not standings:
        return "no rank answers"
    found = edges(standings)
    going = {rank for rank, now in standings.items() if now.busy or (before and _goes_on(before.get(rank), now))}
    graph = {rank: {} if rank in going else others for rank, others in found.items()}
    waiting = [rank for rank in sorted(graph) if graph[rank]]
    if not waiting:
        for_long = " for long" if any(found[rank] for rank in going) else ""
        return f"no rank waits for another one{for_long}"
    circle = shortest_cycle({rank: sorted(graph[rank]) for rank in waiting})
    if circle:
        chain = ", which waits for ".join(f"rank {rank}" for rank in (*circle[1:], circle[0]))
        said = "they wait in a circle" if before else "that may pass, ask again"
        return f"rank {circle[0]} waits for {chain}: {said}"
    ends = {rank: _ends(graph, rank) for rank in waiting}
    said_of = []
    for end in sorted(set().union(*ends.values())):
        held = [rank for rank in waiting if end in ends[rank]]
        who = f"rank{'s' * (len(held) > 1)} {ranges_text(held)} wait{'s' * (len(held) == 1)}"
        said_of.append(f"{who} for rank {end}, which {_at(standings.get(end), bool(found.get(end)))}")
    return "; ".join(said_of)


def has_cycle(standings: Mapping[int, RankStatus]) -> bool:
    """Whether ranks that are not busy wait for each other in a cycle, by the answers of one round."""
    return bool(shortest_cycle({rank: to for rank, to in edges(standings).items() if not standings[rank].busy}))


def standing_circle(before: Mapping[int, RankStatus], now: Mapping[int, RankStatus]) -> list[int]:
    """Ranks that wait for each other in a circle, each for the next, on which nothing happened between two rounds."""
    found = edges(now)
    still = {rank for rank in now if not now[rank].busy and not _goes_on(before.get(rank), now[rank])}
    return list(shortest_cycle({rank: sorted(found[rank].keys() & still) for rank in sorted(still)}))


def _goes_on(before: RankStatus | None, now: RankStatus) -> bool:
    """Whether anything has, or may have, happened on a rank since the earlier round."""
    return before is None or (before.moved, before.calls) != (now.moved, now.calls)


def _at(standing: RankStatus | None, goes_on: bool) -> str:
    if standing is None:
        return "does not answer"
    waits = "goes on" if goes_on else "waits for no other rank"
    if standing.doing:
        return f"{waits}: it {standing.doing}"
    if standing.rows:
        return f"waits for {standing.rows}"
    return waits + (f": it is at {standing.line}" if standing.line else "")


def _ends(graph: Mapping[int, Mapping[int, str]], rank: int) -> set[int]:
    """Of all ranks that a rank waits for, directly or indirectly, those that wait for no rank."""
    seen, todo = {rank}, [rank]
    while todo:
        new = set(graph.get(todo.pop(), ())) - seen
        seen |= new
        todo += new
    return {r for r in seen - {rank} if not graph.get(r)}
