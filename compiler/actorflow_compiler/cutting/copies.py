"""Copy items of a program, so that some readers get copies of their own; used for views and recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.core.ops import Phase, Ref
from actorflow_compiler.core.views import CHEAP_OPS
from actorflow_compiler.cutting.lower import ItemKind, LoweredProgram, ProgramItem


class ItemCopier:
    """Makes copies of items, and the shapes, names and aliases of the values that the copies make."""

    def __init__(self, program: LoweredProgram) -> None:
        self._program = program
        self._metas, self._names, self._sbp = dict(program.metas), dict(program.names), dict(program.sbp)
        self._alias = dict(program.alias)
        self._listed = program.listed
        self._fresh = max(max(self._names, default=0), max((v for v, _ in self._metas), default=0)) + 1

    def of(self, item: ProgramItem, rename: Mapping[int, int]) -> tuple[ProgramItem, dict[int, int]]:
        """A copy that reads renamed values and makes new ones; also returns value of the item → value of the copy."""
        number: dict[int, int] = {}
        for v in item.writes:
            new = number[v] = self._fresh
            self._fresh += 1
            self._names[new], self._sbp[new] = self._names.get(v, ""), self._sbp.get(v, "")
            ranks = self._listed.of(item.placement)
            self._metas.update({(new, r): self._metas[(v, r)] for r in ranks if (v, r) in self._metas})
        return renamed(item, {**rename, **number}), number

    def renamed(self, item: ProgramItem, rename: Mapping[int, int]) -> ProgramItem:
        """The item with other numbers for some of the values that it reads; aliases of them are changed with it."""
        for v in item.writes if rename else ():
            for rank in self._listed.of(item.placement):
                if self._alias.get((v, rank)) in rename:
                    self._alias[(v, rank)] = rename[self._alias[(v, rank)]]
        return renamed(item, rename)

    def program(self, items: Sequence[ProgramItem]) -> LoweredProgram:
        """The program of these items, some of which are copies."""
        return replace(
            self._program,
            items=tuple(items),
            metas=self._metas,
            alias=self._alias,
            names=self._names,
            sbp=self._sbp,
        )


def renamed(item: ProgramItem, rename: Mapping[int, int]) -> ProgramItem:
    """The item with other numbers for some of the values that it reads and writes."""
    if not any(v in rename for v in (*item.reads, *item.writes, *item.after)):
        return item
    steps = {
        rank: tuple(
            replace(s.reading(lambda v: Ref(rename.get(v, v))), outs=tuple(rename.get(o, o) for o in s.outs))
            for s in list_
        )
        for rank, list_ in item.steps.items()
    }
    return replace(
        item,
        reads=tuple(rename.get(v, v) for v in item.reads),
        after=tuple(rename.get(v, v) for v in item.after),
        writes=tuple(rename.get(v, v) for v in item.writes),
        steps=steps,
    )


def repeat_views(program: LoweredProgram, levels: Sequence[int]) -> tuple[LoweredProgram, list[int]]:
    """Copy views into each segment that reads them, so that only the viewed tensor is kept for the segment."""
    maker = {v: k for k, item in enumerate(program.items) for v in item.writes}
    copies = ItemCopier(program)
    out: list[ProgramItem] = []
    new_levels: list[int] = []
    made: dict[tuple[int, object], int] = {}  # (value, segment) → its number there

    def local(v: int, reader: ProgramItem, level: int) -> int:
        """The number of a value within the reader's segment; copies the view that makes it if need be."""
        m = maker.get(v)
        here = _segment(reader, level)
        if m is None:
            return v
        view = program.items[m]
        if (
            not is_view(view)
            or view.placement != reader.placement
            or view.phase == Phase.SOURCE
            or _segment(view, levels[m]) == here
            or (view.pieces and not reader.pieces)
        ):
            return v
        if (v, here) not in made:
            copy, number = copies.of(view, {r: local(r, reader, level) for r in view.reads})
            made[(v, here)] = number[v]
            out.append(replace(copy, phase=reader.phase, pieces=reader.pieces, stage=reader.stage))
            new_levels.append(level)
        return made[(v, here)]

    for item, level in zip(program.items, levels, strict=True):
        if item.after:  # the values that these are views of are there as early
            item = replace(item, after=tuple(_viewed(v, program.items, maker) for v in item.after))
        if item.kind is ItemKind.COMPUTE:
            rename = {v: local(v, item, level) for v in item.reads}
            item = renamed(item, {v: n for v, n in rename.items() if v != n})
        out.append(item)
        new_levels.append(level)
    return _drop_unread(copies.program(out), new_levels)


def _viewed(value: int, items: Sequence[ProgramItem], maker: Mapping[int, int]) -> int:
    """The value that a value is a view of, or itself."""
    while value in maker and is_view(view := items[maker[value]]) and len(view.reads) == 1:
        (value,) = view.reads
    return value


def _segment(item: ProgramItem, level: int) -> tuple[object, ...]:
    return item.phase, item.placement, item.stage, item.pieces, level


def is_view(item: ProgramItem) -> bool:
    """Whether an item makes a view, or something else that costs nothing, on every rank."""
    return (
        item.kind is ItemKind.COMPUTE
        and len(item.writes) == 1
        and all(len(s) == 1 and s[0].op in CHEAP_OPS for s in item.steps.values())
    )


def _drop_unread(program: LoweredProgram, levels: list[int]) -> tuple[LoweredProgram, list[int]]:
    needed = {v for _, v in program.updates} | {v for v, *_ in program.results}
    kept: list[tuple[ProgramItem, int]] = []
    for item, level in zip(reversed(program.items), reversed(levels), strict=True):
        if not any(w in needed for w in item.writes):
            continue
        kept.append((item, level))
        needed.update(item.reads)
        needed.update(
            program.alias[(v, r)]
            for v in (item.reads if program.alias else ())
            for r in program.listed.of(item.placement)
            if (v, r) in program.alias
        )
    kept.reverse()
    return replace(program, items=tuple(i for i, _ in kept)), [level for _, level in kept]
