"""Draw the logical graph of a plan, folded by module, as SVG.

A row is a module on a placement, in the order of the forward pass; its columns are the module's variables, forward,
backward and optimizer.  Lines to the next row are straight, lines that skip rows go around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from actorflow.show import svg
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.units import bytes_text
from actorflow_compiler.plan.origins import Flow, ModulePart, Origins, PartPhase

STEP = "(step)"  # the name for ops outside of modules
ROWS = 5  # the least rows of the level that is shown first, if there are as many
COLUMNS = {
    PartPhase.VARIABLE: 0, PartPhase.INPUT: 1, PartPhase.FORWARD: 1, PartPhase.BACKWARD: 2, PartPhase.OPTIMIZER: 3,
}  # fmt: skip
NAMES = ("variables", "forward", "backward", "optimizer")
XS = (140.0, 660.0, 1180.0, 1760.0)  # where the columns begin
WIDTH, HEIGHT = 190.0, 42.0  # of a box; the height is a minimum
GAP = 62.0  # between rows
ENTRY = 17.0  # between the ends of lines at one box
TRACK = 11.0  # between parallel lines beside the rows
TOP = 46.0


@dataclass(slots=True)
class ModuleBox:
    """A box of the drawing: the parts of a module in one phase."""

    id: str
    row: int
    column: int
    name: str
    parts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FoldedGraph:
    """The logical graph folded to modules of some depth."""

    level: int  # the depth
    rows: tuple[tuple[str, str], ...]  # (module, placement)
    boxes: tuple[ModuleBox, ...]
    flows: Mapping[tuple[int, int], tuple[Flow, ...]]  # (box, box) → the tensors that pass


def fold_levels(origins: Origins) -> list[FoldedGraph]:
    """The graph folded to different depths, the coarsest first; depths that add no rows are left out."""
    found: list[FoldedGraph] = []
    deepest = max((len(_steps(p.module)) for p in origins.parts), default=1)
    for level in range(1, deepest + 1):
        one = _fold(origins, level)
        if not found or len(one.rows) > len(found[-1].rows):
            found.append(one)
    return found


def first_shown(found: Sequence[FoldedGraph]) -> FoldedGraph:
    """The coarsest level with at least ROWS rows, else the finest."""
    return next((f for f in found if len(f.rows) >= ROWS), found[-1])


def module_graph(origins: Origins, fold: FoldedGraph) -> str:
    """The SVG of the graph at one level."""
    return _Drawing(origins, fold).draw()


def _steps(module: str) -> list[str]:
    """The parts of a module's name; a number belongs to the name before it: blocks.0.qkv → blocks.0, qkv."""
    steps: list[str] = []
    for word in module.split("."):
        if word.isdigit() and steps:
            steps[-1] += f".{word}"
        else:
            steps.append(word)
    return steps


def _fold(origins: Origins, level: int) -> FoldedGraph:
    parts = origins.parts
    name = [".".join(_steps(p.module)[:level]) or STEP for p in parts]
    rows: dict[tuple[str, str], int] = {}
    phases = (PartPhase.INPUT,), (PartPhase.FORWARD,), (PartPhase.BACKWARD,), (PartPhase.VARIABLE, PartPhase.OPTIMIZER)
    for some in phases:
        for i, p in enumerate(parts):
            if p.phase in some and (name[i], p.placement) not in rows:
                rows[name[i], p.placement] = len(rows)
    boxes: dict[tuple[int, int], int] = {}
    made: list[ModuleBox] = []
    of: list[int] = []
    for i, p in enumerate(parts):
        key = rows[name[i], p.placement], COLUMNS[p.phase]
        if key not in boxes:
            boxes[key] = len(made)
            made.append(ModuleBox(f"{level}.{len(made)}", *key, name[i]))
        made[boxes[key]].parts.append(i)
        of.append(boxes[key])
    flows: dict[tuple[int, int], list[Flow]] = {}
    for f in origins.flows:
        a, b = of[f.source], of[f.target]
        if a != b:
            flows.setdefault((a, b), []).append(f)
    return FoldedGraph(level, tuple(rows), tuple(made), {pair: tuple(fs) for pair, fs in flows.items()})


class _Course(Enum):
    """How a line runs from box to box."""

    STRAIGHT = auto()  # to the next row
    ACROSS = auto()  # to a column on the right
    HOME = auto()  # to the column of the variables
    LEFT = auto()  # around the rows between
    RIGHT = auto()


class _Drawing:
    def __init__(self, origins: Origins, fold: FoldedGraph) -> None:
        self.origins, self.fold = origins, fold
        self.drawn = {pair: flows for pair, flows in fold.flows.items() if self.is_drawn(*pair, flows)}
        self.entries: dict[tuple[int, _Course], list[int]] = {}  # (box, side) → the boxes that its lines come from
        rows: dict[tuple[int, _Course], list[int]] = {}  # (box, course) → the rows that its lines go to
        for a, b in self.drawn:
            course = self.course(a, b)
            if course is not _Course.STRAIGHT:
                side = _Course.RIGHT if course is _Course.RIGHT else _Course.LEFT
                self.entries.setdefault((b, side), []).append(a)
                rows.setdefault((a, course), []).append(fold.boxes[b].row)
        self.tracks = self.assign_tracks(rows)
        tall = [HEIGHT] * len(fold.rows)
        for (box, side), sources in self.entries.items():
            row = fold.boxes[box].row
            tall[row] = max(tall[row], ENTRY * (len(sources) + (side is _Course.RIGHT)) + 8)
        self.tall = tall
        self.tops: list[float] = []
        y = TOP
        for height in tall:
            self.tops.append(y)
            y += height + GAP
        self.bottom = y

    def is_drawn(self, a: int, b: int, flows: Sequence[Flow]) -> bool:
        """Whether a line is drawn: those from variables are only to the forward pass, or where they are boxed."""
        one, other = self.fold.boxes[a], self.fold.boxes[b]
        return one.column != 0 or other.column == 1 or any(f.boxing for f in flows)

    def course(self, a: int, b: int) -> _Course:
        """How a line runs."""
        one, other = self.fold.boxes[a], self.fold.boxes[b]
        if one.column == other.column:
            around = _Course.RIGHT if one.column > 1 else _Course.LEFT
            return _Course.STRAIGHT if abs(one.row - other.row) == 1 else around
        back = _Course.HOME if other.column == 0 else _Course.LEFT
        return _Course.ACROSS if one.column < other.column else back

    def assign_tracks(self, rows_of: Mapping[tuple[int, _Course], Sequence[int]]) -> dict[tuple[int, _Course], int]:
        """(Box, course) → the track of all its lines with this course; no two share a track beside the same rows.

        ``rows_of`` gives the rows that these lines go to.
        """
        taken: dict[tuple[int, _Course], list[list[tuple[int, int]]]] = {}
        found = {}
        for (box, course), rows in rows_of.items():
            one = self.fold.boxes[box]
            first, last = min(one.row, *rows), max(one.row, *rows)
            tracks = taken.setdefault((one.column, course), [])
            free = (i for i, track in enumerate(tracks) if all(last < a or b < first for a, b in track))
            at = next(free, len(tracks))
            if at == len(tracks):
                tracks.append([])
            tracks[at].append((first, last))
            found[box, course] = at
        return found

    def draw(self) -> str:
        fold = self.fold
        lines = [line for pair, flows in self.drawn.items() for line in self.line(*pair, flows)]
        width = XS[-1] + WIDTH + (420 if any(self.course(*pair) is _Course.HOME for pair in self.drawn) else 30)
        bands = "".join(self.bands(width))
        heads = "".join(svg.text(x, 26.0, word, class_="column") for x, word in zip(XS, NAMES, strict=True))
        boxes = "".join(self.box(b) for b in fold.boxes)
        lines.sort(key=lambda line: line.startswith("<g"))  # words are drawn over lines
        inside = bands + heads + "".join(lines) + boxes
        return svg.drawing(inside, width, self.bottom, class_="graph modules", data_level=fold.level)

    def bands(self, width: float) -> Iterable[str]:
        """A background behind the rows of each placement, with its name."""
        rows, first = self.fold.rows, 0
        for i, (_, place) in enumerate(rows):
            if i + 1 < len(rows) and rows[i + 1][1] == place:
                continue
            top, bottom = self.tops[first], self.tops[i] + self.tall[i] + GAP
            if place:
                yield svg.rect(4.0, top + 2, width - 8, bottom - top - 4, rx=10, class_="stage")
                yield svg.text(16.0, top + 26, svg.cut(place, 116, 8), class_="rank")
            first = i + 1

    def box(self, box: ModuleBox) -> str:
        x, y = self.at(box)
        height = self.tall[box.row]
        parts = [self.origins.parts[p] for p in box.parts]
        count = sum(p.count for p in parts)
        inside = svg.rect(x, y, WIDTH, height, rx=7, class_="box")
        if box.column and parts[0].phase != PartPhase.INPUT:
            inside += svg.rect(x, y + 7, 4.0, height - 14, rx=2, class_=f"bar {parts[0].phase}")
        inside += svg.text(x + 14, y + height / 2 - 3, svg.cut(box.name, WIDTH - 26, 7.6), class_="name")
        inside += svg.text(x + 14, y + height / 2 + 13, self.what(box, parts, count), class_="small")
        return svg.group(inside, box.name, class_="part", data_part=box.id, tabindex=0)

    def what(self, box: ModuleBox, parts: Sequence[ModulePart], count: int) -> str:
        if box.column == 0:
            return f"{count} variable{'s' * (count != 1)}"
        if parts[0].phase == PartPhase.INPUT:
            return svg.cut(", ".join(op for p in parts for op in p.ops), WIDTH - 26, 6.2)
        return f"{count} op{'s' * (count != 1)}"

    def at(self, box: ModuleBox) -> tuple[float, float]:
        return XS[box.column], self.tops[box.row] + 22

    # ---- lines

    def line(self, a: int, b: int, flows: Sequence[Flow]) -> Iterable[str]:
        """The line from one box to another, with its arrow, its label and the boxing on it."""
        one, other = self.fold.boxes[a], self.fold.boxes[b]
        (x0, y0), (x1, y1) = self.at(one), self.at(other)
        tall = self.tall[one.row]
        marks = {"data_from": one.id, "data_to": other.id}
        down = other.row > one.row
        course = self.course(a, b)
        if course is _Course.STRAIGHT:
            usual = down == (one.column == 1)  # forward goes down, backward up
            x = x0 + WIDTH / 2 + (-30 if usual else 30)
            begin, end = (y0 + tall, y1) if down else (y0, y1 + self.tall[other.row])
            yield svg.path(f"M{x:.1f} {begin:.1f}V{end:.1f}", class_="edge", **marks)
            yield _tip(x, end, "down" if down else "up", **marks)
            yield self.label(flows, x + 8, (begin + end) / 2 + (-9 if usual else 13), "start", **marks)
            return
        track = self.tracks[a, course]
        if course is _Course.HOME:
            y = y0 + tall / 2
            yield svg.path(f"M{x0 + WIDTH:.1f} {y:.1f}h26", class_="edge", **marks)
            yield _tip(x0 + WIDTH + 26, y, "right", **marks)
            yield self.label(flows, x0 + WIDTH + 32, y, "start", **marks)
            return
        right = course is _Course.RIGHT
        begin = x0 if course is _Course.LEFT else x0 + WIDTH
        end = x1 + WIDTH if right else x1
        turn = {
            _Course.ACROSS: begin + 18 + 7 * track,
            _Course.LEFT: end - 218 - TRACK * track,
            _Course.RIGHT: end + 218 + TRACK * track,
        }[course]
        out = y0 + tall / 2 + (0 if course is _Course.ACROSS else 8)
        entry = y1 + self.entry(a, b, _Course.RIGHT if right else _Course.LEFT)
        yield svg.path(_bent(begin, out, turn, end, entry), class_="edge", **marks)
        yield _tip(end, entry, "left" if right else "right", **marks)
        yield self.label(flows, end + (14 if right else -12), entry, "start" if right else "end", **marks)

    def entry(self, a: int, b: int, side: _Course) -> float:
        """The distance from a box's top to the end of the line from another box."""
        sources = self.entries[b, side]
        height = self.tall[self.fold.boxes[b].row]
        place = sources.index(a) - (len(sources) - 1) / 2
        if side is _Course.RIGHT:  # the middle is for lines that leave
            place = (1 + sources.index(a) // 2) * (1 if sources.index(a) % 2 == 0 else -1)
        return height / 2 + ENTRY * place

    def label(self, flows: Sequence[Flow], x: float, y: float, anchor: str, **marks: object) -> str:
        """The label of a line: the tensors that pass, and their boxing."""
        boxed = [f for f in flows if f.boxing]
        largest = max(flows, key=_bytes)
        words = f"{Meta(largest.shape, largest.dtype)} {largest.read} {bytes_text(_bytes(largest))}"
        if len(flows) > 1:
            words = f"{len(flows)} × {bytes_text(sum(map(_bytes, flows)))} {largest.read}"
        tooltip = "\n".join(flow_text(f) for f in flows[:30])
        if boxed and len(flows) == 1:
            words = f"{Meta(largest.shape, largest.dtype)} {bytes_text(_bytes(largest))}"
        wide = 6.6 * len(words) + 8
        left = x if anchor == "start" else x - wide
        inside, pill = "", ""
        if boxed:
            kinds = dict.fromkeys(kind for f in boxed for kind in f.boxing)
            most = max(boxed, key=lambda f: f.moved)
            moved = sum(f.moved for f in boxed)
            title = "+".join(k.replace("_", "-") for k in kinds)
            change = f" {most.sbp} → {most.read}" if most.sbp != most.read else ""
            again = moved == 0 and any(k != "slice" for k in kinds)  # boxing for another reader has moved it already
            text = f"{title}{change} · {'moved once' if again else bytes_text(moved)}"
            long = 6.3 * len(text) + 16
            at = left if anchor == "start" else x - wide - long - 4
            left = left + long + 4 if anchor == "start" else left
            kind = "local" if not moved else "send" if set(kinds) == {"send"} else ""
            pill = svg.rect(at, y - 9, long, 18.0, rx=9)
            pill += svg.text(at + long / 2, y + 4, text, text_anchor="middle")
            pill = svg.group(pill, tooltip, class_=f"boxing {kind}".strip(), **marks)
        inside = svg.rect(left, y - 8, wide, 16.0, class_="under") + svg.text(left + 4, y + 4, words, class_="value")
        return svg.group(inside, tooltip, class_="flow", **marks) + pill


def flow_text(f: Flow) -> str:
    """A tensor that passes, as text: ``add float32[8,128,128] 512.0 KiB, P → B by all-reduce, 1.0 MiB moved``."""
    text = f"{f.name} {Meta(f.shape, f.dtype)} {bytes_text(_bytes(f))}, {f.read}"
    if f.boxing:
        by = " and ".join(k.replace("_", "-") for k in f.boxing)
        text = f"{text.rpartition(', ')[0]}, {f.sbp} → {f.read} by {by}, {bytes_text(f.moved)} moved in an iteration"
    return text


def _bytes(f: Flow) -> int:
    return Meta(f.shape, f.dtype).nbytes


def _bent(x0: float, y0: float, turn: float, x1: float, y1: float) -> str:
    """A line that is horizontal up to ``turn``, vertical there, and horizontal to its end."""
    if abs(y1 - y0) < 1:
        return f"M{x0:.1f} {y0:.1f}H{x1:.1f}"
    r = min(6.0, abs(y1 - y0) / 2)
    down, out, into = (r if y1 > y0 else -r), (r if turn > x0 else -r), (r if x1 > turn else -r)
    return (
        f"M{x0:.1f} {y0:.1f}H{turn - out:.1f}Q{turn:.1f} {y0:.1f} {turn:.1f} {y0 + down:.1f}V{y1 - down:.1f}"
        f"Q{turn:.1f} {y1:.1f} {turn + into:.1f} {y1:.1f}H{x1:.1f}"
    )


def _tip(x: float, y: float, to: str, **marks: object) -> str:
    """The point of an arrow."""
    dx, dy = {"down": (0, 1), "up": (0, -1), "right": (1, 0), "left": (-1, 0)}[to]
    back = (x - 7 * dx, y - 7 * dy)
    d = f"M{x:.1f} {y:.1f}L{back[0] - 4 * dy:.1f} {back[1] - 4 * dx:.1f}L{back[0] + 4 * dy:.1f} {back[1] + 4 * dx:.1f}Z"
    return svg.path(d, class_="tip", **marks)
