"""Bodies and the items that they were made of enter; where each step of each actor comes from leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.cutting.bodies import Built
from actorflow_compiler.cutting.lower import Item, Program
from actorflow_compiler.plan.origins import Origins, Place, StepsOf


def origins_of(origins: Origins, program: Program, made: Mapping[int, tuple[Built, Sequence[Item]]]) -> Origins:
    """The origins of a graph, with the places of the steps of every actor added.

    A step is known by what it makes; one that makes nothing (an optimizer's, in place and over many parameters) is of
    the line that most items of its actor are of.
    """
    places = {place: i for i, place in enumerate(origins.places)}
    place_of: dict[int, Place] = {}
    for item in program.items:
        if item.where or item.line:
            place_of.update(dict.fromkeys(item.writes, Place(item.where, item.line)))
    steps = []
    for actor, (built, items) in made.items():
        lines = [item.line for item in items if item.line]
        most = Place("", max(dict.fromkeys(lines), key=lines.count)) if lines else None
        found = []
        for step in built.body.steps:
            outs = [built.values[o] for o in step.outs if o >= 0]
            place = next((place_of[v] for v in outs if v in place_of), None if step.outs else most)
            found.append(-1 if place is None else places.setdefault(place, len(places)))
        if any(p >= 0 for p in found):
            steps.append(StepsOf(actor, tuple(found)))
    return replace(origins, places=tuple(places), steps=tuple(steps))
