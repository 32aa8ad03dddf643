"""Compile steps of ``models`` and ``random_programs``, with the digests by which their plans are kept."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from unittest.mock import patch

import torch

import trained
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.compile import capture_step, lower_captured
from actorflow_compiler.core.errors import ActorflowError
from actorflow_compiler.cutting.lowered_step import LoweredStep
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.plan.verify import verify
from actorflow_compiler.reuse import StepInterface, check_fits, step_digest
from actorflow_scheduler.proof import prove
from actorflow_scheduler.schedule import schedule
from models import Case
from trained import Layout, laid_of

__all__ = ["Reuse", "captured_of", "reuse_of"]


@dataclass(frozen=True)
class Reuse:
    """A step's digest, and the plan that is made from it."""

    digest: str
    plan: bytes  # or an error's text
    captured: Capture
    request: StepRequest

    def checked(self, plan: bytes) -> None:
        """Read and check bytes as a plan that is found for this step; raises PlanError."""
        prove(check_fits(verify(from_bytes(plan)), StepInterface.of(self.captured), self.request))


class Captured(Exception):
    """Ends a compilation after capture."""


def captured_of(case: Case, layout: Layout, size: int) -> tuple[Capture, StepRequest]:
    """The captured step of a case, and its request."""
    found: list[tuple[Capture, StepRequest]] = []

    def stop(request: StepRequest) -> LoweredStep:
        found.append((capture_step(request), request))
        raise Captured

    torch.manual_seed(0)
    with patch.object(trained, "compile_step", stop), suppress(Captured):
        laid_of(case, layout, size)
    return found[0]


def reuse_of(case: Case, layout: Layout, size: int) -> Reuse:
    """Compile a case.  A plan that is made is checked as one that is found."""
    captured, request = captured_of(case, layout, size)
    digest = step_digest(captured, request)
    try:
        plan = schedule(lower_captured(captured, request).cut, request.devices.hardware, name=layout.schedule)
    except ActorflowError as error:
        return Reuse(digest, str(error).encode(), captured, request)
    found = Reuse(digest, to_bytes(plan), captured, request)
    found.checked(found.plan)
    return found
