"""Connect the actor machines of all ranks of a plan, to run the whole plan without a clock.

Messages between ranks arrive at once, and the caller decides when each firing ends.  The liveness proof runs a plan in
this way, and the error for a deadlock is made from the state of the machines that got stuck.
"""

from __future__ import annotations

from collections.abc import Mapping

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Collective, Plan
from actorflow_scheduler.events import (
    ActorFinished,
    CallIssued,
    CreditReturned,
    Fire,
    GiveCredit,
    Instruction,
    TokenArrived,
    Wait,
    WaitReason,
    deadlock,
)
from actorflow_scheduler.machine import Machine
from actorflow_scheduler.wait_graph import shortest_cycle


class SimulatedCluster:
    """The machines of all ranks of a plan.

    With ``parts`` (rank → ``plan.for_rank(rank)``) each machine knows only its rank's part, as in a real run.
    """

    def __init__(self, plan: Plan, parts: Mapping[int, Plan] | None = None) -> None:
        self.plan = plan
        self.machines = {
            rank: Machine(parts[rank] if parts else plan, rank) for rank in sorted({a.rank for a in plan.actors})
        }
        self.together: dict[int, tuple[int, ...]] = {}  # member of a collective → all its members
        self._machine = {a.id: self.machines[a.rank] for a in plan.actors}
        self._reader: dict[int, Machine] = {}  # register filled by a send → the machine of the rank that reads it
        self._filler: dict[int, Machine] = {}  # register filled by a send → the machine of the rank that sends
        self._senders: set[int] = set()
        self._parked: dict[int, list[Fire]] = {}  # collective's first member → firings waiting for the other members
        members: dict[int, list[int]] = {}
        for a in plan.actors:
            if isinstance(a.comm, Collective):
                members.setdefault(a.comm.id, []).append(a.id)
        for group in members.values():
            self.together |= dict.fromkeys(group, tuple(group))
        for r in plan.registers:
            if plan.home(r) != plan.actor(r.producer).rank:
                self._reader[r.id] = self.machines[plan.home(r)]
                self._filler[r.id] = self._machine[r.producer]
                self._senders.add(r.producer)

    def issue(self) -> list[Instruction]:
        """Start one more iteration on every rank."""
        return [i for machine in self.machines.values() for i in machine.handle(CallIssued())]

    def meet(self, fire: Fire) -> list[Fire]:
        """Start a firing; return the firings that can run now.

        The members of a collective run together, when all of them have started; until then the result is empty.
        """
        members = self.together.get(fire.actor)
        if members is None:
            return [fire]
        parked = self._parked.setdefault(members[0], [])
        parked.append(fire)
        if len(parked) < len(members):
            return []
        return self._parked.pop(members[0])

    def finish(self, fire: Fire) -> list[Instruction]:
        """End a firing, deliver its tokens and credits to other ranks, and return the instructions of all ranks."""
        out = self._machine[fire.actor].handle(ActorFinished(fire.actor))
        if fire.actor in self._senders:
            for register, _, last in fire.writes:
                if last:
                    out += self._reader[register].handle(TokenArrived(register))
        for instruction in out:  # the list grows: a credit may let more actors fire
            if isinstance(instruction, GiveCredit):
                out += self._filler[instruction.register].handle(CreditReturned(instruction.register))
        return out

    def run(self, iterations: int) -> bool:
        """Start some iterations and run them as far as possible; return whether all of them ended."""
        todo = [i for _ in range(iterations) for i in self.issue()]
        while todo:
            instruction = todo.pop()
            if isinstance(instruction, Fire):
                for fire in self.meet(instruction):
                    todo += self.finish(fire)
        return self.idle()

    def idle(self) -> bool:
        """Whether every iteration that was started has ended on every rank."""
        return all(machine.idle() for machine in self.machines.values())

    def tokens(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(Rank, register) → the tokens in its slots, as in ``Machine.tokens``."""
        return {(rank, r): n for rank, m in self.machines.items() for r, n in m.tokens().items()}

    def deadlock(self) -> DeadlockError:
        """The error for a plan in which nothing can fire although work is left; it shows the cycle of waits."""
        stuck: int | None = next(a for machine in self.machines.values() for a in machine.unfinished())
        waits: dict[int, Wait] = {}
        while stuck is not None and stuck not in waits:
            waits[stuck] = wait = self._wait(stuck)
            stuck = next(iter(wait.on), None)
        cycle = shortest_cycle({actor: wait.on[:1] for actor, wait in waits.items()})
        return deadlock(self.plan, [waits[actor] for actor in cycle or waits], bool(cycle))

    def _wait(self, actor: int) -> Wait:
        """The first reason why an actor is stuck; if its machine knows none, it waits in a collective."""
        waits = self._machine[actor].waits(actor)
        if not waits:
            members = self.together[actor]
            here = {f.actor for f in self._parked.get(members[0], ())}
            absent = tuple(m for m in members if m not in here and (here or self._machine[m].waits(m)))
            return Wait(actor, WaitReason.MEET, -1, absent)
        wait = waits[0]
        if wait.reason is WaitReason.FULL and wait.register in self._reader:
            return wait._replace(on=self._reader[wait.register].laggards(wait.register))
        return wait
