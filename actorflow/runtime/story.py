"""Texts that say what the threads of a rank are doing, and errors that say what failed there."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from actorflow.runtime.actor_units import ActorUnit, ComputeUnit
from actorflow.runtime.bodies.kernels import culprit
from actorflow.runtime.call import Call
from actorflow.runtime.collective_order import PostedReceive
from actorflow.runtime.installed_plan import InstalledPlan
from actorflow.runtime.memory import out_of_memory, ran_out
from actorflow.transport.messages import Filled, Ready
from actorflow.transport.timeouts import Started
from actorflow_compiler.core.errors import ActorError, ActorflowError, ClusterError
from actorflow_compiler.core.user_code import with_code
from actorflow_compiler.plan.plan import Body, Plan
from actorflow_scheduler.machine import Fire


def firing(unit: ActorUnit, fire: Fire) -> str:
    """Describe a thread that fires an actor."""
    comm = unit.actor.comm
    what = "fires" if comm is None else f"{comm.label} {comm.id} with ranks {list(comm.ranks)} for"
    return f"{what} {unit.actor.name}, firing {fire.firing}"


def receiving(what: Ready | PostedReceive | Filled) -> str:
    """Describe a thread that receives a token."""
    return f"receives token {what.sequence} of register {what.register} of plan {what.plan}"


def explain_plans(job: InstalledPlan | None, waits: tuple[Call, InstalledPlan] | None, early: bool) -> list[str]:
    """Lines that say what the queues of the running plan ``job`` wait for, and what the next call ``waits`` for.

    ``early``: that call waits for other ranks to issue it, not for the calls before it.
    """
    lines = []
    if job is not None:
        lines.append(f"plan {job.number} {job.plan.name!r}:")
        lines += [f"  {line}" for line in job.machine.waiting()]
    if waits is not None:
        call, plan = waits[0], waits[1].plan
        why = "the permit of all ranks" if early else "the calls before it"
        lines.append(f"call {call.number} of plan {call.plan} {plan.name!r} waits for {why}")
    return lines


def actor_error(
    rank: int, unit: ActorUnit, fire: Fire, error: BaseException, plan: Plan | None = None
) -> BaseException:
    """The error to raise for an actor that failed.

    It names the rank, the actor, the firing, the op or communication, and the line of the user's code that the op comes
    from by ``plan``.  If memory ran out, it also says what ``plan`` needs.
    """
    comm, body = unit.actor.comm, _body(unit)
    step = None if body is None else culprit(body, error)
    op = "" if step is None or body is None else f", {body.steps[step].op}"
    if comm is not None:
        op = f", {comm.label} {comm.id} over ranks {list(comm.ranks)}"
    line = "" if plan is None or step is None else _source_line(plan, unit.actor.id, step)
    where = f"rank {rank}, actor {unit.actor.name}, firing {fire.firing}{op}{line}"
    if plan is not None and ran_out(error):
        return out_of_memory(rank, plan, where, error)
    return wrapped(error, where)


def line_of(unit: ActorUnit, error: BaseException, plan: Plan) -> str:
    """The line of the user's code at which an actor failed; "" if it is not known."""
    body = _body(unit)
    step = None if body is None else culprit(body, error)
    place = None if step is None else plan.origins.place_of(unit.actor.id, step)
    return "" if place is None else place.line


def _body(unit: ActorUnit) -> Body | None:
    return unit.body if isinstance(unit, ComputeUnit) else None


def _source_line(plan: Plan, actor: int, step: int) -> str:
    """The user's line that a step comes from, as a clause: ``, line train.py:31: loss = f(x)``."""
    place = plan.origins.place_of(actor, step)
    if place is None or not place.line:
        return f", module {place.module}" if place is not None and place.module else ""
    return f", line {with_code(place.line)}"


def too_late(rank: int, started: Started, setting: str, explained: str) -> ClusterError:
    """The error for a transfer that has not ended in time; ``explained`` says what everything on the rank waits for."""
    return ClusterError(
        f"rank {rank}: {started.what} over NCCL has not ended in {started.seconds:.0f} s ({setting}); a rank that "
        f"takes part has not come to it, or the network between them is cut:\n{explained}"
    )


def wrapped(error: BaseException, where: str) -> BaseException:
    """Return an ActorflowError unchanged; wrap any other exception into an ActorError that says where it was raised."""
    if isinstance(error, ActorflowError):
        return error
    made = ActorError(f"{where}: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def cause_of(error: BaseException) -> tuple[str, str]:
    """The class name and message of an error's cause if it is a builtin exception, else two empty strings.

    They can be sent to another rank, which rebuilds the error by ``again``.
    """
    cause = error.__cause__
    name = type(cause).__name__
    return (name, str(cause)) if getattr(builtins, name, None) is type(cause) else ("", "")


def again(text: str, cause: str, message: str) -> BaseException:
    """Rebuild the error of another rank's actor from its text and what ``cause_of`` gave."""
    made = ActorError(text)
    kind = getattr(builtins, cause, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        made.__cause__ = kind(message)
    return made


def some(names: Sequence[str], most: int = 3) -> str:
    """The first ``most`` names as a list in text, with an ellipsis if there are more."""
    return ", ".join((*names[:most], *("…",) * (len(names) > most)))
