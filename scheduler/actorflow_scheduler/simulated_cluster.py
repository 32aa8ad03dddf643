"""All ranks' machines, joined: an event of one rank enters, the instructions of all ranks leave.

Messages between ranks arrive at once.  Whoever drives the cluster (the timeline, the search for
slot counts) decides only how long a firing takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.events import (
    ActorFinished,
    CallIssued,
    CreditReturned,
    Fire,
    GiveCredit,
    Instruction,
    TokenArrived,
    Wait,
    deadlock,
)
from actorflow_scheduler.machine import Machine
from actorflow_scheduler.wait_graph import shortest_cycle


class SimulatedCluster:
    """The machines of a whole plan.

    ``parts`` are the ranks' own parts, where the machines are to know no more than in a real run.
    """

    def __init__(self, plan: Plan, parts: Mapping[int, Plan] | None = None) -> None:
        self.plan = plan
        self.machines = {
            rank: Machine(parts[rank] if parts else plan, rank) for rank in sorted({a.rank for a in plan.actors})
        }
        self.together: dict[int, tuple[int, ...]] = {}  # member of a collective → all its members
        self._machine = {a.id: self.machines[a.rank] for a in plan.actors}
        self._reader: dict[int, Machine] = {}  # register that a send fills → where it is read
        self._filler: dict[int, Machine] = {}  # the same → where it is filled
        self._senders: set[int] = set()
        self._parked: dict[int, list[Fire]] = {}  # first member → the firings that wait for the other members
        members: dict[int, list[int]] = {}
        for a in plan.actors:
            if a.comm is not None and a.comm.kind != "send":
                members.setdefault(a.comm.id, []).append(a.id)
        for group in members.values():
            self.together |= dict.fromkeys(group, tuple(group))
        for r in plan.registers:
            if plan.home(r) != plan.actor(r.producer).rank:
                self._reader[r.id] = self.machines[plan.home(r)]
                self._filler[r.id] = self._machine[r.producer]
                self._senders.add(r.producer)

    def issue(self) -> list[Instruction]:
        """Call one more iteration on every rank."""
        return [i for machine in self.machines.values() for i in machine.handle(CallIssued())]

    def meet(self, fire: Fire) -> list[Fire]:
        """The firings that can proceed now that this one was started: none, one, or a whole collective."""
        members = self.together.get(fire.actor)
        if members is None:
            return [fire]
        parked = self._parked.setdefault(members[0], [])
        parked.append(fire)
        if len(parked) < len(members):
            return []
        return self._parked.pop(members[0])

    def finish(self, fire: Fire) -> list[Instruction]:
        """A firing is done: what all ranks do next; credits are passed on here."""
        out = self._machine[fire.actor].handle(ActorFinished(fire.actor))
        if fire.actor in self._senders:
            for register, _, last in fire.writes:
                if last:
                    out += self._reader[register].handle(TokenArrived(register))
        for instruction in out:  # grows: what a credit sets free is appended
            if isinstance(instruction, GiveCredit):
                out += self._filler[instruction.register].handle(CreditReturned(instruction.register))
        return out

    def idle(self) -> bool:
        """Whether every iteration that was called is done on every rank."""
        return all(machine.idle() for machine in self.machines.values())

    def tokens(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(Rank, register) → the tokens that hold its slots, as ``Machine.tokens`` gives them."""
        return {(rank, r): n for rank, m in self.machines.items() for r, n in m.tokens().items()}

    def deadlock(self) -> DeadlockError:
        """The error for a cluster in which nothing runs and work is left; it prints the cycle, actor by actor."""
        stuck: int | None = next(a for machine in self.machines.values() for a in machine.unfinished())
        waits: dict[int, Wait] = {}
        while stuck is not None and stuck not in waits:
            waits[stuck] = wait = self._wait(stuck)
            stuck = next(iter(wait.on), None)
        cycle = shortest_cycle({actor: wait.on[:1] for actor, wait in waits.items()})
        return deadlock(self.plan, [waits[actor] for actor in cycle or waits], bool(cycle))

    def _wait(self, actor: int) -> Wait:
        """The first reason why an actor is stuck; one that runs, or is ready, is in a collective."""
        waits = self._machine[actor].waits(actor)
        if not waits:
            members = self.together[actor]
            here = {f.actor for f in self._parked.get(members[0], ())}
            absent = tuple(m for m in members if m not in here and (here or self._machine[m].waits(m)))
            return Wait(actor, "meet", -1, absent)
        wait = waits[0]
        if wait.reason == "full" and wait.register in self._reader:
            return wait._replace(on=self._reader[wait.register].laggards(wait.register))
        return wait
