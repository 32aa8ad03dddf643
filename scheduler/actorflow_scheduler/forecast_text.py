"""Write a forecast as text: what limits the plan, and what each class of ranks does."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from actorflow_compiler.core.units import bytes_text, columns, ranges_text, seconds_text
from actorflow_scheduler.forecast import Forecast, RankForecast
from actorflow_scheduler.notation import COMPUTING

MEANT = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "for weights",
    "O": "optimizer",
    "L": "fetches the batch",
    "C": "moves between layouts",
    "S": "sends",
    "R": "gives results",
}  # letter in the notation of orders → what its actor does
_DIGITS = re.compile(r"\d")

WAITED_FOR = {
    "compute": "computing",
    "comm": "collectives",
    "send": "sending",
    "source": "fetching batches",
    "sink": "giving results",
}  # queue → what it does


def to_text(found: Forecast, full: bool = False) -> str:
    """The forecast in a few lines; with ``full`` also the queues, the memory and the order of each rank."""
    lines = [*_short(found)]
    if full:
        lines += ["", *_ranks(found), "", *_orders(found)]
    return "\n".join(lines) + "\n"


def _short(found: Forecast) -> Iterator[str]:
    pieces = f"{found.micro_batches} micro-batch{'es' * (found.micro_batches != 1)}"
    yield f"forecast on {found.hardware.name}"
    mean = "" if found.steady else "; no two iterations are alike, so this is a mean"
    yield f"  period    {seconds_text(found.period)} for {pieces}, the first one {seconds_text(found.first)}{mean}"
    yield f"  bubble    {found.bubble:.1%} of the computing time"
    yield f"  limits    {', '.join(_limits(found))}"
    if found.fed:
        yield "  batches   are taken to be there in time: reading them is not counted"
    worst = max(found.ranks, key=lambda r: r.total)
    parts = (
        f"{bytes_text(worst.variables)} of variables, {bytes_text(worst.registers)} of registers, "
        f"{bytes_text(worst.workspace)} while an actor fires"
    ) + (f", {bytes_text(worst.shared)} for collectives" if worst.shared else "")
    yield f"  memory    {bytes_text(worst.total)} at most, on {_names(worst)}: {parts}{_judged(found)}"


def _judged(found: Forecast) -> str:
    memory = found.hardware.memory_bytes
    if memory is None:
        return ""
    over = sum(len(r.ranks) for r in found.ranks if r.total > memory)
    return f"; {'all ranks fit' if not over else f'{over} of {found.world} ranks do not fit'} {bytes_text(memory)}"


def _limits(found: Forecast) -> Iterator[str]:
    """The kinds of queues on the critical path by their shares: ``computing 90% (rank 3: 61%)``."""
    shares: dict[str, list[tuple[float, int]]] = {}
    for rank, queue, share in found.critical:
        shares.setdefault(WAITED_FOR.get(queue.partition(":")[0], queue), []).append((share, rank))
    totals = {what: sum(share for share, _ in of_ranks) for what, of_ranks in shares.items()}
    for what in sorted((w for w in totals if totals[w] >= 0.005), key=lambda w: -totals[w]):
        share, rank = max(shares[what], key=lambda of_rank: of_rank[0])
        yield f"{what} {totals[what]:.0%}" + (f" (rank {rank}: {share:.0%})" if found.world > 1 else "")


def _names(rank: RankForecast) -> str:
    return f"rank{'s' * (len(rank.ranks) > 1)} {ranges_text(rank.ranks)}"


def _ranks(found: Forecast) -> list[str]:
    """A line for each class of ranks: how busy its queues are, and its memory."""
    table = [["rank", "compute", "comm", "sends", "registers", "firing", "variables", "shared", "total"]]
    for r in found.ranks:
        sends = max((share for queue, share in r.busy.items() if queue.startswith("send:")), default=0.0)
        shares = (r.busy.get(COMPUTING, 0.0), r.busy.get("comm", 0.0), sends)
        table.append(
            [
                ranges_text(r.ranks),
                *(f"{s:.1%}" for s in shares),
                *map(bytes_text, (r.registers, r.workspace, r.variables, r.shared, r.total)),
            ]
        )
    return columns(table, "<>>>>>>>>")


def _orders(found: Forecast) -> list[str]:
    """A line for each class of ranks with its compute order, and a legend."""
    lines = [f"{_names(r)}: {' '.join(r.order)}" for r in found.ranks if r.order]
    words = [word for r in found.ranks for word in r.order]
    letters = {_DIGITS.sub("", word) for word in words}
    if not letters:
        return lines
    meant = ", ".join(f"{letter} {MEANT[letter]}" for letter in MEANT if letter in letters)
    legend = f"0F1 is stage 0, forward, micro-batch 1: {meant}"
    if any(len(set(r.order)) < len(r.order) for r in found.ranks):
        legend += (
            "; a word that comes n times stands for n actors of the stage, and micro-batch 0 also for what is done "
            "once, for the whole batch"
        )
    return [*lines, *textwrap.wrap(f"({legend})", 110, subsequent_indent=" ")]
