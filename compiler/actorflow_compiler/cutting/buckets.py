"""Put the collectives of a program into buckets, whose members are sent together.

A bucket is filled in the order in which its members are ready.  Gradients that only the optimizer needs may wait for
those of later levels until a bucket is full, so that many small ones, which a tensor-parallel model makes level by
level, are sent together.  All others are sent at once.  A full bucket does not grow, so that its buffers stay small,
except by the rest of what the optimizer sends at one time, or of a chunk of parameters (``gathers.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.plan.plan import Send

BUCKET = 4 << 20  # bytes on one rank after which a bucket is full

Kind = tuple[str, frozenset[tuple[int, ...]], str, int, bool]  # what must be equal in a bucket; see ``_bucket_key``


@dataclass(slots=True)
class _Bucket:
    """A bucket that is being filled."""

    number: int
    ready: tuple[int, int]  # (level, part) of its last member
    nbytes: int = 0


def fill_buckets(
    program: LoweredProgram, levels: Sequence[int], parts: Sequence[int], chunk: Mapping[int, int]
) -> tuple[LoweredProgram, Mapping[int, int]]:
    """Give every collective its bucket; also returns lower bounds on the levels of items, by position.

    ``parts[k]`` is the last part of a backward segment that item k waits for, ``chunk[k]`` the chunk of a gather.
    """
    patient = _patient(program).difference(chunk)  # a chunk is gathered at once
    items = list(program.items)
    ready = sorted(
        (
            k
            for k, i in enumerate(items)
            if i.kind is ItemKind.COMM and not any(isinstance(c, Send) for c in i.comms.values())
        ),
        key=lambda k: (levels[k], parts[k], k),
    )
    open_: dict[tuple[Kind, bool, int], _Bucket] = {}
    members: dict[int, list[int]] = {}
    left: Counter[tuple[Kind, bool, tuple[int, int]]] = Counter()  # bytes that are ready at once and in no bucket yet
    nbytes = {k: _bytes(program, items[k]) for k in ready}
    for k in ready:
        left[_bucket_key(items[k]), k in patient, (levels[k], parts[k])] += nbytes[k]
    for k in ready:
        at, waits = (levels[k], parts[k]), k in patient
        key = (_bucket_key(items[k]), waits, chunk.get(k, -1))
        bucket = open_.get(key)
        rest, left[*key[:2], at] = left[*key[:2], at], left[*key[:2], at] - nbytes[k]
        # the rest of what a part of the optimizer sends goes with it, unless it fills a bucket of its own
        grows = k in chunk or (items[k].phase == Phase.OPTIMIZER and rest < BUCKET)
        full = bucket is not None and bucket.nbytes >= BUCKET and not grows
        if bucket is None or (bucket.ready != at and (full or not waits)) or (full and not waits):
            bucket = open_[key] = _Bucket(len(members), at)
        bucket.ready = at
        bucket.nbytes += nbytes[k]
        members.setdefault(bucket.number, []).append(k)
        items[k] = replace(items[k], bucket=bucket.number)
    least = {k: max(levels[m] for m in ks) for ks in members.values() for k in ks}
    return replace(program, items=tuple(items)), least


def _patient(program: LoweredProgram) -> set[int]:
    """The communications of backward passes, by position, whose results only the optimizer needs."""
    found: set[int] = set()
    hurried: set[int] = set()  # values that anything else needs
    for k in range(len(program.items) - 1, -1, -1):
        item = program.items[k]
        if item.phase == Phase.OPTIMIZER:
            continue
        if item.phase in (Phase.BACKWARD, Phase.WEIGHT) and not any(v in hurried for v in item.writes):
            if item.kind is ItemKind.COMM:
                found.add(k)
            if item.kind is not ItemKind.COMPUTE or not item.flops:
                continue
        hurried.update(item.reads)
    return found


def _bucket_key(item: ProgramItem) -> Kind:
    one = next(iter(item.comms.values()))
    return one.label, item.groups, item.phase, item.stage, item.pieces


def _bytes(program: LoweredProgram, item: ProgramItem) -> int:
    """Bytes that one rank contributes or receives, whichever is more."""
    rank = next(iter(item.comms))
    sides = (item.reads, item.writes)
    return max(sum(meta.nbytes for v in side if (meta := program.metas.get((v, rank))) is not None) for side in sides)
