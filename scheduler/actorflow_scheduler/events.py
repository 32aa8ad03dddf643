"""What the actor machine is told and what it answers: events, instructions, and the reasons for waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Plan


class CallIssued(NamedTuple):
    """One more iteration was called: every actor may fire ``rate`` times more."""


class ActorFinished(NamedTuple):
    """A fired actor is done: its tokens are written, what it read may go."""

    actor: int


class TokenArrived(NamedTuple):
    """The next token of a register that a remote "send" actor fills is complete on this rank."""

    register: int


class CreditReturned(NamedTuple):
    """The readers' rank freed a slot of a register that a "send" actor of this rank fills."""

    register: int


Event = CallIssued | ActorFinished | TokenArrived | CreditReturned
TokenUse = tuple[int, int, bool]  # register, number of the token since the start, does it end with this firing


class Fire(NamedTuple):
    """Run an actor; tell the machine ``ActorFinished`` when it is done.

    The token number n lies in slot ``n % slots`` of its register.
    """

    actor: int
    firing: int  # since the start; the piece is firing % rate
    reads: tuple[TokenUse, ...]  # the last field: the reader is done with the token after this firing
    writes: tuple[TokenUse, ...]  # the last field: this firing completes the token


class Release(NamedTuple):
    """All readers are done with a token: its data may be dropped."""

    register: int
    sequence: int


class GiveCredit(NamedTuple):
    """Tell the rank whose "send" actor fills the register that a slot of it is free."""

    register: int


Instruction = Fire | Release | GiveCredit


class Wait(NamedTuple):
    """One reason why an actor cannot fire now."""

    actor: int
    reason: str  # "empty" | "full": a register; "turn": its queue; "call": an iteration; "meet": a collective
    register: int  # -1 where no register is the reason
    on: tuple[int, ...]  # the actors that could end the wait


class IllegalEvent(AssertionError):
    """The machine was told something that cannot have happened; the message holds the object's last events."""


def name(plan: Plan, actor: int) -> str:
    """An actor for people: F0@rank1; its number where the plan is a part that does not list it."""
    found = next((a for a in plan.actors if a.id == actor), None)
    return f"actor {actor}" if found is None else f"{found.name}@rank{found.rank}"


def explain(plan: Plan, wait: Wait) -> str:
    """A wait for people: waits for register 3 (empty) filled by B1@rank1."""
    on = ", ".join(name(plan, a) for a in wait.on)
    if wait.reason == "empty":
        return f"waits for register {wait.register} (empty) filled by {on}"
    if wait.reason == "full":
        slots = plan.register(wait.register).slots
        where = plan.home(plan.register(wait.register))
        return f"waits for a slot of register {wait.register} (full, {slots} of {slots}) read on rank {where} by {on}"
    if wait.reason == "turn":
        return f"waits for its turn on queue {plan.actor(wait.actor).queue} behind {on}"
    if wait.reason == "meet":
        comm = plan.actor(wait.actor).comm
        assert comm is not None
        return f"waits in {comm.kind} {comm.id} for {on}"
    return "waits for the next call"


def deadlock(plan: Plan, path: Sequence[Wait], circle: bool) -> DeadlockError:
    """The error for actors that wait for each other; with ``circle`` the last one waits for the first."""
    lines = [f"{name(plan, w.actor)} {explain(plan, w)}" for w in path]
    return DeadlockError(
        f"plan {plan.name!r} would wait for ever:\n  "
        + ";\n  ".join(lines)
        + (f";\n  and so on from {name(plan, path[0].actor)}" if circle else "")
        + "\nexpected: every cycle holds a token or a free slot, "
        "and all ranks issue their collectives in one order; "
        "give a register of the cycle an initial token or more slots, or reorder its queues"
    )
