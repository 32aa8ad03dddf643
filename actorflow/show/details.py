"""The details that a page shows of a clicked actor, register or module, as data for JSON."""

from __future__ import annotations

import linecache
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from actorflow.show.modules import STEP, FoldedGraph, flow_text
from actorflow.show.styles import ranks_text, short
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.units import bytes_text, flop_text, rows_text
from actorflow_compiler.plan.plan import Actor, ActorKind, OfInput, OfScalar, OfVariable, Plan, Register, Send, ToResult
from actorflow_compiler.plan.source_rows import rows_taken

MOST = 12  # the most tensors that are named of one line
AROUND = 2  # lines of code that are shown before and after a line


def details(plan: Plan, ranks: Container[int], durations: Mapping[int, float]) -> dict[str, Any]:
    """The actors of some ranks, their bodies and their registers, by id.

    ``durations`` gives how long a firing of an actor takes, in seconds, where that is known.
    """
    actors = [a for a in plan.actors if a.rank in ranks]
    registers = {r.id: r for a in actors for r in (*plan.inputs_of[a.id], *plan.outputs_of[a.id])}
    ends = {e for r in registers.values() for e in (r.producer, *(read.actor for read in r.readers))}
    bodies = {a.body for a in actors if a.body is not None}
    places = plan.origins.places
    steps = {s.actor: s.places for s in plan.origins.steps}
    return {
        "actors": {a.id: _actor(plan, a, durations.get(a.id), steps.get(a.id)) for a in actors},
        "others": {a.id: a.name for a in plan.actors if a.id in ends and a.rank not in ranks},
        "bodies": {b: [_op(step.op) for step in plan.bodies[b].steps] for b in sorted(bodies)},
        "registers": {r.id: _register(plan, r) for r in registers.values()},
        "origins": [[p.module, p.line] for p in places],
        "code": _code(p.line for p in places),
    }


def part_details(plan: Plan, folds: Sequence[FoldedGraph]) -> dict[str, Any]:
    """The details of the boxes of the logical graph at all levels, by their ids."""
    origins, actors = plan.origins, _actors_of_places(plan)
    found: dict[str, Any] = {}
    for fold in folds:
        for box in fold.boxes:
            parts = [origins.parts[p] for p in box.parts]
            places = dict.fromkeys(place for p in parts for place in p.places)
            mine = dict.fromkeys(a for place in places for a in actors.get((place, parts[0].phase), ()))
            found[box.id] = {
                "module": box.name,
                "level": fold.level,
                "phase": parts[0].phase,
                "placement": " ".join(dict.fromkeys(p.placement for p in parts)),
                "count": sum(p.count for p in parts),
                "names": list(dict.fromkeys(op for p in parts for op in p.ops)),
                "lines": list(dict.fromkeys(line for p in places if (line := origins.places[p].line))),
                "actors": list(mine),
                "reads": [],
                "gives": [],
            }
        for (a, b), flows in fold.flows.items():
            values = [flow_text(f) for f in flows[:MOST]]
            values += [f"… {len(flows) - MOST} more"] if len(flows) > MOST else []
            one, other = fold.boxes[a], fold.boxes[b]
            for word, box, end in (("gives", one, other), ("reads", other, one)):
                phase = found[end.id]["phase"]
                found[box.id][word].append([f"{end.name or STEP}, {phase}", end.id, values])
    return found


def _actors_of_places(plan: Plan) -> dict[tuple[int, str], dict[int, None]]:
    """(Source location, phase) → the actors with steps from there."""
    kinds = {a.id: a.kind for a in plan.actors}
    actors: dict[tuple[int, str], dict[int, None]] = {}
    for s in plan.origins.steps:
        phase = ActorKind.BACKWARD if kinds[s.actor] == ActorKind.WEIGHT else kinds[s.actor]
        for place in dict.fromkeys(s.places):
            actors.setdefault((place, phase), {})[s.actor] = None
    return actors


def _code(lines: Iterable[str]) -> dict[str, Any]:
    """Lines of the user's script together with those around them, where the file can be read."""
    found = {}
    for line in dict.fromkeys(filter(None, lines)):
        path, _, number = line.rpartition(":")
        first = max(1, int(number) - AROUND)
        text = [linecache.getline(path, n).rstrip("\n") for n in range(first, int(number) + AROUND + 1)]
        if any(text):
            found[line] = {"first": first, "lines": text}
    return found


def _actor(plan: Plan, a: Actor, duration: float | None, places: Sequence[int] | None) -> dict[str, Any]:
    rows = rows_taken(a, plan.bodies)
    takes = [
        f"{rows_text(rows[x.name])} of {x.name}" if isinstance(x, OfInput) and x.name in rows else x.name
        for x in a.operands
        if isinstance(x, OfVariable | OfScalar | OfInput)
    ]
    gives = [x.name if isinstance(x, OfVariable) else f"result {x.index}"
             for x in a.targets if isinstance(x, OfVariable | ToResult)]  # fmt: skip
    found: dict[str, Any] = {
        "name": a.name,
        "short": short(a.name),
        "rank": a.rank,
        "queue": a.queue,
        "kind": a.kind,
        "stage": a.stage,
        "rate": a.rate,
        "reads": [r.id for r in plan.inputs_of[a.id]],
        "writes": [r.id for r in plan.outputs_of[a.id]],
        "takes": list(dict.fromkeys(takes)),
        "gives": list(dict.fromkeys(gives)),
    }
    if a.body is not None:
        found["body"] = a.body
    if places is not None:
        found["origins"] = places
    if a.flops:
        found["work"] = f"{flop_text(a.flops)} a firing"
    if a.workspace:
        found["workspace"] = f"{bytes_text(a.workspace)} while it fires"
    if duration is not None:
        found["duration"] = f"{duration * 1e3:.3f} ms a firing"
    if a.comm is not None:
        between = (
            f"from rank {a.comm.from_rank} to rank {a.comm.to_rank}"
            if isinstance(a.comm, Send)
            else f"among {ranks_text(a.comm.ranks)}"
        )
        found["comm"] = f"{a.comm.label} {between}, {a.comm.plane}"
    return found


def _register(plan: Plan, r: Register) -> dict[str, Any]:
    return {
        "from": r.producer,
        "to": [read.actor for read in r.readers],
        "slots": r.slots,
        "initial": r.initial,
        "bytes": bytes_text(r.nbytes),
        "tensors": [
            [str(Meta(t.shape, t.dtype)), t.sbp, bytes_text(t.nbytes), f"{t.name} {t.combine}".rstrip()]
            for t in r.tensors
        ],
    }


def _op(name: str) -> str:
    return name.removesuffix(".default")
