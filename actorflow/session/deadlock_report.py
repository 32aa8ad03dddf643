"""The error for a plan that would deadlock, which is a bug of actorflow; saves the plan's text in a file."""

from __future__ import annotations

import os
import tempfile

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.text import to_text


def deadlock_error(plan: Plan, why: DeadlockError) -> DeadlockError:
    """The error for a compiled plan whose proof failed; writes the plan's text to a new temporary file."""
    number, path = tempfile.mkstemp(prefix="actorflow-plan-", suffix=".txt")
    with os.fdopen(number, "w") as file:
        file.write(to_text(plan))
    return DeadlockError(
        f"job {plan.name!r} was not started: this is a bug of actorflow, which made a plan that would wait for ever. "
        f"The plan is kept in {path}: please report the bug, and add that file. Its proof says:\n{why}"
    )
