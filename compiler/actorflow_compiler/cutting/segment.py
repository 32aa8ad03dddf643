"""Assign the items of a program to segments, each of which becomes an actor on every rank of its placement.

A segment is what one actor does in a firing.  Items are in the same segment if they have the same stage, placement,
phase and rate, and the same *level*: the number of communications, changes of stage or rate, and steps back in phase
on the longest path to them.  No path out of a segment leads back into it, so actors do not depend on each other in a
cycle.

Views are copied into the segments that read them.  Where the variant says so, gradients of parameters are segments of
their own, one for each stage.

Communications of the same kind among the same ranks share an actor if they have the same level and bucket.  A backward
segment is cut into parts where a bucket is full; the bucket leaves when its last part is done.  An optimizer segment is
cut into parts by the buckets that its ops need (``optimizer_parts.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.core.ops import Meta, Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.custom_ops.ring_attention import RING, RING_BACKWARD
from actorflow_compiler.cutting.buckets import BUCKET, fill_buckets
from actorflow_compiler.cutting.copies import is_view, repeat_views
from actorflow_compiler.cutting.gathers import chunks
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.cutting.optimizer_parts import optimizer_parts, with_reduced_gradients
from actorflow_compiler.cutting.recompute import recompute
from actorflow_compiler.cutting.split_backward import split_backward
from actorflow_compiler.plan.variant import PLAIN, Variant

IN_PARTS = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)  # phases whose segments may be cut
PHASE_ORDER = {phase: i for i, phase in enumerate(Phase)}  # as they are declared


@dataclass(frozen=True, slots=True)
class Segment:
    """The key of a segment: items with equal ones are one actor on each rank of the placement."""

    phase: Phase
    placement: Placement
    pieces: bool  # whether it fires for each micro-batch
    level: int
    part: int = 0  # buckets of gradients cut a backward pass and an optimizer into parts; so do steps around a ring
    stage: int = 0
    joined: bool = False  # the forward segment of the same level is part of it


@dataclass(frozen=True, slots=True)
class SegmentedProgram:
    """A program with the segments of its compute items and the levels of its communications."""

    program: LoweredProgram
    segments: tuple[Segment | None, ...]  # for each item its segment; None for joins and communications
    comm_level: tuple[tuple[int, int], ...]  # for each comm item (level, bucket; for a send the part that it waits for)


def segment(program: LoweredProgram, variant: Variant = PLAIN) -> SegmentedProgram:
    """Assign segments, repeat views in their readers' segments, and cut backward passes into buckets."""
    if variant.weights:
        program = split_backward(program)
    if variant.recompute:
        program = recompute(program)
    program = with_reduced_gradients(program)
    chunk = chunks(program)
    program, levels = _with_buckets(program, chunk)
    program, levels = repeat_views(program, levels)
    parts = optimizer_parts(program, levels, _parts(program, levels))
    segments: list[Segment | None] = []
    comm: list[tuple[int, int]] = []
    for item, level, part in zip(program.items, levels, parts, strict=True):
        compute = item.kind is ItemKind.COMPUTE
        one = Segment(item.phase, item.placement, item.pieces, level, part, item.stage)
        segments.append(one if compute else None)
        comm.append((level, part if item.bucket is None else item.bucket))
    return SegmentedProgram(program, tuple(_joined(segments) if variant.joined else segments), tuple(comm))


def _with_buckets(program: LoweredProgram, chunk: Mapping[int, int]) -> tuple[LoweredProgram, list[int]]:
    """Put all collectives into buckets; also returns the levels of all items.

    What the optimizer sends (new parameters, where each rank updates its share) leaves with the part of the optimizer
    that makes it.  Parts of the optimizer follow from the buckets of gradients, so these are filled first.
    """
    first = _levels(program, chunk)
    parts = _parts(program, first)
    filled, least = fill_buckets(program, first, parts, chunk)
    levels = _levels(filled, chunk, least)
    sent = [k for k, i in enumerate(program.items) if i.kind is ItemKind.COMM and i.phase == Phase.OPTIMIZER]
    after = optimizer_parts(filled, levels, _parts(filled, levels)) if sent else parts
    if not any(after[k] for k in sent):
        return filled, levels
    for k in sent:
        parts[k] = after[k]
    filled, least = fill_buckets(program, first, parts, chunk)
    return filled, _levels(filled, chunk, least)


def _joined(segments: Sequence[Segment | None]) -> list[Segment | None]:
    """Join each forward segment with the first backward segment of the same level: nothing happens between them."""
    backward = {s for s in segments if s is not None and s.phase == Phase.BACKWARD and s.part == 0}
    forward = {replace(s, phase=Phase.BACKWARD) for s in segments if s is not None and s.phase == Phase.FORWARD}
    several = {replace(s, part=0) for s in forward if s.part}  # in several parts
    both = (forward - several) & backward
    found: list[Segment | None] = []
    for s in segments:
        one = s if s is None or s.phase != Phase.FORWARD else replace(s, phase=Phase.BACKWARD)
        found.append(replace(one, joined=True) if one is not None and one in both else s)
    return found


def _parts(program: LoweredProgram, levels: Sequence[int]) -> list[int]:
    """For each op the part of its segment; for each communication the last part that it waits for.

    A step of attention around a ring begins a part, and in the backward pass ends it: what it attends to is passed on,
    and gradients of the step before arrive, while it computes.
    """
    part_of: dict[int, int] = {}
    level_of: dict[int, int] = {}
    reduced = {v for i in program.items if i.kind is ItemKind.COMM for v in i.reads}
    joined = {v for i in program.items if i.kind is ItemKind.JOIN and i.writes[0] in reduced for v in i.reads}
    filled: dict[Segment, tuple[int, int]] = {}  # segment without part → (part, bytes of gradients in it)
    parts = []
    attending = _attending(program)
    for k, (item, level) in enumerate(zip(program.items, levels, strict=True)):
        if item.kind is not ItemKind.COMPUTE or item.phase not in IN_PARTS:
            before = [part_of.get(v, 0) for v in item.reads]
            before += [part_of.get(v, 0) for v in item.after if level_of.get(v) == level]
            parts.append(0 if item.kind is ItemKind.COMPUTE else max(before, default=0))
            part_of.update(dict.fromkeys(item.writes if item.kind is ItemKind.JOIN else (), parts[-1]))
            continue
        here = Segment(item.phase, item.placement, item.pieces, level, stage=item.stage)
        part, size = filled.get(here, (0, 0))
        if k in attending.views:
            parts.append(-1)  # that of its first reader
            continue
        attends = k in attending.steps
        if attends and here in filled:
            part, size = part + 1, 0
        level_of.update(dict.fromkeys(item.writes, level))
        parts.append(part)
        part_of.update(dict.fromkeys(item.writes, part))
        filling = () if item.phase == Phase.FORWARD else joined if item.pieces else reduced
        size += sum(_bytes(program.metas, v, item.placement) for v in item.writes if v in filling)
        full = size >= BUCKET or (attends and item.phase == Phase.BACKWARD)
        filled[here] = (part + 1, 0) if full else (part, size)
    first: dict[int, int] = {}  # value → the first part that reads it
    for k in reversed(range(len(parts))) if attending.views else ():
        item = program.items[k]
        parts[k] = min(first.get(v, parts[k]) for v in item.writes) if k in attending.views else parts[k]
        for v in item.reads if item.kind is ItemKind.COMPUTE else ():
            first[v] = min(parts[k], first.get(v, parts[k]))
    return parts


@dataclass(frozen=True, slots=True)
class _Attending:
    """Items, by position."""

    steps: frozenset[int]  # of attention around a ring
    views: frozenset[int]  # that are made for these steps, and moved nowhere


def _attending(program: LoweredProgram) -> _Attending:
    steps: set[int] = set()
    views: set[int] = set()
    read: set[int] = set()
    moved = {v for item in program.items if item.kind is not ItemKind.COMPUTE for v in item.reads}
    for k in range(len(program.items) - 1, -1, -1):
        item = program.items[k]
        if any(s.op in (RING, RING_BACKWARD) for some in item.steps.values() for s in some):
            steps.add(k)
        elif item.phase in IN_PARTS and is_view(item) and item.writes[0] in read - moved:
            views.add(k)
        else:
            continue
        read.update(item.reads)
    return _Attending(frozenset(steps), frozenset(views))


def _bytes(metas: Mapping[tuple[int, int], Meta], value: int, placement: Placement) -> int:
    meta = metas.get((value, placement.ranks[0]))
    return meta.nbytes if meta else 0


def _levels(program: LoweredProgram, chunk: Mapping[int, int], least: Mapping[int, int] | None = None) -> list[int]:
    """The level of every item, by position; ``least`` gives lower bounds for some.

    Gathers of one ``chunk`` get the level of the last op before them, so that their readers have a higher one.
    """
    bounds = dict(least or {})
    early = _early(program)
    moved = early | {k for k, i in enumerate(program.items) if i.phase == Phase.WEIGHT}
    levels = _lowest(program, chunk, bounds, moved)
    if early:
        levels = _as_late_as_their_readers(program, levels, early)
        bounds.update({k: levels[k] for k in early})
    if last := _last_of_weights(program, levels):
        bounds.update(last)
        levels = _lowest(program, chunk, bounds, moved)
    late = {k for k, i in enumerate(program.items) if i.kind is ItemKind.COMPUTE and i.phase == Phase.OPTIMIZER}
    return _as_late_as_their_readers(program, levels, late)


def _lowest(
    program: LoweredProgram, chunk: Mapping[int, int], least: Mapping[int, int], moved: Collection[int]
) -> list[int]:
    """The lowest legal level of each item; ops that are ``moved`` to later levels do not raise those of gathers."""
    made: dict[int, tuple[int, ProgramItem]] = {}  # value → the level that it has for its readers, and its maker
    levels = []
    highest: dict[tuple[Placement, int], int] = {}  # the highest level of a stage's ops so far
    begun: dict[int, int] = {}  # chunk → its level
    for k, item in enumerate(program.items):
        level = least.get(k, 0)
        place = (item.placement, item.stage)
        if k in chunk:
            level = max(level, begun.setdefault(chunk[k], highest.get(place, 0)))
        for v in (*item.reads, *item.after):
            if v not in made:
                continue
            before, maker = made[v]
            level = max(level, before + (maker.kind is item.kind is ItemKind.COMPUTE and _leaves(maker, item, before)))
        levels.append(level)
        if any(item.steps.values()) and k not in moved:
            highest[place] = max(level, highest.get(place, 0))
        for v in item.writes:
            made[v] = (level + (item.kind is not ItemKind.COMPUTE), item)
    return levels


def _leaves(maker: ProgramItem, reader: ProgramItem, level: int) -> bool:
    """Whether a reader must be on a higher level than its maker, which is on this level."""
    if maker.phase == Phase.SOURCE:
        return False  # sources are actors of their own, before all others
    earlier = PHASE_ORDER[maker.phase] > PHASE_ORDER[reader.phase]
    # what is computed once in an iteration from the inputs alone is also an actor of its own, before all pieces
    other_rate = maker.pieces != reader.pieces and (maker.pieces or level > 0)
    return earlier or other_rate or (maker.placement, maker.stage) != (reader.placement, reader.stage)


def _early(program: LoweredProgram) -> set[int]:
    """The ops of the backward pass that need no gradient: they could run right after the forward pass."""
    found: set[int] = set()
    waiting: set[int] = set()  # values of the backward pass that depend on gradients
    for k, item in enumerate(program.items):
        if item.phase not in (Phase.BACKWARD, Phase.WEIGHT):
            continue
        if item.kind is ItemKind.COMPUTE and not any(v in waiting for v in item.reads):
            found.add(k)
        else:
            waiting.update(item.writes)
    return found


def _last_of_weights(program: LoweredProgram, levels: Sequence[int]) -> dict[int, int]:
    """Op of phase "weight" → the highest level of its stage's: all are one actor, as nothing waits for them."""
    found: dict[tuple[Placement, int], list[int]] = {}
    for k, item in enumerate(program.items):
        if item.phase == Phase.WEIGHT:
            found.setdefault((item.placement, item.stage), []).append(k)
    return {k: max(levels[other] for other in ks) for ks in found.values() for k in ks}


def _as_late_as_their_readers(program: LoweredProgram, levels: Sequence[int], late: Collection[int]) -> list[int]:
    """The levels with the ``late`` ops (positions) raised as far as their readers allow."""
    out = list(levels)
    readers: dict[int, list[int]] = {}
    for k in range(len(out) - 1, -1, -1):
        item = program.items[k]
        if k in late:
            allowed = []
            for r in {r for v in item.writes for r in readers.get(v, ())}:
                reader = program.items[r]
                allowed.append(out[r] - (reader.kind is ItemKind.COMPUTE and _leaves(item, reader, out[r])))
            out[k] = max(out[k], min(allowed, default=out[k]))
        for v in item.reads:
            readers.setdefault(v, []).append(k)
    return out
