"""Group the gathers of variables (ZeRO) into chunks, so that few gathered copies are in memory at a time.

Gathers depend only on variables, so all of them could start with the iteration, and every rank would hold the whole
model.  They are grouped into chunks in the order of their use.  The readers of each chunk are actors of their own, and
a chunk starts when the readers of an earlier one are done.  With the last but one (AHEAD = 2), the next chunk is
gathered while one is used; how many more may be in memory is the variant's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.plan.plan import CollectiveKind, Read, Register

CHUNK = 4 << 20  # bytes on one rank after which a chunk is full


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """The gather of a chunk on one rank, and the actors that read the chunk."""

    gather: int  # actor
    level: int  # of the gather; see ``segment.py``
    readers: tuple[tuple[int, int], ...]  # (actor, its level), for those that fire as often as the gather


def is_gather(program: LoweredProgram, item: ProgramItem) -> bool:
    """Whether an item gathers a variable for forward or backward ops."""
    return (
        item.kind is ItemKind.COMM
        and item.phase in (Phase.FORWARD, Phase.BACKWARD)
        and all(comm.label == CollectiveKind.ALL_GATHER for comm in item.comms.values())
        and all(program.is_variable(v) for v in item.reads)
    )


def chunks(program: LoweredProgram) -> Mapping[int, int]:
    """The chunk of each gather, by position in the program."""
    found: dict[int, int] = {}
    open_: dict[tuple[Placement, int, str, bool], tuple[int, int]] = {}  # → (chunk, bytes in it)
    count = 0
    for k, item in enumerate(program.items):
        if not is_gather(program, item):
            continue
        key = (item.placement, item.stage, item.phase, item.pieces)
        chunk, nbytes = open_.get(key, (-1, CHUNK))
        if nbytes >= CHUNK:
            chunk, nbytes, count = count, 0, count + 1
        rank = item.placement.ranks[0]
        open_[key] = (chunk, nbytes + sum(program.metas[(v, rank)].nbytes for v in item.writes))
        found[k] = chunk
    return found


def delays(chains: Sequence[Sequence[ChunkUse]], ahead: int, first: int) -> Iterator[Register]:
    """Registers without tensors, numbered from ``first``, so that ``ahead`` chunks of a chain are in memory at a time.

    A chain has the chunks of a stage on one rank in the order of their use.  Each gather waits for the readers of the
    chunk that is ``ahead`` before it.
    """
    for chain in chains:
        for before, after in zip(chain, chain[ahead:], strict=False):
            for reader, level in before.readers:
                if level <= after.level:  # a reader of a higher level may itself depend on the gather
                    yield Register(first, reader, (Read(after.gather),), ())
                    first += 1
