"""Find and raise the exceptions of value checks, which the step's Python code would have raised."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from actorflow_compiler.values.checks import Check

__all__ = ["failure_of", "first_failed"]


def first_failed(checks: Sequence[Check], results: Sequence[Tensor]) -> Check | None:
    """The first failed check of a call; waits for all of them.  Raises the call's error if it was given up."""
    return next((check for check, raises in zip(checks, results[-1].tolist(), strict=True) if raises), None)


def failure_of(check: Check, job: str) -> BaseException:
    """The exception of a check; first prints the output that the step would have printed before it."""
    for stream, text in check.raised.printed:
        print(text, end="", file=getattr(sys, stream), flush=True)
    error = check.raised.error()
    lost = f"it had changed {check.lost} before, and no call can follow it"
    after = lost if check.lost else "other calls are done as ever"
    error.add_note(f"raised by a call of {job} at {check.where}\nwhat the step does behind that was not done; {after}")
    return error
