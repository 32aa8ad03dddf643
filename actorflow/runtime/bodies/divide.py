"""Split a body around the steps that use Python numbers, so that the rest can be compiled or captured.

A body becomes up to three, which run one after the other.  The middle one computes on tensors alone and changes none:
torch's compiler may join its ops, and a GPU may replay it.  Before it come steps that take numbers of a call (a
micro-batch's part of the batch, random numbers), after it steps that change tensors in place (the optimizer), or read
what these change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from actorflow_compiler.plan.plan import Body, Step

__all__ = ["CHANGES", "DRAWS", "PLAIN", "BodyPart", "divide"]

PLAIN, DRAWS, CHANGES = range(3)
"""What a step does: it computes on what it reads; it gives something else each time; it changes what it reads."""

_BEFORE, _INSIDE, _AFTER = range(3)


@dataclass(frozen=True, slots=True)
class BodyPart:
    """A body that is part of another one, whose values it reads and makes."""

    body: Body
    reads: tuple[int, ...]  # operand i is this value of the whole
    makes: tuple[int, ...]  # output i is this one
    last: frozenset[int]  # of what it reads: what nothing needs after it
    inside: bool  # on tensors alone, without changing any


def divide(body: Body, numbers: Collection[int], does: Callable[[Step], int]) -> tuple[BodyPart, ...]:
    """The parts of a body, in order; those without steps are left out.

    ``numbers`` are positions of operands.  ``does`` says what a step does: PLAIN, DRAWS or CHANGES.
    """
    where = dict.fromkeys(range(body.inputs), _BEFORE)  # value → the part after which it is there
    number = set(numbers)
    steps: tuple[list[Step], list[Step], list[Step]] = ([], [], [])
    for step in body.steps:
        reads = [*step.reads()]
        latest = max((where[v] for v in reads), default=_BEFORE)
        what = does(step)
        if what == CHANGES:
            at = _AFTER
        elif what == DRAWS or any(v in number for v in reads):
            at = _BEFORE if latest == _BEFORE else _AFTER
        else:
            at = max(latest, _INSIDE)
        steps[at].append(step)
        where.update(dict.fromkeys((v for v in step.outs if v >= 0), at))
        if what == CHANGES:  # what reads it now reads what was changed
            where.update(dict.fromkeys(reads, at))
    parts = [(at, tuple(of)) for at, of in enumerate(steps) if of]
    found = []
    for k, (at, of) in enumerate(parts):
        later = {v for _, other in parts[k + 1 :] for step in other for v in step.reads()} | set(body.outputs)
        found.append(_part(of, later, at == _INSIDE))
    return tuple(found)


def _part(steps: tuple[Step, ...], later: Collection[int], inside: bool) -> BodyPart:
    made = {v for step in steps for v in step.outs if v >= 0}
    reads = tuple(dict.fromkeys(v for step in steps for v in step.reads() if v not in made))
    makes = tuple(v for v in dict.fromkeys(v for step in steps for v in step.outs) if v in later)
    new = {v: i for i, v in enumerate((*reads, *sorted(made)))}
    renamed = tuple(step.renamed(new) for step in steps)
    return BodyPart(
        Body(len(reads), renamed, tuple(new[v] for v in makes)), reads, makes,
        frozenset(v for v in reads if v not in later), inside,
    )  # fmt: skip
