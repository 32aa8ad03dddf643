"""Split a body around the steps that use Python numbers, so that the rest can be compiled or captured.

A body becomes up to three parts, which run one after the other.  The middle part computes on tensors alone and changes
none of them: inductor may fuse its ops, and a CUDA graph may replay it.  Before it come steps that need numbers of the
call (such as the index of the micro-batch) or draw random numbers.  After it come steps that change tensors in place
(such as the optimizer's), and steps that read what these change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from actorflow_compiler.plan.plan import Body, Step

__all__ = ["CHANGES", "DRAWS", "PLAIN", "BodyPart", "divide"]

PLAIN, DRAWS, CHANGES = range(3)
"""Kinds of steps: it only computes on its operands; it draws random numbers; it changes an operand in place."""

_BEFORE, _INSIDE, _AFTER = range(3)


@dataclass(frozen=True, slots=True)
class BodyPart:
    """A body that is a part of another, "whole" body."""

    body: Body
    reads: tuple[int, ...]  # operand i is this value of the whole body
    makes: tuple[int, ...]  # output i is this value of the whole body
    last: frozenset[int]  # the values in ``reads`` that nothing needs after this part
    inside: bool  # the middle part: it computes on tensors alone and changes none


def divide(body: Body, numbers: Collection[int], does: Callable[[Step], int]) -> tuple[BodyPart, ...]:
    """The parts of a body, in order; those without steps are left out.

    ``numbers`` are the positions of operands that are Python numbers.  ``does`` gives the kind of a step: PLAIN, DRAWS
    or CHANGES.
    """
    where = dict.fromkeys(range(body.inputs), _BEFORE)  # value → the part that makes it
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
        if what == CHANGES:  # later readers must see the change
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
