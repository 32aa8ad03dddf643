"""Where a plan comes from: the logical graph folded by module, and the user's lines; for pages and error messages only.

Execution does not depend on it.  One rank's part of a plan keeps only the source locations of its own actors' ops, so
that errors can name the user's line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PartPhase(StrEnum):
    """What a part of the folded graph consists of: the step's inputs, variables, or the ops of a phase."""

    INPUT = "input"
    VARIABLE = "variable"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The module and the line of the user's script that ops come from."""

    module: str  # its qualified name; "" outside of modules
    line: str  # of the user's script, "train.py:31"; "" where it is not known


@dataclass(frozen=True, slots=True)
class StepsOf:
    """The source locations of the steps of one actor's body."""

    actor: int
    places: tuple[int, ...]  # for each step an index into ``Origins.places``; -1 where it is not known


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A node of the folded graph: a module's ops in one phase on one placement, its variables, or the step's inputs."""

    module: str  # as in ``SourceLocation``
    phase: PartPhase
    placement: str
    count: int  # of ops, or of variables
    ops: tuple[str, ...]  # names of ops, each once; or names of variables
    places: tuple[int, ...]  # indices into ``Origins.places``


@dataclass(frozen=True, slots=True)
class Flow:
    """An edge of the folded graph: a logical tensor from one part to another, and the boxing between them."""

    source: int  # index into ``Origins.parts``
    target: int  # the same
    name: str  # the op or the variable that it comes from
    shape: tuple[int, ...]  # logical
    dtype: str
    sbp: str  # its SBP on the placement of the source
    read: str  # the SBP that the target reads, on the placement of the target
    boxing: tuple[str, ...]  # the primitives from one to the other, in order; empty if none are needed
    moved: int  # bytes that they send in an iteration, over all ranks and micro-batches


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of a plan: source locations, and the folded logical graph."""

    places: tuple[SourceLocation, ...] = ()
    steps: tuple[StepsOf, ...] = ()
    parts: tuple[ModulePart, ...] = ()
    flows: tuple[Flow, ...] = ()

    def place_of(self, actor: int, step: int) -> SourceLocation | None:
        """The source location of a step of an actor's body, if it is known."""
        places = next((s.places for s in self.steps if s.actor == actor), ())
        at = places[step] if 0 <= step < len(places) else -1
        return self.places[at] if at >= 0 else None
