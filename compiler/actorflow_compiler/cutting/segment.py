"""A program and a variant go in; every item gets the segment that it will be an actor of.

A segment is what one actor does in a firing.  Items are in the same segment if they are of the same
stage and placement, in the same phase, fire equally often and have the same *level*: the number of
communications, changes of stage or rate and steps back in phase on the longest way to them.  No way out of
a segment leads back into it, so the actors make no circle.

Views go where they are read.  Gradients of parameters are segments of their own, one for each stage, where the
variant says so.

Communications of the same kind among the same ranks share an actor if they are at the same level
and in the same bucket.  A backward segment is cut into parts where a bucket is full; the bucket leaves
when its last part is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.cutting.buckets import BUCKET, fill_buckets
from actorflow_compiler.cutting.copies import repeat_views
from actorflow_compiler.cutting.gathers import chunks
from actorflow_compiler.cutting.lower import Item, Program
from actorflow_compiler.cutting.recompute import recompute
from actorflow_compiler.cutting.split_backward import split_backward
from actorflow_compiler.plan.variant import PLAIN, Variant

PHASE_ORDER = {"source": 0, "forward": 1, "backward": 2, "weight": 3, "optimizer": 4}


@dataclass(frozen=True, slots=True)
class Segment:
    """What makes items one actor on each rank of the placement."""

    phase: str
    placement: Placement
    pieces: bool
    level: int
    part: int = 0  # a backward pass is cut where a bucket of gradients is ready
    stage: int = 0
    joined: bool = False  # the forward pass of the same level is in it as well


@dataclass(frozen=True, slots=True)
class Segmented:
    """A program with the segment of every item (None for joins) and the level of communications."""

    program: Program
    segments: tuple[Segment | None, ...]  # of compute items
    comm_level: tuple[tuple[int, int], ...]  # of comm items: (level, bucket; for a send the part that it waits for)


def segment(program: Program, variant: Variant = PLAIN) -> Segmented:
    """Assign segments, repeat views in their readers' segments, and cut backward passes into buckets."""
    if variant.weights:
        program = split_backward(program)
    if variant.recompute:
        program = recompute(program)
    chunk = chunks(program)
    levels = _levels(program, chunk)
    program, least = fill_buckets(program, levels, _parts(program, levels))
    levels = _levels(program, chunk, least)
    program, levels = repeat_views(program, levels)
    parts = _parts(program, levels)
    segments: list[Segment | None] = []
    comm: list[tuple[int, int]] = []
    for item, level, part in zip(program.items, levels, parts, strict=True):
        compute = item.kind == "compute"
        one = Segment(item.phase, item.placement, item.pieces, level, part, item.stage)
        segments.append(one if compute else None)
        comm.append((level, part if item.bucket is None else item.bucket))
    return Segmented(program, tuple(_joined(segments) if variant.joined else segments), tuple(comm))


def _joined(segments: Sequence[Segment | None]) -> list[Segment | None]:
    """The segments, with a forward one and the first backward one of the same level as one: nothing is between them."""
    backward = {s for s in segments if s is not None and s.phase == "backward" and s.part == 0}
    both = {
        replace(s, phase="backward"): s for s in segments if s is not None and s.phase == "forward"
    }.keys() & backward  # fmt: skip
    found: list[Segment | None] = []
    for s in segments:
        one = s if s is None or s.phase != "forward" else replace(s, phase="backward")
        found.append(replace(one, joined=True) if one is not None and one in both else s)
    return found


def _parts(program: Program, levels: Sequence[int]) -> list[int]:
    """For ops the part of their backward segment that they are in, for communications the last part they wait for."""
    part_of: dict[int, int] = {}
    reduced = {v for i in program.items if i.kind == "comm" for v in i.reads}
    joined = {v for i in program.items if i.kind == "join" and i.writes[0] in reduced for v in i.reads}
    filled: dict[Segment, tuple[int, int]] = {}  # segment without part → (part, bytes of gradients in it)
    parts = []
    for item, level in zip(program.items, levels, strict=True):
        if item.kind != "compute" or item.phase not in ("backward", "weight"):
            parts.append(0 if item.kind == "compute" else max((part_of.get(v, 0) for v in item.reads), default=0))
            part_of.update(dict.fromkeys(item.writes if item.kind == "join" else (), parts[-1]))
            continue
        here = Segment(item.phase, item.placement, item.pieces, level, stage=item.stage)
        part, size = filled.get(here, (0, 0))
        parts.append(part)
        part_of.update(dict.fromkeys(item.writes, part))
        size += sum(
            _bytes(program.metas, v, item.placement) for v in item.writes if v in (joined if item.pieces else reduced)
        )
        filled[here] = (part + 1, 0) if size >= BUCKET else (part, size)
    return parts


def _bytes(metas: Mapping[tuple[int, int], Meta], value: int, placement: Placement) -> int:
    meta = metas.get((value, placement.ranks[0]))
    return meta.nbytes if meta else 0


def _levels(program: Program, chunk: Mapping[int, int], least: Mapping[int, int] | None = None) -> list[int]:
    """The level of every item, by position; ``least`` says for some which they have at least.

    The gathers of a ``chunk`` have that of the last op before them, so that their readers have another.
    """
    bounds = dict(least or {})
    early = _early(program)
    moved = early | {k for k, i in enumerate(program.items) if i.phase == "weight"}
    levels = _lowest(program, chunk, bounds, moved)
    if early:
        levels = _as_late_as_their_readers(program, levels, early)
        bounds.update({k: levels[k] for k in early})
    if last := _last_of_weights(program, levels):
        bounds.update(last)
        levels = _lowest(program, chunk, bounds, moved)
    late = {k for k, i in enumerate(program.items) if i.kind == "compute" and i.phase == "optimizer"}
    return _as_late_as_their_readers(program, levels, late)


def _lowest(program: Program, chunk: Mapping[int, int], least: Mapping[int, int], moved: Collection[int]) -> list[int]:
    """The lowest levels that are legal; no gather begins with ops that are ``moved`` to later levels."""
    made: dict[int, tuple[int, Item]] = {}  # value → level that it has for its readers, and its maker
    levels = []
    highest: dict[tuple[Placement, int], int] = {}  # of a stage's ops so far
    begun: dict[int, int] = {}  # chunk → level
    for k, item in enumerate(program.items):
        level = least.get(k, 0)
        place = (item.placement, item.stage)
        if k in chunk:
            level = max(level, begun.setdefault(chunk[k], highest.get(place, 0)))
        for v in item.reads:
            if v not in made:
                continue
            before, maker = made[v]
            level = max(level, before + (maker.kind == item.kind == "compute" and _leaves(maker, item, before)))
        levels.append(level)
        if any(item.steps.values()) and k not in moved:
            highest[place] = max(level, highest.get(place, 0))
        for v in item.writes:
            made[v] = (level + (item.kind != "compute"), item)
    return levels


def _leaves(maker: Item, reader: Item, level: int) -> bool:
    """Whether the way from one op, of this level, to the next leaves the segment for good."""
    if maker.phase == "source":
        return False  # sources are actors of their own, before all others
    earlier = PHASE_ORDER[maker.phase] > PHASE_ORDER[reader.phase]
    # what is made of sources once in an iteration is an actor of its own before all pieces, too
    other_rate = maker.pieces != reader.pieces and (maker.pieces or level > 0)
    return earlier or other_rate or (maker.placement, maker.stage) != (reader.placement, reader.stage)


def _early(program: Program) -> set[int]:
    """The ops of the backward pass that wait for no gradient: they could run right after the forward pass."""
    found: set[int] = set()
    waiting: set[int] = set()  # values that backward passes have made so far
    for k, item in enumerate(program.items):
        if item.phase not in ("backward", "weight"):
            continue
        if item.kind == "compute" and not any(v in waiting for v in item.reads):
            found.add(k)
        else:
            waiting.update(item.writes)
    return found


def _last_of_weights(program: Program, levels: Sequence[int]) -> dict[int, int]:
    """The highest level of each stage's gradients of parameters, for all of them: nobody waits, one actor will do."""
    found: dict[tuple[Placement, int], list[int]] = {}
    for k, item in enumerate(program.items):
        if item.phase == "weight":
            found.setdefault((item.placement, item.stage), []).append(k)
    return {k: max(levels[other] for other in ks) for ks in found.values() for k in ks}


def _as_late_as_their_readers(program: Program, levels: Sequence[int], late: Collection[int]) -> list[int]:
    """Levels in which the ``late`` ops, by position, have moved up to those that read them."""
    out = list(levels)
    readers: dict[int, list[int]] = {}
    for k in range(len(out) - 1, -1, -1):
        item = program.items[k]
        if k in late:
            allowed = []
            for r in {r for v in item.writes for r in readers.get(v, ())}:
                reader = program.items[r]
                allowed.append(out[r] - (reader.kind == "compute" and _leaves(item, reader, out[r])))
            out[k] = max(out[k], min(allowed, default=out[k]))
        for v in item.reads:
            readers.setdefault(v, []).append(k)
    return out
