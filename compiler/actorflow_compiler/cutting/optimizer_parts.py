"""Cut optimizer segments into parts, each of which runs as soon as the gradients that it needs have arrived.

Gradients arrive bucket by bucket.  An op of the optimizer can run when the last bucket that it depends on is there;
that is its *arrival*.  Ops with the same arrival are a part, together with those of the next arrivals until their
gradients fill a bucket; each part becomes an actor.  Whatever depends on all gradients, such as the ops behind a norm
for clipping or behind a check for infinity, has the last arrival, and so is one part.

Only what is small passes from one part to another: a large value that a later part needs, such as an unscaled
gradient, would have to be kept, so the op that makes it is put off.  What depends on no gradient goes with its readers.

What the backward pass does to gradients after their reduction, such as a cast to the parameter's dtype, is counted to
the optimizer: as a segment of the backward pass, it would wait for all gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.cutting.buckets import BUCKET
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem

SMALL = 1 << 10  # bytes on one rank of all that an op may pass to a later part

Arrival = tuple[int, int]  # (level, part) of what arrives last
AT_ONCE: Arrival = (-1, -1)  # the arrival of what depends on no gradient
Group = tuple[Placement, int]  # placement and stage: ops of the same level that could be one actor


def optimizer_parts(program: LoweredProgram, levels: Sequence[int], parts: Sequence[int]) -> list[int]:
    """For each item, by position, its part: of the backward pass, as ``parts`` says, or of the optimizer.

    That of a communication is the last part that it waits for.
    """
    found = list(parts)
    if not any(parts):  # no bucket leaves before the backward pass is done
        return found
    groups: dict[int, dict[Group, list[int]]] = {}  # level → groups of ops
    moves: dict[int, list[int]] = {}  # level → communications of the optimizer
    for k, item in enumerate(program.items):
        if item.kind is ItemKind.COMPUTE and item.phase == Phase.OPTIMIZER and not item.pieces:
            groups.setdefault(levels[k], {}).setdefault((item.placement, item.stage), []).append(k)
        elif item.kind is ItemKind.COMM and item.phase == Phase.OPTIMIZER:
            moves.setdefault(levels[k], []).append(k)
    maker = {v: k for k, item in enumerate(program.items) for v in item.writes}
    for level in sorted(groups.keys() | moves.keys()):
        last = _last_of_buckets(program, levels, found)
        for ops in groups.get(level, {}).values():
            cutter = _GroupCutter(program, ops, maker, levels, found, last)
            for k, part in cutter.parts().items():
                found[k] = part
        for k in moves.get(level, ()):
            found[k] = max([found[k], *(found[maker[v]] for v in program.items[k].reads if v in maker)])
    return found


def with_reduced_gradients(program: LoweredProgram) -> LoweredProgram:
    """The program in which ops on gradients that are reduced already are of the optimizer's phase.

    They are those of the backward pass that keep the shape of what was communicated, and whose results only the
    optimizer needs; products of matrices are not.
    """
    reduced: set[int] = set()  # values of the backward pass that were communicated, or made of these
    behind: set[int] = set()  # positions of ops
    for k, item in enumerate(program.items):
        if item.phase not in (Phase.BACKWARD, Phase.WEIGHT) or item.pieces:
            continue
        if item.kind is ItemKind.COMM:
            reduced.update(item.writes)
        elif item.kind is ItemKind.COMPUTE and not item.flops and _keeps_shape(program, item, reduced):
            behind.add(k)
            reduced.update(item.writes)
    needed = {v for _, v in program.updates} | {v for v, *_ in program.results}  # by others than the optimizer
    items = list(program.items)
    for k in range(len(items) - 1, -1, -1) if behind else ():
        item = items[k]
        if k in behind and not any(v in needed for v in item.writes):
            items[k] = replace(item, phase=Phase.OPTIMIZER)
        elif item.phase != Phase.OPTIMIZER:
            needed.update((*item.reads, *item.after))
    return replace(program, items=tuple(items))


# ---- inside


def _keeps_shape(program: LoweredProgram, item: ProgramItem, reduced: Collection[int]) -> bool:
    """Whether an op has a result of the shape of what it reads of ``reduced`` values, on every rank."""
    made = [v for v in item.reads if v in reduced]
    return bool(made) and all(
        program.metas[v, rank].shape == program.metas[w, rank].shape
        for rank in item.steps
        for v in made
        for w in item.writes
        if (v, rank) in program.metas and (w, rank) in program.metas
    )


def _last_of_buckets(program: LoweredProgram, levels: Sequence[int], parts: Sequence[int]) -> dict[int, Arrival]:
    """Bucket → when the last of its communications arrives."""
    last: dict[int, Arrival] = {}
    for item, level, part in zip(program.items, levels, parts, strict=True):
        if item.bucket is not None:
            last[item.bucket] = max((level, part), last.get(item.bucket, AT_ONCE))
    return last


class _GroupCutter:
    """Cuts the ops of one level, placement and stage (positions in the program) into parts."""

    def __init__(
        self,
        program: LoweredProgram,
        ops: Sequence[int],
        maker: Mapping[int, int],
        levels: Sequence[int],
        waits: Sequence[int],
        last: Mapping[int, Arrival],
    ) -> None:
        self.program, self.ops, self.maker = program, ops, maker
        self.levels, self.waits, self.last = levels, waits, last
        self.here = set(ops)

    def parts(self) -> dict[int, int]:
        """Op → its part; no op is in an earlier part than one whose results it reads."""
        arrivals = self.arrivals()
        part_of = self.filled(arrivals)
        return {k: part_of[arrivals[k]] for k in self.ops}

    def arrivals(self) -> dict[int, Arrival]:
        """Op → when what it needs, or what has to wait with it, has arrived."""
        before: dict[int, list[int]] = {}  # op → those of the group whose results it reads
        found: dict[int, Arrival] = {}
        for k in self.ops:
            makers = {self.maker[v] for v in self.program.items[k].reads if v in self.maker}
            before[k] = [m for m in makers if m in self.here]
            found[k] = max((self.arrival(m) for m in makers if m not in self.here), default=AT_ONCE)
        readers: dict[int, list[int]] = {}
        for k, makers_here in before.items():
            for m in makers_here:
                readers.setdefault(m, []).append(k)
        small = {k for k in self.ops if self.is_small(k)}
        changed = True
        while changed:  # arrivals only become later
            changed = False
            for k in self.ops:
                latest = max([found[k], *(found[m] for m in before[k])])
                changed, found[k] = changed or latest > found[k], latest
            for k in reversed(self.ops):
                if k not in readers or (k in small and found[k] > AT_ONCE):
                    continue
                those = [found[r] for r in readers[k]]
                latest = max(found[k], min(those) if k in small else max(those))
                changed, found[k] = changed or latest > found[k], latest
        return found

    def arrival(self, k: int) -> Arrival:
        """When the results of an item outside of the group are there."""
        bucket = self.program.items[k].bucket
        return (self.levels[k], self.waits[k]) if bucket is None else self.last[bucket]

    def is_small(self, k: int) -> bool:
        """Whether the results of an op may pass to a later part: they are small, or other names of what it reads."""
        item = self.program.items[k]
        return not any(item.steps.values()) or sum(map(self.nbytes, item.writes)) <= SMALL

    def nbytes(self, value: int) -> int:
        """Bytes of a value on the first rank of its maker's."""
        rank = self.program.items[self.maker[value]].placement.ranks[0]
        meta = self.program.metas.get((value, rank))
        return 0 if meta is None else meta.nbytes

    def filled(self, arrivals: Mapping[int, Arrival]) -> dict[Arrival, int]:
        """Arrival → the part of its ops: what arrives for a part, but for the last one, fills a bucket."""
        nbytes = dict.fromkeys(sorted(arrivals.values()), 0)
        counted: set[int] = set()
        for k in sorted(self.ops, key=arrivals.__getitem__):
            for v in self.program.items[k].reads:
                if v in self.maker and self.maker[v] not in self.here and v not in counted:
                    counted.add(v)
                    nbytes[arrivals[k]] += self.arriving_bytes(v)
        found: dict[Arrival, int] = {}
        part = size = 0
        for arrival, more in nbytes.items():
            found[arrival] = part
            size += more
            if size >= BUCKET:
                part, size = part + 1, 0
        return found

    def arriving_bytes(self, value: int) -> int:
        """Bytes of a value that comes from outside; of one that was moved, those before or after, whichever is more."""
        item = self.program.items[self.maker[value]]
        if item.kind is not ItemKind.COMM:
            return self.nbytes(value)
        source = item.reads[item.writes.index(value)]
        return max(self.nbytes(v) for v in (value, source) if v in self.maker)
