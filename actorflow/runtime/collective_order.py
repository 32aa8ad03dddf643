"""Keep one rank's NCCL calls in the order in which all ranks make them.

NCCL hangs unless all ranks make the calls that they share in one order.  A plan freezes it for one iteration
(``Plan.calls``); iterations follow each other as the calls of jobs do, which every rank makes in the same order.  So a
rank's sequence is known before anything happens, and what comes early is held back.  A receive is posted in its place,
as soon as its register has a free slot, not when its peer announces what it sends.

No threads and no tensors here; for one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Collective, Plan, Plane

__all__ = ["NcclCall", "PostedReceive", "CollectiveOrder", "nccl_calls"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NcclCall:
    """One call of one iteration, as one rank makes it."""

    kind: str  # a ``CollectiveKind``, "send" or "receive"
    comm: int  # the logical communication; those who take part share it
    ranks: tuple[int, ...]  # who take part; (from, to) of a send and its receive
    actor: int  # who communicates; of a receive the sender
    name: str  # the actor's, for people
    register: int = -1  # that a send fills, and its receive

    def __str__(self) -> str:
        ranks = ">".join(map(str, self.ranks)) if self.kind in ("send", "receive") else list(self.ranks)
        return f"{self.kind} {ranks} ({self.name})"


def nccl_calls(plan: Plan, rank: int) -> tuple[NcclCall, ...]:
    """All NCCL calls of a rank in one iteration, in order.

    ``plan`` is a whole plan or ``plan.for_rank(rank)``; both give the same.  Raises PlanError for a send that
    fills more or less than one register.
    """
    found: list[NcclCall] = []
    for order in plan.calls:
        if (order.rank, order.queue) != (rank, Plane.NCCL):
            continue
        for id in order.actors:
            actor = plan.actor(id)
            comm = actor.comm
            assert comm is not None, f"{actor.name} communicates nothing"
            if isinstance(comm, Collective):
                found.append(NcclCall(comm.kind, comm.id, comm.ranks, id, actor.name))
                continue
            filled = [register.id for register in plan.outputs_of[id]]
            if len(filled) != 1:
                raise PlanError(f"plan {plan.name!r}: actor {actor.name}: a send fills one register, not {len(filled)}")
            kind = "send" if comm.from_rank == rank else "receive"
            found.append(NcclCall(kind, comm.id, comm.ranks, id, actor.name, filled[0]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PostedReceive:
    """A receive that is next in the order."""

    plan: int
    register: int  # that it fills
    sequence: int  # number of the token since the plan was installed
    call: NcclCall


class CollectiveOrder(Generic[T]):
    """The NCCL calls of one rank: firings come in any order, and are launched in the order of the calls.

    ``T`` is a firing of a communication; receives are ``PostedReceive``.

    On a device that runs ahead a receiver may launch a receive, and all that reads it, before the sender has
    fired: its credit comes early, and is kept for the firing that it is for.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[NcclCall, ...]] = {}
        self._next: deque[tuple[int, NcclCall]] = deque()  # the calls that are still to be launched
        self._fired: dict[tuple[int, int], deque[T]] = {}  # (plan, actor) → firings that wait for calls before them
        self._free: dict[tuple[int, int], int] = {}  # (plan, register) → free slots
        self._posted: dict[tuple[int, int], int] = {}  # (plan, register) → number of the next token
        self._sends: dict[tuple[int, int], int] = {}  # (plan, actor) → register that it fills on another rank
        self._lent: dict[tuple[int, int], int] = {}  # (plan, register) → its firings without the credits; may be < 0

    def __bool__(self) -> bool:
        """Whether a call is still to be launched."""
        return bool(self._next)

    def install(self, plan: int, made: tuple[NcclCall, ...], registers: Mapping[int, tuple[int, int]]) -> None:
        """Take in a plan by its number: its calls, and register → (slots, initial tokens) of what they fill."""
        self._plans[plan] = made
        for call in made:
            if call.register >= 0:
                slots, initial = registers[call.register]
                key = plan, call.register
                if call.kind == "receive":
                    self._free[key], self._posted[key] = slots - initial, initial
                else:
                    self._sends[plan, call.actor], self._lent[key] = call.register, initial

    def drop(self, plan: int) -> None:
        """Forget a plan, all of whose calls have been launched."""
        self._plans.pop(plan, None)
        of_keys: tuple[dict[tuple[int, int], Any], ...] = self._fired, self._free, self._posted, self._sends, self._lent
        for known in of_keys:
            for key in [key for key in known if key[0] == plan]:
                del known[key]

    def begin(self, plan: int) -> None:
        """One more iteration of a plan was called; every rank calls them in the same order."""
        self._next.extend((plan, call) for call in self._plans[plan])

    def fired(self, plan: int, actor: int, firing: T) -> int | None:
        """A communication has fired.

        Returns a register whose credit has come already, and may be given to the machine now; else None.
        """
        self._fired.setdefault((plan, actor), deque()).append(firing)
        register = self._sends.get((plan, actor))
        if register is None:
            return None
        self._lent[plan, register] += 1
        return register if self._lent[plan, register] <= 0 else None

    def credited(self, plan: int, register: int) -> bool:
        """A credit has come; whether to give it to the machine now, rather than when the actor fires."""
        lent = self._lent.get((plan, register))
        if lent is None:
            return True
        self._lent[plan, register] = lent - 1
        return lent > 0

    def freed(self, plan: int, register: int) -> None:
        """A slot of a register is free again; ignored where no receive fills it."""
        if (plan, register) in self._free:
            self._free[plan, register] += 1

    def ready(self) -> list[T | PostedReceive]:
        """What can be launched now, in order; each is returned once."""
        leaving: list[T | PostedReceive] = []
        while self._next:
            plan, call = self._next[0]
            if call.kind == "receive":
                key = plan, call.register
                if not self._free[key]:
                    break
                self._free[key] -= 1
                leaving.append(PostedReceive(plan, call.register, self._posted[key], call))
                self._posted[key] += 1
            else:
                fired = self._fired.get((plan, call.actor))
                if not fired:
                    break
                leaving.append(fired.popleft())
            self._next.popleft()
        return leaving

    def waiting(self) -> str:
        """What the next call waits for, as text; empty where there is none."""
        if not self._next:
            return ""
        plan, call = self._next[0]
        why = f"a free slot of register {call.register}" if call.kind == "receive" else "its actor to fire"
        held = sum(map(len, self._fired.values()))
        return f"next NCCL call, of {len(self._next)}: {call} of plan {plan}, waits for {why}; {held} wait behind it"
