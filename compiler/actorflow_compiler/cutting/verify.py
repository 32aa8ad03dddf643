"""Verify that a lowered program, and its division into segments, are legal."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Meta, Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem
from actorflow_compiler.cutting.segment import PHASE_ORDER, Segment, SegmentedProgram
from actorflow_compiler.cutting.stores import SegmentGraph
from actorflow_compiler.infer.layout_assignment import StepLayouts
from actorflow_compiler.plan.plan import Send
from actorflow_compiler.plan.region import device_shape


def verify_program(program: LoweredProgram, step: StepLayouts) -> LoweredProgram:
    """Return the program if it is legal, else raise PlanError that names the item, the value and the rank.

    Checked, in the order of the items: on each rank a value is made once, before it is read, and its shape is known;
    its shape is that of its layout where the step has one for it; every item is carried out by ranks of its
    placement, and by every member of its groups; no item makes values with elements that nothing reads; results and
    new values of variables exist in their shapes.
    """
    _ProgramVerifier(program, step).run()
    return program


class _ProgramVerifier:
    def __init__(self, program: LoweredProgram, step: StepLayouts) -> None:
        self.program, self.step = program, step
        self.known: set[tuple[int, int]] = set()  # (local value, rank)
        self.made_by: dict[int, ProgramItem] = {}
        self.shapes: dict[tuple[tuple[int, ...], NdSbp, Placement], tuple[tuple[int, tuple[int, ...]], ...]] = {}

    def run(self) -> None:
        program = self.program
        for value, rank in program.metas:
            if value in program.inputs:
                self.known.add((value, rank))
        for item in program.items:
            self.item(item)
        self.values()
        self.ends()

    def item(self, item: ProgramItem) -> None:
        """Check one item, and record what it makes."""
        if item.phase not in PHASE_ORDER:
            raise PlanError(
                f"program: {_name(item)} has phase {item.phase!r}; one of {', '.join(PHASE_ORDER)} was expected"
            )
        for value in item.writes:
            if value in self.made_by or value in self.program.inputs:
                raise PlanError(f"program: %{value} is made twice, the second time by {_name(item)}")
            self.made_by[value] = item
        if item.kind is ItemKind.COMPUTE:
            self.steps(item)
        elif item.kind is ItemKind.COMM:
            self.comm(item)
        elif item.kind is ItemKind.JOIN:
            for rank in self.program.listed.of(item.placement):
                self.read(item, item.reads, rank)
                self.make(item, item.writes, rank)
        else:
            raise PlanError(f"program: unknown kind {item.kind!r}; compute, comm or join was expected")

    def steps(self, item: ProgramItem) -> None:
        for rank, steps in item.steps.items():
            if rank not in item.placement:
                raise PlanError(f"program: {_name(item)} computes on rank {rank}, which is not of {item.placement}")
            for step in steps:
                self.read(item, step.reads(), rank)
                self.make(item, (o for o in step.outs if o >= 0), rank)
            if not steps:  # what it writes are aliases
                for value in item.writes:
                    self.read(item, (value,), rank)
            for value in item.writes:
                if (value, rank) in self.program.alias:
                    self.known.add((value, rank))

    def comm(self, item: ProgramItem) -> None:
        if len(item.reads) != len(item.writes):
            raise PlanError(f"program: {_name(item)} takes {len(item.reads)} values and gives {len(item.writes)}")
        listed = self.program.listed
        groups = {comm.id: listed.members(comm.ranks) for comm in item.comms.values()}
        for rank, comm in item.comms.items():
            if rank not in item.placement:
                raise PlanError(f"program: {_name(item)} moves from rank {rank}, which is not of {item.placement}")
            if rank not in comm.ranks or listed.members(comm.ranks) != groups[comm.id]:
                raise PlanError(f"program: {_name(item)} has rank {rank} in a group of {list(comm.ranks)}")
            self.read(item, item.reads, rank)
        for rank, comm in item.comms.items():
            if isinstance(comm, Send):
                if comm.from_rank != rank:
                    raise PlanError(f"program: {_name(item)} from rank {rank} goes by the group {list(comm.ranks)}")
                self.make(item, item.writes, comm.to_rank)
                continue
            absent = [r for r in comm.ranks if r in listed and r not in item.comms]
            if absent:
                raise PlanError(f"program: {_name(item)} waits for rank {absent[0]}, which takes no part in it")
            self.make(item, item.writes, rank)

    def read(self, item: ProgramItem, values: Iterable[int], rank: int) -> None:
        """Check that values exist on a rank."""
        for value in values:
            if not self.exists(value, rank):
                raise PlanError(f"program: {_name(item)} reads %{value} on rank {rank} before it is made there")

    def exists(self, value: int, rank: int) -> bool:
        """Whether a value, or the value that it is another name of, was made on a rank."""
        while (value, rank) in self.program.alias:
            value = self.program.alias[(value, rank)]
        return (value, rank) in self.known

    def make(self, item: ProgramItem, values: Iterable[int], rank: int) -> None:
        """Check that values are new on a rank and that their shapes are known, and record them."""
        for value in values:
            if (value, rank) in self.known:
                raise PlanError(f"program: %{value} is made twice on rank {rank}, the second time by {_name(item)}")
            if (value, rank) not in self.program.metas:
                raise PlanError(f"program: nothing is known of %{value} on rank {rank}, made by {_name(item)}")
            self.known.add((value, rank))

    def values(self) -> None:
        """Check that all values have the shapes of their layouts, and that all are read."""
        layouts, metas = self.step.layouts, self.step.graph.metas
        for value in self.made_by:
            if value in layouts.value and value in metas:
                self.lies(f"%{value}", value, metas[value], layouts.placement[value], layouts.value[value])
        read = {v for item in self.program.items for v in item.reads} | {v for v, *_ in self.program.results}
        read |= {value for _, value in self.program.updates}
        read |= {v for item in self.program.items for steps in item.steps.values() for s in steps for v in s.reads()}
        full = {value for (value, _), meta in self.program.metas.items() if 0 not in meta.shape}
        for item in self.program.items:
            if not read.intersection(item.writes) and full.intersection(item.writes):
                raise PlanError(f"program: nobody reads what {_name(item)} makes")

    def lies(self, what: str, value: int, meta: Meta, placement: Placement, sbp: NdSbp) -> None:
        """Check that the part of a value on each rank has the shape and dtype that its layout says."""
        key = (meta.shape, sbp, placement)
        if key not in self.shapes:
            listed = self.program.listed.among(placement)
            self.shapes[key] = tuple((rank, device_shape(meta.shape, sbp, placement, k)) for k, rank in listed)
        for rank, shape in self.shapes[key]:
            found = self.program.metas.get((value, rank))
            if found is None or found.shape != shape or found.dtype != meta.dtype:
                raise PlanError(
                    f"program: {what} is {found or 'nothing'} on rank {rank}; its layout says {Meta(shape, meta.dtype)}"
                )

    def ends(self) -> None:
        """Check that results and new values of variables are on the ranks of their layouts."""
        homes = self.step.homes
        for name, value in self.program.updates:
            variable = next(v for v in self.step.variables if v.name == name)
            self.at(f"the new value of {name}", value, homes[name][0])
            self.lies(f"the new value of {name}", value, Meta(variable.shape, variable.dtype), *homes[name])
        for value, placement, sbp, meta in self.program.results:
            self.at(f"the result %{value}", value, placement)
            self.lies(f"the result %{value}", value, meta, placement, sbp)

    def at(self, what: str, value: int, placement: Placement) -> None:
        for rank in self.program.listed.of(placement):
            if not self.exists(value, rank):
                raise PlanError(f"program: {what} is never made on rank {rank}")


def verify_segments(segmented: SegmentedProgram) -> SegmentedProgram:
    """Return the segmented program if each of its segments can be an actor, else raise PlanError that names one.

    Checked: every op is in exactly one segment, and nothing else is in any; a segment has its ops' phase (except for a
    forward pass that is joined to its backward pass), placement, stage and rate; every communication has a level; no
    path out of a segment, or of communications that leave together, leads back into it.
    """
    items, segments = segmented.program.items, segmented.segments
    if not len(items) == len(segments) == len(segmented.comm_level):
        raise PlanError(
            f"segments: {len(segments)} segments and {len(segmented.comm_level)} levels for {len(items)} items"
        )
    for item, segment in zip(items, segments, strict=True):
        if (segment is None) != (item.kind is not ItemKind.COMPUTE):
            where = "no segment" if segment is None else "a segment"
            raise PlanError(f"segments: {_name(item)} has {where}; ops have one, joins and communications have none")
        if segment is not None:
            _verify_segment(item, segment)
    after = SegmentGraph(segmented).next
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        raise PlanError(f"segments: these wait for each other: {'; '.join(map(str, error.args[1]))}") from None
    return segmented


def _verify_segment(item: ProgramItem, segment: Segment) -> None:
    phase = Phase.BACKWARD if segment.joined and item.phase == Phase.FORWARD else item.phase
    here = (phase, item.placement, item.pieces, item.stage)
    for what, found, expected in zip(
        ("phase", "placement", "rate", "stage"),
        (segment.phase, segment.placement, segment.pieces, segment.stage),
        here,
        strict=True,
    ):
        if found != expected:
            raise PlanError(f"segments: {_name(item)} has {what} {expected}, its segment {found}")


def _name(item: ProgramItem) -> str:
    ops = next((steps[0].op for steps in item.steps.values() if steps), "")
    comm = next((comm.label for comm in item.comms.values()), "")
    return " ".join(filter(None, (ops or comm or item.kind, item.where, item.line)))
