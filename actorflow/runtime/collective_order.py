"""Keep one rank's NCCL calls in the order in which all ranks make them.

NCCL hangs unless all ranks make the calls that they share in the same order.  A plan fixes this order for one iteration
(``Plan.calls``), and every rank calls jobs, and so begins iterations, in the same order.  So the sequence of a rank's
NCCL calls is known in advance, and a firing that comes early is held back.  A receive is posted when its place in the
sequence has come and its register has a free slot; it does not wait for a message from the sender.

This module uses no threads and no tensors; a ``CollectiveOrder`` is for one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Collective, CollectiveKind, Plan, Plane

__all__ = ["NcclCall", "PairCall", "PostedReceive", "CollectiveOrder", "nccl_calls"]

T = TypeVar("T")


class PairCall(StrEnum):
    """A rank's side of a send."""

    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class NcclCall:
    """One NCCL call of an iteration, as one rank makes it."""

    kind: CollectiveKind | PairCall
    comm: int  # id of the communication; the same on all ranks that take part
    ranks: tuple[int, ...]  # the ranks that take part; (from, to) for a send and its receive
    actor: int  # the actor that communicates; for a receive, the sending actor
    name: str  # of the actor, for messages
    register: int = -1  # the register that a send and its receive fill

    def __str__(self) -> str:
        ranks = ">".join(map(str, self.ranks)) if isinstance(self.kind, PairCall) else list(self.ranks)
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
            kind = PairCall.SEND if comm.from_rank == rank else PairCall.RECEIVE
            found.append(NcclCall(kind, comm.id, comm.ranks, id, actor.name, filled[0]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PostedReceive:
    """A receive whose place in the order has come."""

    plan: int
    register: int  # the register that it fills
    sequence: int  # number of the token since the plan was installed
    call: NcclCall


class CollectiveOrder(Generic[T]):
    """Puts the NCCL calls of one rank in order: firings come in any order and are launched in the plan's order.

    ``T`` is a firing of a communication; receives are ``PostedReceive``.

    On a device that runs ahead, a receiver may launch a receive and all that reads its token before the sender has
    fired.  The credit then comes early, and is held back until the send fires.  It does so in calls that both have made
    alone, so that early credits are never more than the tokens which are still to be sent in these.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[NcclCall, ...]] = {}
        self._next: deque[tuple[int, NcclCall]] = deque()  # the calls that are still to be launched
        self._fired: dict[tuple[int, int], deque[T]] = {}  # (plan, actor) → firings that wait for calls before them
        self._free: dict[tuple[int, int], int] = {}  # (plan, register) → free slots
        self._posted: dict[tuple[int, int], int] = {}  # (plan, register) → number of the next token
        self._sends: dict[tuple[int, int], int] = {}  # (plan, actor) → register that it fills on another rank
        self._lent: dict[tuple[int, int], int] = {}  # (plan, register) → tokens sent − credits; < 0: they came early
        self._unsent: dict[tuple[int, int], int] = {}  # (plan, register) → tokens that calls which are made still send

    def __bool__(self) -> bool:
        """Whether a call is still to be launched."""
        return bool(self._next)

    def install(self, plan: int, made: tuple[NcclCall, ...], registers: Mapping[int, tuple[int, int]]) -> None:
        """Add a plan by its number, with its NCCL calls and, by register that they fill, (slots, initial tokens)."""
        self._plans[plan] = made
        for call in made:
            if call.register >= 0:
                slots, initial = registers[call.register]
                key = plan, call.register
                if call.kind is PairCall.RECEIVE:
                    self._free[key], self._posted[key] = slots - initial, initial
                else:
                    self._sends[plan, call.actor], self._lent[key] = call.register, initial
                    self._unsent[key] = 0

    def drop(self, plan: int) -> None:
        """Forget a plan, all of whose calls have been launched."""
        self._plans.pop(plan, None)
        of_keys: tuple[dict[tuple[int, int], Any], ...] = (
            self._fired, self._free, self._posted, self._sends, self._lent, self._unsent,
        )  # fmt: skip
        for known in of_keys:
            for key in [key for key in known if key[0] == plan]:
                del known[key]

    def made(self, plan: int) -> None:
        """Note that one more call of a plan is made here, which begins later: from now on a receiver may be ahead."""
        for call in self._plans[plan]:
            if call.kind is PairCall.SEND:
                self._unsent[plan, call.register] += 1

    def begin(self, plan: int) -> None:
        """Add the calls of one more iteration of a plan; every rank begins iterations in the same order."""
        self._next.extend((plan, call) for call in self._plans[plan])

    def fired(self, plan: int, actor: int, firing: T) -> int | None:
        """Note that a communication has fired, to be launched in its place.

        Returns the register that it fills if the credit for this firing came early and can be handed to the machine
        now; else None.
        """
        self._fired.setdefault((plan, actor), deque()).append(firing)
        register = self._sends.get((plan, actor))
        if register is None:
            return None
        self._lent[plan, register] += 1
        self._unsent[plan, register] -= 1
        return register if self._lent[plan, register] <= 0 else None

    def may_be_credited(self, plan: int, register: int) -> bool:
        """Whether a token is lent, or will be in a call that is made, for which there has been no credit."""
        key = plan, register
        return key not in self._lent or self._lent[key] + self._unsent[key] > 0

    def credited(self, plan: int, register: int) -> bool:
        """Note a credit; return whether to hand it to the machine now, rather than when the send fires."""
        lent = self._lent.get((plan, register))
        if lent is None:
            return True
        self._lent[plan, register] = lent - 1
        return lent > 0

    def freed(self, plan: int, register: int) -> None:
        """Note that a slot of a register is free again; ignored for a register that no receive fills."""
        if (plan, register) in self._free:
            self._free[plan, register] += 1

    def ready(self) -> list[T | PostedReceive]:
        """The firings and receives that can be launched now, in order; each is returned once."""
        leaving: list[T | PostedReceive] = []
        while self._next:
            plan, call = self._next[0]
            if call.kind is PairCall.RECEIVE:
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
        """What the next NCCL call waits for, as text; empty if there is none."""
        if not self._next:
            return ""
        plan, call = self._next[0]
        why = f"a free slot of register {call.register}" if call.kind is PairCall.RECEIVE else "its actor to fire"
        held = sum(map(len, self._fired.values()))
        return f"next NCCL call, of {len(self._next)}: {call} of plan {plan}, waits for {why}; {held} wait behind it"
