"""A job as its callers know it goes in; what a session keeps of it, of its plans and of one call comes out: values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actorflow import tree
from actorflow.arguments import Arguments
from actorflow.changes import Change
from actorflow.classic.body import Body
from actorflow.classic.variables import Recording
from actorflow.find import Found
from actorflow.guards import Guards
from actorflow.runtime.keys import Keys
from actorflow.runtime.known import Known
from actorflow.runtime.numbers import Reading
from actorflow_compiler.decided import Decisions
from actorflow_compiler.gradients import Gradients
from actorflow_compiler.infer import Goal
from actorflow_compiler.plan import Plan

__all__ = ["Asked", "Compiled", "JobLike"]


class JobLike(Protocol):
    """What a session needs to know of a job."""

    name: str
    type: str
    micro_batches: int
    goal: Goal
    schedule: str
    mode: str  # how bodies are to run
    function: Any
    signature: Any
    body: Body
    model: Any
    optimizer: Any
    plans: Known[Compiled]
    keys: Keys | None
    last: Compiled | None


@dataclass(slots=True)
class Compiled:
    """A plan that is installed, and how a call feeds it."""

    spoken: str  # a call of it as people write it
    number: int
    plan: Plan
    shape: tree.Shape
    inputs: frozenset[str]  # arguments that this rank's sources read
    reading: Reading  # what it reads of numbers of the script, and what they have to be
    optimizers: tuple[torch.optim.Optimizer, ...]
    gradients: Gradients
    mirrored: bool  # devices draw random numbers of their own
    keys: Keys
    key: tuple[Any, ...]
    guards: Guards
    found: Found
    changes: tuple[Change, ...]  # that each call makes in the script
    decisions: Decisions  # by values of small variables
    calls: int = 0

    @property
    def leaves(self) -> tuple[str, ...]:
        """What a call changes in the script at once, whatever becomes of it, for people."""
        first = ("which step of the optimizer comes next",) if self.key[-1] else ()
        return (*(change.where for change in self.changes), *first)


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a job, as far as it is the same for all plans."""

    arguments: Arguments
    own: tuple[bool, ...] | None  # in the mirrored view, which arguments every device has for itself
    recording: Recording
