"""The table of a plan's communications, by the bytes that they move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from actorflow.show.styles import ranks_text, short
from actorflow_compiler.core.units import bytes_text
from actorflow_compiler.plan.plan import SEND, Actor, Plan
from actorflow_compiler.plan.summary import sent_bytes


@dataclass(frozen=True, slots=True)
class CommunicationRow:
    """A row of the table: one logical communication, or equal ones of several groups of ranks."""

    kind: str
    name: str
    groups: tuple[tuple[int, ...], ...]  # of ranks
    actor: int  # one of its actors
    nbytes: int  # that all ranks together send in an iteration
    firings: int  # in an iteration
    what: tuple[str, ...]  # the tensors that it moves
    sbp: str  # what they are boxed from and to, where it is known
    plane: str


def communication_rows(plan: Plan, sent: Mapping[int, float]) -> list[CommunicationRow]:
    """The communications, the most bytes first; those with one name are one row, whatever their ranks.

    ``sent`` gives for actors the bytes that they send in an iteration, with those that they stand for.
    """
    found: dict[object, list[Actor]] = {}
    for a in plan.actors:
        if a.comm is not None:
            found.setdefault((a.comm.label, a.stage, short(a.name), a.rate), []).append(a)
    rows = []
    for members in found.values():
        a = members[0]
        assert a.comm is not None
        written = plan.outputs_of[a.id]
        tensors = [t for r in written for t in r.tensors]
        before = [t.sbp for r in plan.inputs_of[a.id] for t in r.tensors]
        after = [t.sbp for t in tensors]
        boxed = f"{_some(before)} → {_some(after)}" if before or after else ""
        rows.append(
            CommunicationRow(
                a.comm.label,
                short(a.name),
                tuple(dict.fromkeys(m.comm.ranks for m in members if m.comm is not None)),
                a.id,
                round(sum(sent.get(m.id, 0) for m in members)),
                a.rate,
                tuple(dict.fromkeys(t.name for t in tensors if t.name)),
                boxed,
                a.comm.plane,
            )
        )
    return sorted(rows, key=lambda m: -m.nbytes)


def communication_table(plan: Plan, shown: set[int], sent: Mapping[int, float] | None = None) -> str:
    """The table as HTML; the names of ``shown`` actors are links that open their details.

    ``sent`` as in ``communication_rows``; None: each actor stands for itself.
    """
    found = communication_rows(plan, sent_bytes(plan) if sent is None else sent)
    if not found:
        return "<p>Nothing passes between ranks.</p>"
    total = sum(m.nbytes for m in found) or 1
    rows = []
    for m in found:
        name = escape(m.name)
        if m.actor in shown:
            name = f'<a href="#" data-actor="{m.actor}">{name}</a>'
        among = "; ".join(
            f"{g[0]} → {g[1]}" if m.kind == SEND else ranks_text(g).split(" ", 1)[1] for g in m.groups[:4]
        ) + (f"; … ({len(m.groups)})" if len(m.groups) > 4 else "")
        what = ", ".join(m.what[:3]) + (f", … ({len(m.what)})" if len(m.what) > 3 else "")
        share = m.nbytes / total
        rows.append(
            f"<tr><td>{name}</td><td>{escape(m.kind.replace('_', '-'))}</td><td>{escape(m.sbp)}</td>"
            f"<td>{escape(among)}</td><td class='n'>{m.firings}</td><td class='n'>{bytes_text(m.nbytes)}</td>"
            f"<td class='bar'><i style='width:{100 * share:.1f}%'></i></td><td class='wide'>{escape(what)}</td></tr>"
        )
    head = "".join(
        f"<th{' class=n' if c in ('firings', 'bytes') else ''}>{c}</th>"
        for c in ("actor", "communication", "boxing", "ranks", "firings", "bytes", "share", "tensors")
    )
    return f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _some(entries: list[str]) -> str:
    """The most frequent entry; ``?`` if there are none."""
    return max(sorted(set(entries)), key=entries.count) if entries else "?"
