"""Recompute forward values in the backward pass of each stage, instead of keeping them.

The forward pass of a stage then keeps only what came from other stages, from the batch or out of a collective, and
what is computed once for all micro-batches; and what attention around a ring gives, since the blocks that it was made
of are gone.  No communication is repeated, except for the gathers of ZeRO, which are made anew for the backward pass
anyway.  Random numbers are functions of a counter, hence the same when drawn again.
Running statistics are not updated a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.custom_ops.ring_attention import RING
from actorflow_compiler.cutting.copies import ItemCopier
from actorflow_compiler.cutting.gathers import is_gather
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.graph.graph import InputKind
from actorflow_compiler.plan.plan import Step

Home = tuple[Placement, int]  # a stage's placement and number

WITH_STATISTICS = "aten._native_batch_norm_legit_functional.default"  # the last two outputs are the new statistics
WITHOUT_STATISTICS = "aten._native_batch_norm_legit.no_stats"
RECEIVES = "actorflow.arrange"


def recompute(program: LoweredProgram) -> LoweredProgram:
    """Repeat the forward ops whose values a stage's backward pass reads, in that backward pass."""
    return _Recomputation(program).run()


def recompute_notes(program: LoweredProgram, pieces: int) -> tuple[str, ...]:
    """The note about how much a program recomputes, if anything."""
    again = [i for i in program.items if i.again]
    listed = program.listed
    flops = sum(f * listed.stands_for(i.placement, r) * pieces for i in again for r, f in i.flops.items())
    if not again:
        return ()
    stages = len({(i.placement, i.stage) for i in again})
    return (
        f"the backward pass of {stages} stage{'s' * (stages > 1)} computes forward values again from what the stage "
        f"receives: {flops / max(1.0, program.flops_done):.1%} more FLOPs",
    )


class _Recomputation:
    def __init__(self, program: LoweredProgram) -> None:
        self.program = program
        self.copies = ItemCopier(program)
        self.maker = {v: k for k, item in enumerate(program.items) for v in item.writes}
        news = {new for _, new in program.updates if program.items[self.maker[new]].pieces}
        names = {name for name, new in program.updates if new in news}
        # variables that each piece updates: running statistics
        self.moving = {v for v, (name, kind) in program.inputs.items() if kind == InputKind.VARIABLE and name in names}
        self.again: dict[Home, list[int]] = {}  # stage → forward items that are repeated in it, the last one first
        self.new: dict[tuple[Home, int], int] = {}  # (stage, value) → its number in the backward pass
        self.gathered: dict[object, tuple[int, ...]] = {}  # key of a gather → what it makes in the backward pass
        self.same: dict[int, int] = {}  # value of a gather that is left out → the value of the equal gather before it
        self.comm_id = 1 + max((c.id for i in program.items for c in i.comms.values()), default=-1)
        self.out: list[ProgramItem] = []

    def run(self) -> LoweredProgram:
        self.choose()
        for k, item in enumerate(self.program.items):
            home = (item.placement, item.stage)
            if _is_backward(item):
                for m in self.due(home, k):
                    self.repeat(m, home)
                item = self.copies.renamed(item, {v: n for v in item.reads if (n := self.new.get((home, v), v)) != v})
            item = self.copies.renamed(item, {v: self.same[v] for v in item.reads if v in self.same})
            if item.phase == Phase.BACKWARD and is_gather(self.program, item):
                made = self.gathered.setdefault(_doing(item), item.writes)
                if made != item.writes:  # an equal gather was made for recomputed items
                    self.same.update(zip(item.writes, made, strict=True))
                    continue
            self.out.append(item)
        return self.copies.program(self.out)

    def choose(self) -> None:
        """Find the forward items that backward ops of the same stage need, directly or indirectly."""
        wanted: dict[Home, set[int]] = {}
        for k in range(len(self.program.items) - 1, -1, -1):
            item = self.program.items[k]
            home = (item.placement, item.stage)
            here = wanted.setdefault(home, set())
            if _is_backward(item):
                here.update(item.reads)
            elif any(v in here for v in item.writes) and self.can_repeat(item, here):
                here.update(item.reads)
                self.again.setdefault(home, []).append(k)

    def can_repeat(self, item: ProgramItem, wanted: set[int]) -> bool:
        if item.kind is not ItemKind.COMPUTE or item.phase != Phase.FORWARD or not item.pieces:
            return False
        if self.renames(item):
            return True
        ranks = self.program.listed.of(item.placement)
        if any(not item.steps.get(r) or (v, r) in self.program.alias for r in ranks for v in item.writes):
            return False
        if any(s.op in (RECEIVES, RING) for steps in item.steps.values() for s in steps):
            return False
        return not self.moving.intersection(item.reads) or _without_statistics(item, wanted) is not None

    def renames(self, item: ProgramItem) -> bool:
        """Whether an item only makes an alias of its operand."""
        return (
            len(item.reads) == len(item.writes) == 1
            and not any(item.steps.values())
            and all(
                self.program.alias.get((item.writes[0], r)) == item.reads[0]
                for r in self.program.listed.of(item.placement)
            )
        )

    def due(self, home: Home, before: int) -> Iterator[int]:
        """The items to be repeated that come before position ``before``; each is given once."""
        waiting = self.again.get(home, [])
        while waiting and waiting[-1] < before:
            yield waiting.pop()

    def repeat(self, number: int, home: Home) -> None:
        item = self.program.items[number]
        for v in item.reads:
            self.gather(v, home)
        if self.renames(item):
            self.new[(home, item.writes[0])] = self.new.get((home, item.reads[0]), item.reads[0])
            return
        if self.moving.intersection(item.reads):
            item = _without_statistics(item, set()) or item
        copy, number_of = self.copies.of(item, {v: self.new.get((home, v), v) for v in item.reads})
        self.new.update({(home, v): n for v, n in number_of.items()})
        self.out.append(replace(copy, phase=Phase.BACKWARD, again=True))

    def gather(self, value: int, home: Home) -> None:
        """If a value is a variable gathered for the forward pass, gather it for the backward pass as well."""
        maker = self.maker.get(value)
        if maker is None or (home, value) in self.new:
            return
        item = self.program.items[maker]
        if item.phase != Phase.FORWARD or not is_gather(self.program, item):
            return
        item = replace(item, phase=Phase.BACKWARD)
        if (made := self.gathered.get(_doing(item))) is not None:
            self.new.update({(home, v): n for v, n in zip(item.writes, made, strict=True)})
            return
        copy, number_of = self.copies.of(item, {})
        ids = {c.id: self.comm_id + i for i, c in enumerate({c.id: c for c in item.comms.values()}.values())}
        self.comm_id += len(ids)
        comms = {r: replace(c, id=ids[c.id]) for r, c in item.comms.items()}
        self.new.update({(home, v): n for v, n in number_of.items()})
        self.gathered[_doing(copy)] = copy.writes
        self.out.append(replace(copy, comms=comms))


def _is_backward(item: ProgramItem) -> bool:
    return item.kind is ItemKind.COMPUTE and item.phase in (Phase.BACKWARD, Phase.WEIGHT) and item.pieces


def _doing(item: ProgramItem) -> object:
    """A key of a communication, equal for communications with the same result."""
    return item.reads, item.phase, item.pieces, tuple((r, replace(c, id=0)) for r, c in item.comms.items())


def _without_statistics(item: ProgramItem, wanted: set[int]) -> ProgramItem | None:
    """Batch norm in training without the update of its statistics; None for other ops, or if the update is wanted."""
    steps: dict[int, tuple[Step, ...]] = {}
    for rank, list_ in item.steps.items():
        for s in list_:
            if s.op != WITH_STATISTICS or s.args[5] is not True or wanted.intersection(s.outs[3:]):
                return None
            x, weight, bias, _, _, training, momentum, eps = s.args
            args = (x, weight, bias, training, momentum, eps)
            steps[rank] = (Step(WITHOUT_STATISTICS, args, (), s.outs[:3]),)
    kept = {v for (s,) in steps.values() for v in (*s.reads(), *s.outs)}
    return replace(
        item, steps=steps, reads=tuple(v for v in item.reads if v in kept),
        writes=tuple(v for v in item.writes if v in kept),
    )  # fmt: skip
