"""Which ranks of a plan must show each other that they have made the same call, and what then follows for a change.

A call begins on a rank as soon as its script makes it.  Tokens of another rank follow that rank's stamp of the call, on
the same link.  Collectives mix up what ranks bring that made other calls, so that a rank joins one only when it has the
stamps of others: of all in a small group, else of the one before it in the group.  Where all need what all bring, that
is enough: if two ranks of a group differ, two neighbours do, and the collective never ends without the second of these.
A rank of a large group that gets something of a few may get it of one that differs; it is not wrong for long, as the
master finds the difference and ends the run.
"""

from __future__ import annotations

from collections import defaultdict

from actorflow_compiler.core.sbp import Broadcast
from actorflow_compiler.plan.plan import ActorKind, Collective, CollectiveKind, Exchange, Plan, Send, Variable

__all__ = ["begins_freely", "stamp_peers", "stamps_before", "stamps_from", "stamps_to", "whole_everywhere"]

FEW = 8  # ranks of a group, up to which each shows all others its stamp


def stamps_before(group: Collective, rank: int) -> tuple[int, ...]:
    """The ranks whose stamp of a call a rank must have before it joins a collective of the call."""
    ranks = group.ranks
    if len(ranks) <= FEW:
        return tuple(other for other in ranks if other != rank)
    return (ranks[ranks.index(rank) - 1],)


def stamps_to(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks to which a rank sends its stamp when it makes a call of a plan, ascending.

    ``plan`` is a whole plan or ``plan.for_rank(rank)``.
    """
    found: set[int] = set()
    for actor in plan.actors:
        comm = actor.comm
        if actor.rank != rank or comm is None:
            continue
        if isinstance(comm, Send):
            found.add(comm.to_rank)
        else:
            found.update(other for other in comm.ranks if rank in stamps_before(comm, other))
    return tuple(sorted(found - {rank}))


def stamps_from(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that send their stamps to this one when they make a call of a plan, ascending; see ``stamps_to``."""
    found: set[int] = set()
    for actor in plan.actors:
        comm = actor.comm
        if isinstance(comm, Send):
            found.update((comm.from_rank,) if comm.to_rank == rank else ())
        elif comm is not None and actor.rank == rank:
            found.update(stamps_before(comm, rank))
    return tuple(sorted(found - {rank}))


def stamp_peers(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that send stamps to this one or get its own, ascending; see ``stamps_to``."""
    return tuple(sorted({*stamps_to(plan, rank), *stamps_from(plan, rank)}))


def whole_everywhere(variable: Variable, world: int) -> bool:
    """Whether every rank of the run has the whole variable, so that no rank asks another one for it."""
    held = set(variable.placement.ranks) >= set(range(world))
    return held and all(isinstance(entry, Broadcast) for entry in variable.sbp)


def begins_freely(plan: Plan) -> bool:
    """Whether a rank can begin a call of a whole plan before it is known that all others have made the call.

    Another rank may still read, from this one, what a variable was before the call.  So each change of a variable must
    follow, by tokens and stamps, from the call of every rank of the plan that would have to ask for its value.  Ranks
    that have no part in the plan, beyond that they may get its arguments, are not waited for.
    """
    known = _known(plan)
    members = {actor.rank for actor in plan.actors if actor.kind != ActorKind.SOURCE}
    for actor in plan.actors:
        for name in plan.changed_by(actor):
            variable = plan.variable(name)
            if variable is None:
                continue
            asking = members - {actor.rank}
            if all(isinstance(entry, Broadcast) for entry in variable.sbp):
                asking -= set(variable.placement.ranks)
            if any(not known[actor.id] >> rank & 1 for rank in asking):
                return False
    return True


def _known(plan: Plan) -> dict[int, int]:
    """Actor → the ranks, as bits, that have made a call by the time that the actor fires in it."""
    before: defaultdict[int, list[int]] = defaultdict(list)  # actor → those whose tokens of the same call it reads
    for register in plan.registers:
        if not register.initial:
            for read in register.readers:
                before[read.actor].append(register.producer)
    members: defaultdict[int, list[int]] = defaultdict(list)  # communication → the actors of a collective
    for actor in plan.actors:
        if isinstance(actor.comm, Collective):
            members[actor.comm.id].append(actor.id)
    known = {actor.id: 1 << actor.rank for actor in plan.actors}
    for actor in plan.actors:
        if isinstance(actor.comm, Collective):
            known[actor.id] |= sum(1 << rank for rank in stamps_before(actor.comm, actor.rank))
            if _of_all(actor.comm, actor.rank):
                before[actor.id] += [other for other in members[actor.comm.id] if other != actor.id]
    after: defaultdict[int, list[int]] = defaultdict(list)
    for actor_id, those in before.items():
        for other in those:
            after[other].append(actor_id)
    todo = list(known)
    while todo:
        here = todo.pop()
        for other in after[here]:
            if known[here] & ~known[other]:
                known[other] |= known[here]
                todo.append(other)
    return known


def _of_all(comm: Collective, rank: int) -> bool:
    """Whether a rank's outputs of a collective need what every member brings, so that all have joined when it ends."""
    if comm.kind is CollectiveKind.ALL_REDUCE:
        return True
    at = comm.ranks.index(rank)

    def brought(exchange: Exchange, member: int) -> bool:
        return any(all(box.size) for box in exchange.receive[member])

    return all(
        any(brought(exchange, member) for exchange in comm.exchanges)
        for member in range(len(comm.ranks))
        if member != at
    )
