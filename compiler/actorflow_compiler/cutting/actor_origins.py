"""Find the source location of every step of every actor's body, from the program items that the actors consist of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.cutting.bodies import BuiltBody
from actorflow_compiler.cutting.lower import LoweredProgram, ProgramItem
from actorflow_compiler.plan.origins import Origins, SourceLocation, StepsOf


def origins_of(
    origins: Origins, program: LoweredProgram, made: Mapping[int, tuple[BuiltBody, Sequence[ProgramItem]]]
) -> Origins:
    """The origins of a graph, completed with the source locations of the steps of all actors.

    A step is located by the values that it makes.  A step that makes none (an optimizer's, in place over many
    parameters) gets the line that most items of its actor have.
    """
    places = {place: i for i, place in enumerate(origins.places)}
    place_of: dict[int, SourceLocation] = {}
    for item in program.items:
        if item.where or item.line:
            place_of.update(dict.fromkeys(item.writes, SourceLocation(item.where, item.line)))
    steps = []
    for actor, (built, items) in made.items():
        lines = Counter(item.line for item in items if item.line)
        most = SourceLocation("", max(lines, key=lines.__getitem__)) if lines else None
        found = []
        for step in built.body.steps:
            outs = [built.values[o] for o in step.outs if o >= 0]
            place = next((place_of[v] for v in outs if v in place_of), None if step.outs else most)
            found.append(-1 if place is None else places.setdefault(place, len(places)))
        if any(p >= 0 for p in found):
            steps.append(StepsOf(actor, tuple(found)))
    return replace(origins, places=tuple(places), steps=tuple(steps))
