"""Group ranks that are alike, so that a page shows very many: the classes, what they exchange, and any single rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from actorflow.show.styles import ranks_text
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.runs import stretches
from actorflow_compiler.core.units import bytes_text, ranges_text
from actorflow_compiler.plan.folded import FoldedPlan, Partners
from actorflow_compiler.plan.plan import Actor, Send
from actorflow_scheduler.cost import moved_bytes
from actorflow_scheduler.forecast import RankForecast

__all__ = ["FoldedRanks"]

ASK = (
    '<form class="tools" id="ask"><label>Rank <input id="rank" type="number" min="0" max="{last}" required></label>'
    "<button>show</button><span>its class, and the ranks that it communicates with</span></form>"
)


@dataclass(frozen=True, slots=True)
class FoldedRanks:
    """A plan that lists one rank of each class, with the forecast of each class."""

    plan: FoldedPlan
    ranks: Sequence[RankForecast]
    hardware: Hardware

    def table(self) -> str:
        """The classes, as HTML."""
        return _class_table(self.plan, self.ranks)

    def links(self) -> str:
        """What passes between classes, as HTML."""
        return _link_matrix(self.plan, self.hardware)

    def data(self) -> dict[str, Any]:
        """What the page needs to tell of any rank, as data for JSON."""
        return _rank_data(self.plan, self.ranks, self.hardware)


def _class_table(folded: FoldedPlan, ranks: Sequence[RankForecast]) -> str:
    """The classes as an HTML table, under a field that asks for a rank."""
    rows = "".join(
        f'<tr><td class="n"><a href="#" data-rank="{one.ranks[0]}">{number}</a></td>'
        f'<td class="n">{len(one.ranks):,}</td>'
        f"<td>{escape(ranges_text(one.ranks))}</td>"
        f'<td class="n">{one.busy.get("compute", 0.0):.0%}</td><td class="n">{bytes_text(one.registers)}</td>'
        f'<td class="n">{bytes_text(one.variables)}</td><td class="n">{bytes_text(one.total)}</td></tr>'
        for number, one in enumerate(ranks)
    )
    names = ("class", "ranks", "", "computing", "registers", "variables", "peak memory")
    head = "".join(f"<th{' class=n' if name else ''}>{name}</th>" for name in names)
    ask = ASK.format(last=folded.plan.world - 1)
    return f'{ask}<table class="rows"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _link_matrix(folded: FoldedPlan, hardware: Hardware) -> str:
    """What all ranks of a class send to those of another one in an iteration, as an HTML table."""
    moved = _between_classes(folded, hardware)
    most = max((sum(cell) for cell in moved.values()), default=0.0) or 1.0
    listed = sorted(folded.rank_classes)
    head = "".join(f'<th class="n">{number}</th>' for number in range(len(listed)))
    rows = []
    for number, one in enumerate(listed):
        cells = "".join(_cell(moved.get((one, other), (0.0, 0.0)), most, hardware) for other in listed)
        rows.append(f"<tr><th title='{escape(ranks_text(folded.rank_classes[one]))}'>class {number}</th>{cells}</tr>")
    table = (
        f'<table class="links"><thead><tr><th>from, to</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    return f'<div class="wide">{table}</div>'


def _rank_data(folded: FoldedPlan, ranks: Sequence[RankForecast], hardware: Hardware) -> dict[str, Any]:
    """What the page needs to say of any rank what it does and with whom it communicates; a few numbers for a class."""
    return {
        "world": folded.plan.world,
        "node": hardware.node_size,
        "classes": [
            {
                "text": ranges_text(one.ranks),
                "ranks": list(stretches(one.ranks)),
                "facts": [
                    ["computes", f"{one.busy.get('compute', 0.0):.0%} of the time"],
                    ["peak memory", bytes_text(one.total)],
                    ["registers", bytes_text(one.registers)],
                    ["variables", bytes_text(one.variables)],
                ],
                "actors": [a.id for a in folded.plan.actors if a.rank == one.ranks[0]],
                "moves": _moves(folded, one.ranks[0]),
            }
            for one in ranks
        ],
        "partners": [{"label": one.label.replace("_", "-"), "groups": _blocks(one)} for one in folded.partners],
    }


def _between_classes(folded: FoldedPlan, hardware: Hardware) -> dict[tuple[int, int], tuple[float, float]]:
    """(Listed rank, listed rank) → bytes from the one's class to the other's: inside nodes, between nodes.

    What a rank sends in a collective goes in equal parts to the others of its group.
    """
    plan = folded.plan
    first = {rank: listed for listed, ranks in folded.rank_classes.items() for rank in ranks}
    members: dict[int, Counter[int]] = {}  # id of a group → how many of its ranks are of each class
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for actor in plan.actors:
        if actor.comm is None:
            continue
        nbytes = _bytes_of(folded, actor) * len(folded.rank_classes[actor.rank])
        if isinstance(actor.comm, Send):
            others = Counter([first[actor.comm.to_rank]])
        else:
            if id(actor.comm.ranks) not in members:
                members[id(actor.comm.ranks)] = Counter(first[rank] for rank in actor.comm.ranks)
            others = members[id(actor.comm.ranks)] - Counter([actor.rank])
        outside = not hardware.node_size or len({rank // hardware.node_size for rank in actor.comm.ranks}) > 1
        for other, count in others.items():
            before = found.get((actor.rank, other), (0.0, 0.0))
            part = nbytes * count / others.total()
            found[actor.rank, other] = (before[0], before[1] + part) if outside else (before[0] + part, before[1])
    return found


def _bytes_of(folded: FoldedPlan, actor: Actor) -> float:
    """The bytes that a rank sends by a communication in an iteration, or receives if those are more."""
    return actor.rate * moved_bytes(folded.plan, actor)


def _cell(moved: tuple[float, float], most: float, hardware: Hardware) -> str:
    inside, outside = moved
    total = inside + outside
    if not total:
        return "<td></td>"
    told = f"{bytes_text(inside)} inside nodes, {bytes_text(outside)} between nodes" if hardware.node_size else ""
    return f'<td class="n" style="--share:{total / most:.3f}" title="{told}">{bytes_text(total)}</td>'


def _moves(folded: FoldedPlan, rank: int) -> dict[str, str]:
    """What a listed rank moves with which partners: "index of the partners" and "to", "from" or "" → bytes as text."""
    found: Counter[str] = Counter()
    for actor in folded.plan.actors:
        comm = actor.comm
        if comm is None or rank not in (comm.ranks if isinstance(comm, Send) else (actor.rank,)):
            continue
        way = "" if not isinstance(comm, Send) else "to" if comm.from_rank == rank else "from"
        index = next(
            (k for k, one in enumerate(folded.partners) if one.label == comm.label and comm.ranks in one.groups), None
        )
        if index is not None:
            found[f"{index}{way}"] += round(_bytes_of(folded, actor))
    return {key: bytes_text(nbytes) for key, nbytes in found.items()}


def _blocks(partners: Partners) -> list[list[Any]]:
    """Groups, those that are alike together: [stretches of the first group's ranks, distance to the next, how many].

    A stretch is [first, step, how many].
    """
    alike: dict[tuple[tuple[int, int, int], ...], list[int]] = {}  # stretches from 0 on → first ranks
    for group in sorted(partners.groups):
        parts = tuple((first - group[0], step, count) for first, step, count in stretches(group))
        alike.setdefault(parts, []).append(group[0])
    return [
        [[[begin + first, step, count] for first, step, count in parts], apart, times]
        for parts, firsts in alike.items()
        for begin, apart, times in stretches(firsts)
    ]
