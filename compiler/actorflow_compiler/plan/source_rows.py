"""Find which rows of the call's arguments a source takes, and rewrite its body so that it needs no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.runs import Runs, position, union
from actorflow_compiler.plan.plan import Actor, ActorKind, Body, OfInput, Step

__all__ = ["CARVE", "argument_rows", "over_rows", "rows_read", "rows_taken"]

CARVE = "actorflow.carve"  # takes a rectangle of its operand


def argument_rows(
    actors: Sequence[Actor], bodies: Sequence[Body], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Runs]:
    """The rows (indices of dim 0) of each argument of the call that the sources among ``actors`` take.

    ``shapes`` are the logical shapes of the arguments; those without dims are left out.
    """
    taken: dict[str, list[tuple[int, int]]] = {name: [] for name, shape in shapes.items() if shape}
    for actor in actors:
        names = {at: o.name for at, o in enumerate(actor.operands) if isinstance(o, OfInput) and o.name in taken}
        if not names:
            continue
        rows = rows_taken(actor, bodies)
        for name in names.values():
            taken[name] += rows.get(name, [(0, shapes[name][0])])
    return {name: union(rows) for name, rows in taken.items()}


def rows_taken(actor: Actor, bodies: Sequence[Body]) -> dict[str, Runs]:
    """The rows of each argument of the call that a source takes; an argument that it takes whole is not there."""
    if actor.body is None or actor.kind != ActorKind.SOURCE:
        return {}
    taken: dict[str, Runs | None] = {}
    rows = rows_read(bodies[actor.body])
    for at, operand in enumerate(actor.operands):
        if isinstance(operand, OfInput):
            found, known = rows.get(at), taken.get(operand.name, ())
            taken[operand.name] = None if found is None or known is None else union([*known, *found])
    return {name: found for name, found in taken.items() if found is not None}


def rows_read(body: Body) -> dict[int, Runs | None]:
    """Operand of a body → the rows of it that its steps read; None: all of them, as more than rectangles is taken."""
    found: dict[int, list[tuple[int, int]] | None] = {at: [] for at in range(body.inputs)}
    for at in body.outputs:
        if at < body.inputs:
            found[at] = None
    for step in body.steps:
        rows = _carved(step)
        for at in step.reads():
            if at < body.inputs:
                known = found[at]
                found[at] = None if rows is None or known is None else [*known, rows]
    return {at: None if rows is None else union(rows) for at, rows in found.items()}


def over_rows(body: Body, operands: Mapping[int, Runs]) -> Body:
    """The same body, where each of these operands holds only these rows of what it held, in order."""
    steps = []
    for step in body.steps:
        if step.op == CARVE and (at := step.args[0].index) in operands:
            (start, *starts), size = step.args[1], step.args[2]
            step = replace(step, args=(Ref(at), (position(operands[at], start), *starts), size))
        steps.append(step)
    return replace(body, steps=tuple(steps))


def _carved(step: Step) -> tuple[int, int] | None:
    """The rows of its operand that a step takes; None if it does something else than to take a rectangle."""
    if step.op != CARVE or not step.args[1]:
        return None
    _, start, size = step.args
    return start[0], start[0] + size[0]
