"""Write a plan to a file in the format that the file's name asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from actorflow.show.dot import to_dot
from actorflow.show.page import page
from actorflow.show.poster import poster
from actorflow.show.symmetry import FoldedRanks
from actorflow.show.timeline import forecast_timeline
from actorflow.support.output_paths import why_not_writable
from actorflow.support.whole_files import write_whole
from actorflow_compiler.core.errors import ShowError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.units import bytes_text, seconds_text
from actorflow_compiler.plan import text as plan_text
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler import forecast_text
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.notation import to_csv

__all__ = ["FORMATS", "check_place", "to_html", "to_text", "write", "write_compared", "write_folded"]


def to_html(made: Plan | FoldedPlan, hardware: Hardware, pages: Sequence[str] = ()) -> str:
    """The page of a plan with its forecast; ``pages`` are the addresses of those of ``plan.considered``.

    That of a folded plan shows classes of ranks, what passes between them, and any rank that is asked for.
    """
    found = forecast(made, hardware)
    tiles = [
        (seconds_text(found.period), "a step, as forecast"),
        (f"{found.bubble:.0%}", "bubble"),
        (bytes_text(max(r.total for r in found.ranks)), "peak memory of a rank"),
    ]
    timeline, memory = forecast_timeline(made, hardware), hardware.memory_bytes
    if isinstance(made, FoldedPlan):
        folded = FoldedRanks(made, found.ranks, hardware)
        return page(made.plan, timeline, tiles=tiles, memory=memory, pages=pages, folded=folded)
    return page(made, timeline, tiles=tiles, memory=memory, pages=pages)


def to_text(plan: Plan, hardware: Hardware) -> str:
    """The plan for people, and below it a short forecast."""
    return f"{plan_text.to_text(plan)}\n{forecast_text.to_text(forecast(plan, hardware))}"


FORMATS: Mapping[str, Callable[[Plan, Hardware], str]] = {
    ".html": to_html,
    ".svg": lambda plan, hardware: poster(plan, forecast_timeline(plan, hardware)),
    ".dot": lambda plan, _: to_dot(plan),
    ".json": lambda plan, _: plan_text.to_json(plan),
    ".txt": to_text,
    ".csv": lambda plan, _: to_csv(plan),
}


def check_place(path: str | Path) -> Path:
    """Check that a plan can be written to a file: its ending is known and the place is writable; makes its folders.

    Raises ShowError.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ShowError(
            f"{str(path)!r} was found as the file of a plan; expected: a name that ends in one of {', '.join(FORMATS)}"
        )
    why = why_not_writable(path)
    if why:
        raise ShowError(why)
    return path


def write_folded(folded: FoldedPlan, hardware: Hardware, path: str | Path) -> Path:
    """Write the page of a folded plan; raises ShowError as ``check_place`` does."""
    place = check_place(path)
    return _written(place, to_html(folded, hardware))


def write_compared(plan: Plan, others: Sequence[Plan | None], hardware: Hardware, path: str | Path) -> list[Path]:
    """Write the page of a plan, and beside it those of the plans it was chosen among, to which its chart leads.

    plan.html has plan-2.html and so on beside it.  Files of other formats are written for the plan alone.  Returns the
    files.  Raises ShowError as ``check_place`` does.
    """
    place = check_place(path)
    if place.suffix != ".html" or not others:
        return [write(plan, hardware, place)]
    names = [place.name]
    for number, other in enumerate(others, 2):
        names.append("" if other is None else f"{place.stem}-{number}{place.suffix}")
    made = []
    for name, one in zip(names, (plan, *others), strict=True):
        if one is not None:
            file = check_place(place.with_name(name))
            one = replace(one, considered=plan.considered)
            made.append(_written(file, to_html(one, hardware, names)))
    return made


def write(plan: Plan, hardware: Hardware, path: str | Path) -> Path:
    """Write the plan to a file in the format that its name ends in.

    Raises ShowError as ``check_place`` does, and where the file cannot be written after all; then what was there stays.
    """
    place = check_place(path)
    return _written(place, FORMATS[place.suffix](plan, hardware))


def _written(place: Path, text: str) -> Path:
    """The file, with this text in it; raises ShowError where it cannot be written, as on a full disk."""
    try:
        write_whole(place, text.encode())
    except OSError as error:
        why = error.strerror or str(error)
        raise ShowError(f"{str(place)!r} cannot be written: {why}; make room there, or name another one") from None
    return place
