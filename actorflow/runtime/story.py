"""What a thread is at, and what went wrong there, enter; text and errors for people leave."""

from __future__ import annotations

from actorflow.runtime.job import Unit
from actorflow.runtime.kernels import culprit
from actorflow.runtime.messages import Ready
from actorflow_compiler.errors import ActorError, ActorflowError
from actorflow_scheduler.machine import Fire


def firing(unit: Unit, fire: Fire) -> str:
    """What a thread does that fires an actor."""
    comm = unit.comm
    what = "fires" if comm is None else f"{comm.kind} {comm.id} with ranks {list(comm.group)} for"
    return f"{what} {unit.actor.name}, firing {fire.firing}"


def receiving(ready: Ready) -> str:
    """What a thread does that receives a token."""
    return f"receives token {ready.sequence} of register {ready.register} of plan {ready.plan}"


def actor_error(rank: int, unit: Unit, fire: Fire, error: BaseException) -> BaseException:
    """The error of an actor that failed: rank, actor, firing, and the op or communication."""
    comm = unit.comm
    op = "" if unit.body is None else culprit(unit.body, error)
    if comm is not None:
        op = f"{comm.kind} {comm.id} over ranks {list(comm.group)}"
    return wrapped(error, f"rank {rank}, actor {unit.actor.name}, firing {fire.firing}{f', {op}' if op else ''}")


def wrapped(error: BaseException, where: str) -> BaseException:
    """An ActorflowError as it is, anything else as the cause of one that says where it was raised."""
    if isinstance(error, ActorflowError):
        return error
    made = ActorError(f"{where}: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
