"""A program goes in; every item gets the segment that it will be an actor of, and cheap views go where they are read.

A segment is what one actor does in a firing.  Items are in the same segment if they are on the same
placement, in the same phase, fire equally often and have the same *level*: the number of
communications, changes of rate and steps back in phase on the longest way to them.  No way out of
a segment leads back into it, so the actors make no circle.

Communications of the same kind among the same ranks share an actor if they are at the same level
and in the same bucket.  A backward segment is cut into parts where a bucket is full; the bucket leaves
when its last part is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.buckets import BUCKET, fill_buckets
from actorflow_compiler.gathers import chunks
from actorflow_compiler.lower import Item, Program
from actorflow_compiler.ops import Meta, Ref, substitute
from actorflow_compiler.placement import Placement
from actorflow_compiler.plan import Step

PHASE_ORDER = {"source": 0, "forward": 1, "backward": 2, "optimizer": 3}
VIEWS = frozenset({
    "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default", "aten.reshape.default",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims", "aten.expand.default",
    "aten.slice.Tensor", "aten.select.int", "aten.full.default", "aten.arange.default", "aten.arange.start",
    "aten.arange.start_step", "actorflow.carve", "actorflow.unpack",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """What makes items one actor on each rank of the placement."""

    phase: str
    placement: Placement
    pieces: bool
    level: int
    part: int = 0  # a backward pass is cut where a bucket of gradients is ready


@dataclass(frozen=True, slots=True)
class Segmented:
    """A program with the segment of every item (None for joins) and the level of communications."""

    program: Program
    segments: tuple[Segment | None, ...]  # of compute items
    comm_level: tuple[tuple[int, int], ...]  # of comm items: (level, bucket; for a send the part that it waits for)


def segment(program: Program) -> Segmented:
    """Assign segments, repeat views in their readers' segments, and cut backward passes into buckets."""
    chunk = chunks(program)
    levels = _levels(program, chunk)
    program, least = fill_buckets(program, levels, _parts(program, levels))
    levels = _levels(program, chunk, least)
    program, levels = _repeat_views(program, levels)
    parts = _parts(program, levels)
    segments: list[Segment | None] = []
    comm: list[tuple[int, int]] = []
    for item, level, part in zip(program.items, levels, parts, strict=True):
        compute = item.kind == "compute"
        segments.append(Segment(item.phase, item.placement, item.pieces, level, part) if compute else None)
        comm.append((level, part if item.bucket is None else item.bucket))
    return Segmented(program, tuple(segments), tuple(comm))


def _parts(program: Program, levels: Sequence[int]) -> list[int]:
    """For ops the part of their backward segment that they are in, for communications the last part they wait for."""
    part_of: dict[int, int] = {}
    joined = {v for i in program.items if i.kind == "join" for v in i.reads}
    reduced = {v for i in program.items if i.kind == "comm" for v in i.reads} | joined
    filled: dict[Segment, tuple[int, int]] = {}  # segment without part → (part, bytes of gradients in it)
    parts = []
    for item, level in zip(program.items, levels, strict=True):
        if item.kind != "compute" or item.phase != "backward":
            parts.append(0 if item.kind == "compute" else max((part_of.get(v, 0) for v in item.reads), default=0))
            part_of.update(dict.fromkeys(item.writes if item.kind == "join" else (), parts[-1]))
            continue
        here = Segment(item.phase, item.placement, item.pieces, level)
        part, size = filled.get(here, (0, 0))
        parts.append(part)
        part_of.update(dict.fromkeys(item.writes, part))
        size += sum(
            _bytes(program.metas, v, item.placement)
            for v in item.writes
            if v in reduced and (item.pieces is False or v in joined)
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
    made: dict[int, tuple[int, Item]] = {}  # value → level that it has for its readers, and its maker
    levels = []
    highest: dict[Placement, int] = {}  # of the ops so far
    begun: dict[int, int] = {}  # chunk → level
    for k, item in enumerate(program.items):
        level = least.get(k, 0) if least else 0
        if k in chunk:
            level = max(level, begun.setdefault(chunk[k], highest.get(item.placement, 0)))
        for v in item.reads:
            if v not in made:
                continue
            before, maker = made[v]
            level = max(level, before + (maker.kind == item.kind == "compute" and _leaves(maker, item)))
        levels.append(level)
        if any(item.steps.values()):
            highest[item.placement] = max(level, highest.get(item.placement, 0))
        for v in item.writes:
            made[v] = (level + (item.kind != "compute"), item)
    return _as_late_as_their_readers(program, levels)


def _leaves(maker: Item, reader: Item) -> bool:
    """Whether the way from one op to the next leaves the segment for good."""
    if maker.phase == "source":
        return False  # sources are actors of their own, before all others
    earlier = PHASE_ORDER[maker.phase] > PHASE_ORDER[reader.phase]
    return earlier or maker.pieces != reader.pieces or maker.placement != reader.placement


def _as_late_as_their_readers(program: Program, levels: list[int]) -> list[int]:
    """Optimizer ops that wait for nothing (counting steps) join the segment of those that read them."""
    out = list(levels)
    first: dict[int, int] = {}  # value → the lowest level at which it is read; -1: by something that is no optimizer op
    for k in range(len(out) - 1, -1, -1):
        item = program.items[k]
        late = item.kind == "compute" and item.phase == "optimizer"
        if late:
            readers = [first[v] for v in item.writes if v in first]
            out[k] = max(out[k], min(readers, default=out[k]))
        for v in item.reads:
            level = out[k] if late else -1
            first[v] = min(first.get(v, level), level)
    return out


def _repeat_views(program: Program, levels: list[int]) -> tuple[Program, list[int]]:
    """Copy views and constants into each segment that reads them, so that only what they look at is kept for it."""
    maker = {v: k for k, item in enumerate(program.items) for v in item.writes}
    metas, names, sbp = dict(program.metas), dict(program.names), dict(program.sbp)
    fresh = max(max(names, default=0), max((v for v, _ in metas), default=0)) + 1
    out: list[Item] = []
    new_levels: list[int] = []
    copies: dict[tuple[int, tuple[str, Placement, bool, int]], int] = {}

    def local(v: int, reader: Item, level: int) -> int:
        """The number of a value inside the reader's segment."""
        nonlocal fresh
        m = maker.get(v)
        here = (reader.phase, reader.placement, reader.pieces, level)
        if m is None:
            return v
        view = program.items[m]
        there = (view.phase, view.placement, view.pieces, levels[m])
        if (
            not _is_view(view)
            or view.placement != reader.placement
            or view.phase == "source"
            or here == there
            or (view.pieces and not reader.pieces)
        ):
            return v
        if (v, here) not in copies:
            rename = {r: local(r, reader, level) for r in view.reads}
            rename[v] = copies[(v, here)] = fresh
            names[fresh], sbp[fresh] = names.get(v, ""), sbp.get(v, "")
            metas.update({(fresh, rank): metas[(v, rank)] for rank in view.placement.ranks if (v, rank) in metas})
            fresh += 1
            out.append(replace(_renamed(view, rename), phase=reader.phase, pieces=reader.pieces))
            new_levels.append(level)
        return copies[(v, here)]

    for item, level in zip(program.items, levels, strict=True):
        if item.kind == "compute":
            rename = {v: local(v, item, level) for v in item.reads}
            item = _renamed(item, {v: n for v, n in rename.items() if v != n})
        out.append(item)
        new_levels.append(level)
    return _drop_unread(replace(program, items=tuple(out), metas=metas, names=names, sbp=sbp), new_levels)


def _is_view(item: Item) -> bool:
    return (
        item.kind == "compute"
        and len(item.writes) == 1
        and all(len(s) == 1 and s[0].op in VIEWS for s in item.steps.values())
    )


def _renamed(item: Item, rename: Mapping[int, int]) -> Item:
    def at(v: int) -> Ref:
        return Ref(rename.get(v, v))

    steps = {
        rank: tuple(
            Step(
                s.op,
                substitute(s.args, at),
                tuple((k, substitute(v, at)) for k, v in s.kwargs),
                tuple(rename.get(o, o) for o in s.outs),
            )
            for s in list_
        )
        for rank, list_ in item.steps.items()
    }
    return replace(
        item,
        reads=tuple(rename.get(v, v) for v in item.reads),
        writes=tuple(rename.get(v, v) for v in item.writes),
        steps=steps,
    )


def _drop_unread(program: Program, levels: list[int]) -> tuple[Program, list[int]]:
    needed = {v for _, v in program.updates} | {v for v, *_ in program.results}
    kept: list[tuple[Item, int]] = []
    for item, level in zip(reversed(program.items), reversed(levels), strict=True):
        if not any(w in needed for w in item.writes):
            continue
        kept.append((item, level))
        needed.update(item.reads)
        needed.update(
            program.alias[(v, r)] for v in item.reads for r in item.placement.ranks if (v, r) in program.alias
        )
    kept.reverse()
    return replace(program, items=tuple(i for i, _ in kept)), [level for _, level in kept]
