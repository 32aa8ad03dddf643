"""Where a plan comes from: the logical graph folded by module, and the user's lines; frozen data, for people only.

Nothing that runs looks at it.  A rank's part of a plan has the places of its own actors' ops, so that an error can
name the user's line, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("input", "variable", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Place:
    """Where ops come from."""

    module: str  # its qualified name; "" outside of modules
    line: str  # of the user's script, "train.py:31"; "" where it is not known


@dataclass(frozen=True, slots=True)
class StepsOf:
    """The places of the ops of one actor's body."""

    actor: int
    places: tuple[int, ...]  # for each step its place; -1 where it is not known


@dataclass(frozen=True, slots=True)
class Part:
    """The ops of one module in one phase and on one placement; or its variables, or the inputs of the step."""

    module: str  # as in ``Place``
    phase: str  # one of PHASES
    placement: str
    count: int  # ops, or variables
    ops: tuple[str, ...]  # their names, each once; or those of variables
    places: tuple[int, ...]  # where they come from


@dataclass(frozen=True, slots=True)
class Flow:
    """A logical tensor that one part gives to another, and the boxing between them."""

    source: int  # part
    target: int  # part
    name: str  # the op or the variable that it comes from
    shape: tuple[int, ...]  # logical
    dtype: str
    sbp: str  # as it is made, on the placement of the source
    read: str  # the SBP as which it is read, on the placement of the target
    boxing: tuple[str, ...]  # the primitives between them, in order; empty where it is read as it lies
    moved: int  # bytes that these send, all ranks and all micro-batches of an iteration together


@dataclass(frozen=True, slots=True)
class Origins:
    """All of it."""

    places: tuple[Place, ...] = ()
    steps: tuple[StepsOf, ...] = ()
    parts: tuple[Part, ...] = ()
    flows: tuple[Flow, ...] = ()

    def place_of(self, actor: int, step: int) -> Place | None:
        """Where a step of an actor's body comes from, if that is known."""
        places = next((s.places for s in self.steps if s.actor == actor), ())
        at = places[step] if 0 <= step < len(places) else -1
        return self.places[at] if at >= 0 else None
