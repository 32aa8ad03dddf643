"""Draw the actors of a plan by rank and queue, connected by registers with their slots, as SVG.

A row is a queue.  An actor is drawn to the right of all actors that it waits for, and of those before it on its queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from actorflow.show import svg
from actorflow.show.styles import queue_key, ranks_text, short
from actorflow_compiler.core.units import bytes_text, rows_text
from actorflow_compiler.plan.plan import Actor, ActorKind, Plan, Register
from actorflow_compiler.plan.source_rows import rows_taken

WIDTH, HEIGHT = 148.0, 42.0  # of an actor
TOKEN = 16.0  # height of a register below its actor
COLUMN = 208.0  # from one column to the next
LEFT, TOP = 150.0, 10.0
ROW_GAP, RANK_GAP = 20.0, 18.0
SLOTS = 6  # the most that are drawn of one register


@dataclass(frozen=True, slots=True)
class _Place:
    x: float
    y: float


def actor_graph(plan: Plan, starts: Mapping[int, float], classes: Mapping[int, Sequence[int]]) -> str:
    """The SVG of the actors of the ranks in ``classes`` (rank → the ranks that it stands for).

    ``starts`` gives when actors first fire, in seconds.
    """
    actors = sorted((a for a in plan.actors if a.rank in classes), key=lambda a: (starts.get(a.id, 0.0), a.id))
    lanes = sorted({(a.rank, a.queue) for a in actors}, key=lambda lane: (lane[0], queue_key(lane[1])))
    columns = _columns(plan, actors)
    tall = dict.fromkeys(lanes, HEIGHT)
    for a in actors:
        held = sum(bool(r.tensors) for r in plan.outputs_of[a.id])
        tall[a.rank, a.queue] = max(tall[a.rank, a.queue], HEIGHT + TOKEN * held)
    top: dict[tuple[int, str], float] = {}
    bands: list[tuple[int, float]] = []
    y = TOP
    for rank, queue in lanes:
        if not bands or bands[-1][0] != rank:
            y += RANK_GAP if bands else 0
            bands.append((rank, y))
            y += 34
        top[rank, queue] = y
        y += tall[rank, queue] + ROW_GAP
    ends = [*(at - RANK_GAP for _, at in bands[1:]), y]
    width = LEFT + (max(columns.values(), default=0) + 1) * COLUMN
    shapes = []
    for (rank, at), end in zip(bands, ends, strict=True):
        shapes.append(svg.rect(4.0, at, width - 8, end - at, rx=10, class_="band"))
        shapes.append(svg.text(18.0, at + 24, ranks_text(classes[rank]), class_="rank"))
    for (_, queue), at in top.items():
        shapes.append(svg.text(18.0, at + HEIGHT / 2 + 4, queue, class_="queue"))
        shapes.append(svg.path(f"M{LEFT - 30:.1f} {at + HEIGHT / 2:.1f}H{width - 30:.1f}", class_="lane"))
    places = {a.id: _Place(LEFT + columns[a.id] * COLUMN, top[a.rank, a.queue]) for a in actors}
    shapes += _edges(plan, places)
    shapes += [_box(plan, a, places[a.id]) for a in actors]
    return svg.drawing("".join(shapes), width, y + TOP, class_="graph actors")


def _columns(plan: Plan, actors: Iterable[Actor]) -> dict[int, int]:
    """Actor → its column; ``actors`` are in the order of their first firings."""
    found: dict[int, int] = {}
    used: dict[tuple[int, str], int] = {}
    for a in actors:
        needs = [found[r.producer] + 1 for r in plan.inputs_of[a.id] if not r.initial and r.producer in found]
        found[a.id] = used[a.rank, a.queue] = max(0, used.get((a.rank, a.queue), -1) + 1, *needs)
    return found


def _box(plan: Plan, a: Actor, at: _Place) -> str:
    name = short(a.name)
    if a.kind == ActorKind.BOXING:
        name = name.rpartition(" ")[2]  # the kind of collective is on the line below
    what = a.comm.label.replace("_", "-") if a.comm is not None else a.kind
    if a.body is not None:
        count = len(plan.bodies[a.body].steps)
        what = f"{count} op{'s' * (count != 1)}"
    inside = svg.rect(at.x, at.y, WIDTH, HEIGHT, rx=7, class_=f"box {a.kind}")
    inside += svg.text(at.x + 10, at.y + 17, svg.cut(name, WIDTH - 42, 7.4), class_=f"name on-{a.kind}")
    inside += svg.text(at.x + WIDTH - 10, at.y + 17, f"×{a.rate}", class_=f"small on-{a.kind}", text_anchor="end")
    inside += svg.text(at.x + 10, at.y + 33, svg.cut(what, WIDTH - 18, 6.2), class_=f"small on-{a.kind}")
    taken = [f"takes {rows_text(rows)} of {name}" for name, rows in rows_taken(a, plan.bodies).items()]
    return svg.group(inside, "\n".join([f"{a.name}: {a.kind}", *taken]), class_="actor", data_actor=a.id, tabindex=0)


def _edges(plan: Plan, places: Mapping[int, _Place]) -> list[str]:
    """The registers of all actors, each below its actor, and lines from them to their readers."""
    lines, tokens = [], []
    for producer, a in places.items():
        held = [r for r in plan.outputs_of[producer] if r.tensors]
        for row, r in enumerate(held):
            y = a.y + HEIGHT + TOKEN * (row + 0.5) + 2
            readers = [read.actor for read in r.readers if read.actor in places]
            marks = {"data_from": producer, "data_to": " ".join(map(str, readers))}
            tokens.append(svg.group(_token(r, a.x, y), _tooltip(r), class_="register", data_register=r.id, **marks))
            for reader in readers:
                line = _line(a.x + WIDTH - 4, y, places[reader])
                lines.append(svg.path(line, class_="edge", data_from=producer, data_to=reader))
        order = {read.actor for r in plan.outputs_of[producer] if not r.tensors for read in r.readers}
        for reader in sorted(order & places.keys()):
            line = _line(a.x + WIDTH, a.y + HEIGHT / 2, places[reader])
            lines.append(svg.path(line, class_="edge order", data_from=producer, data_to=reader))
    return lines + tokens


def _token(r: Register, x: float, y: float) -> str:
    """A register: its slots, those with initial tokens drawn full, and their bytes."""
    drawn = min(r.slots, SLOTS)
    shapes = [
        svg.rect(x + 10 + 9 * i, y - 4, 7.0, 8.0, rx=1.5, class_="slot full" if i < r.initial else "slot")
        for i in range(drawn)
    ]
    more = f"{r.slots} × " if r.slots > drawn else "× " if r.slots > 1 else ""
    shapes.append(svg.text(x + 14 + 9 * drawn, y + 4, f"{more}{bytes_text(r.nbytes)}", class_="token"))
    return "".join(shapes)


def _tooltip(r: Register) -> str:
    names = list(dict.fromkeys(f"{t.name} {t.sbp}" for t in r.tensors))
    more = [f"… {len(names) - 8} more"] if len(names) > 8 else []
    return "\n".join([f"r{r.id}: {r.slots} slots of {bytes_text(r.nbytes)}", *names[:8], *more])


def _line(x0: float, y0: float, b: _Place) -> str:
    """The curve from a register to the actor that reads it."""
    x1, y1 = b.x, b.y + HEIGHT / 2
    if x1 > x0:
        reach = min(90.0, max(24.0, 0.45 * (x1 - x0)))
        return f"M{x0:.1f} {y0:.1f}C{x0 + reach:.1f} {y0:.1f} {x1 - reach:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    reach = 46.0  # to an actor on the left: leave on the right and enter from the left, around what is in between
    return f"M{x0:.1f} {y0:.1f}C{x0 + reach:.1f} {y0 - 40:.1f} {x1 - reach:.1f} {y1 - 40:.1f} {x1:.1f} {y1:.1f}"
