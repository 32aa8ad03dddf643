"""Group the gathers of variables (ZeRO) into chunks, so that few gathered copies are in memory at a time.

Gathers depend only on variables, so all of them could start with the iteration, and every rank would hold the whole
model.  They are grouped into chunks in the order of their use.  The readers of each chunk are actors of their own, and
a chunk starts when the readers of an earlier one are done.  With the last but one (AHEAD = 2), the next chunk is
gathered while one is used; how many more may be in memory is the variant's choice.

Each micro-batch gathers anew, in turn: the first chunks of a pass wait for readers of its last chunks in the
micro-batch before, or they would be in memory for all micro-batches at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.cutting.copies import is_view
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.plan.plan import Collective, CollectiveKind, Plan, Read, Register

CHUNK = 4 << 20  # bytes on one rank after which a chunk is full


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """The gathers of a chunk on one rank, one for each group of ranks, and the actors that read the chunk."""

    gathers: tuple[int, ...]  # actors
    level: int  # of the gathers; see ``segment.py``
    phase: Phase
    readers: tuple[tuple[int, int], ...]  # (actor, its level), for those that fire as often as the gathers
    rounds: int = 0  # the fewest of its readers; see ``rounds``


def is_gather(program: LoweredProgram, item: ProgramItem) -> bool:
    """Whether an item gathers a variable for forward or backward ops."""
    return (
        item.kind is ItemKind.COMM
        and item.phase in (Phase.FORWARD, Phase.BACKWARD)
        and all(comm.label == CollectiveKind.ALL_GATHER for comm in item.comms.values())
        and all(program.is_variable(v) for v in item.reads)
    )


def chunks(program: LoweredProgram) -> Mapping[int, int]:
    """The chunk of each gather, by position in the program.

    What one op reads is in one chunk: else its readers would hold two chunks, and a third one came late.
    """
    found: dict[int, int] = {}
    open_: dict[tuple[Placement, int, str, bool], tuple[int, int]] = {}  # → (chunk, bytes in it)
    gathered: dict[int, int] = {}  # value, or view of one → its chunk
    unread: set[int] = set()  # chunks of which no op has read anything since the last gather but to make a view
    count = 0
    for k, item in enumerate(program.items):
        if not is_gather(program, item):
            read = [v for v in item.reads if v in gathered]
            if read and (is_view(item) or not any(item.steps.values())):
                gathered[item.writes[0]] = gathered[read[0]]
            elif read and item.kind is ItemKind.COMPUTE:
                unread.difference_update(gathered[v] for v in read)
            continue
        key = (item.placement, item.stage, item.phase, item.pieces)
        chunk, nbytes = open_.get(key, (-1, CHUNK))
        if nbytes >= CHUNK and chunk not in unread:
            chunk, nbytes, count = count, 0, count + 1
        rank = item.placement.ranks[0]
        open_[key] = (chunk, nbytes + sum(program.metas[(v, rank)].nbytes for v in item.writes))
        found[k] = chunk
        gathered.update(dict.fromkeys(item.writes, chunk))
        unread.add(chunk)
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
                    yield Register(first, reader, tuple(map(Read, after.gathers)), ())
                    first += 1


def micro_batch_delays(
    chains: Sequence[Sequence[ChunkUse]], ahead: int, first: int, rounds: Mapping[int, int], shared: bool
) -> Iterator[Register]:
    """Registers without tensors, numbered from ``first``, by which the micro-batches of each pass gather in turn.

    With ``delays``, ``ahead`` chunks of a stage's forward pass, and as many of its backward pass, are then in memory at
    a time; ``shared`` by both, so many in all.  A reader that may wait for more micro-batches (``rounds``) delays none,
    nor does one without rounds: gradients of parameters that are actors of their own run whenever there is time.
    """
    for chain in chains:
        passes: dict[tuple[Phase | None, int], list[ChunkUse]] = {}
        for use in chain:
            passes.setdefault((None if shared else use.phase, use.rounds), []).append(use)
        for uses in passes.values():
            for i, after in enumerate(uses[:ahead]):
                before = (i - ahead) % len(uses)
                back = (before - i + ahead) // len(uses)  # micro-batches
                for reader, _ in uses[before].readers:
                    if rounds.get(reader, math.inf) <= after.rounds:
                        reads = tuple(map(Read, after.gathers))
                        yield Register(first, reader, reads, (), slots=back + 1, initial=back)
                        first += 1


def rounds(plan: Plan) -> Mapping[int, int]:
    """Actor → on the longest path to it, how often something is joined from all micro-batches.

    A firing of an actor can depend on later micro-batches of another only if it has more rounds.
    """
    node = {a.id: ("comm", a.comm.id) if isinstance(a.comm, Collective) else ("actor", a.id) for a in plan.actors}
    after: dict[tuple[str, int], list[tuple[tuple[str, int], int]]] = {n: [] for n in node.values()}
    missing: Counter[tuple[str, int]] = Counter()
    for register in plan.registers:
        for read in register.readers if not register.initial else ():
            after[node[register.producer]].append((node[read.actor], int(register.fill > 1)))
            missing[node[read.actor]] += 1
    found = dict.fromkeys(after, 0)
    ready = [n for n in after if not missing[n]]
    for n in ready:
        for reader, joined in after[n]:
            found[reader] = max(found[reader], found[n] + joined)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return {a: found[n] for a, n in node.items()}
