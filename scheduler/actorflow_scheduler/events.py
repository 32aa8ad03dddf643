"""Events and instructions of the actor machine, and the reasons why an actor waits, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Plan


class CallIssued(NamedTuple):
    """An iteration was called: every actor may fire ``rate`` more times."""


class ActorFinished(NamedTuple):
    """A firing ended: the tokens that it writes are written, and it no longer needs the tokens that it reads."""

    actor: int


class TokenArrived(NamedTuple):
    """The next token of a register that another rank's "send" actor fills is complete on this rank."""

    register: int


class CreditReturned(NamedTuple):
    """The readers' rank freed a slot of a register that this rank's "send" actor fills."""

    register: int


Event = CallIssued | ActorFinished | TokenArrived | CreditReturned
TokenUse = tuple[int, int, bool]  # register, token's number since the start, whether it is the last firing to use it


class Fire(NamedTuple):
    """Run an actor once; when it has ended, the caller must report ``ActorFinished``.

    Token number n lies in slot ``n % slots`` of its register.
    """

    actor: int
    firing: int  # number since the start; the micro-batch is firing % rate
    reads: tuple[TokenUse, ...]  # last field: the actor does not need the token after this firing
    writes: tuple[TokenUse, ...]  # last field: this firing completes the token


class Release(NamedTuple):
    """Drop a token's data: all readers are done with it."""

    register: int
    sequence: int


class GiveCredit(NamedTuple):
    """Send a credit: tell the rank whose "send" actor fills the register that one of its slots is free."""

    register: int


Instruction = Fire | Release | GiveCredit


class WaitReason(StrEnum):
    """The kind of a wait."""

    EMPTY = "empty"  # a token of a register that it reads
    FULL = "full"  # a free slot of a register that it writes
    TURN = "turn"  # actors before it in the order of its queue
    CALL = "call"  # the call of the next iteration
    MEET = "meet"  # the other members of its collective


class Wait(NamedTuple):
    """One reason why an actor cannot fire now."""

    actor: int
    reason: WaitReason
    register: int  # -1 unless the reason is EMPTY or FULL
    on: tuple[int, ...]  # the actors that could end the wait


class IllegalEvent(AssertionError):
    """An event that cannot have happened; the message lists the last events of the actor or register."""


def name(plan: Plan, actor: int) -> str:
    """An actor as text, such as ``F0@rank1``; only its number if the plan is one rank's part and does not list it."""
    found = next((a for a in plan.actors if a.id == actor), None)
    return f"actor {actor}" if found is None else f"{found.name}@rank{found.rank}"


def explain(plan: Plan, wait: Wait) -> str:
    """A wait as text, such as ``waits for register 3 (empty) filled by B1@rank1``."""
    on = ", ".join(name(plan, a) for a in wait.on)
    match wait.reason:
        case WaitReason.EMPTY:
            return f"waits for register {wait.register} (empty) filled by {on}"
        case WaitReason.FULL:
            register = plan.register(wait.register)
            full = f"full, {register.slots} of {register.slots}"
            return f"waits for a slot of register {wait.register} ({full}) read on rank {plan.home(register)} by {on}"
        case WaitReason.TURN:
            return f"waits for its turn on queue {plan.actor(wait.actor).queue} behind {on}"
        case WaitReason.MEET:
            comm = plan.actor(wait.actor).comm
            assert comm is not None
            return f"waits in {comm.label} {comm.id} for {on}"
        case WaitReason.CALL:
            return "waits for the next call"


def deadlock(plan: Plan, path: Sequence[Wait], cycle: bool) -> DeadlockError:
    """The error for a chain of actors, each of which waits for the next; with ``cycle``, the last for the first."""
    lines = [f"{name(plan, w.actor)} {explain(plan, w)}" for w in path]
    return DeadlockError(
        f"plan {plan.name!r} would wait for ever:\n  "
        + ";\n  ".join(lines)
        + (f";\n  and so on from {name(plan, path[0].actor)}" if cycle else "")
        + "\nexpected: every cycle holds a token or a free slot, "
        "and all ranks issue their collectives in one order; "
        "give a register of the cycle an initial token or more slots, or reorder its queues"
    )
