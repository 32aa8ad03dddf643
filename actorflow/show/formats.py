"""Write a plan to a file in the format that the file's name asks for."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

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

__all__ = ["FORMATS", "check_place", "to_html", "to_text", "write", "write_compared", "write_folded", "write_text"]

GENERATOR, BEGINNING = b'<meta name="generator" content="actorflow">', 1000  # in the first bytes of a page of ours


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
    return write_text(place, to_html(folded, hardware))


def write_compared(plan: Plan, others: Sequence[Plan | None], hardware: Hardware, path: str | Path) -> list[Path]:
    """Write the page of a plan, and those of the plans it was chosen among, to which its chart leads.

    plan.html has a folder plan-compared beside it, with 2.html and so on; where that has files of somebody else, it is
    plan-compared-2, and so on.  Files of other formats are written for the plan alone.  Returns the files, that of the
    plan first.  Raises ShowError as ``check_place`` does.
    """
    place = check_place(path)
    if place.suffix != ".html" or all(other is None for other in others):
        return [write(plan, hardware, place)]
    folder = _folder_of_pages(place)
    names = ["" if other is None else f"{number}.html" for number, other in enumerate(others, 2)]
    among = [f"../{quote(place.name)}", *names]  # as a page in the folder sees them
    made = []
    for name, other in zip(names, others, strict=True):
        if other is not None:
            file, one = check_place(folder / name), replace(other, considered=plan.considered)
            made.append(write_text(file, to_html(one, hardware, among)))
    below = [quote(place.name), *(name and f"{quote(folder.name)}/{name}" for name in names)]
    return [write_text(place, to_html(plan, hardware, below)), *made]


def _folder_of_pages(place: Path) -> Path:
    """The folder beside a page for those of other plans: the first that is not there, or has only pages of ours."""
    numbers = itertools.chain(("",), (f"-{number}" for number in itertools.count(2)))
    folders = (place.with_name(f"{place.stem}-compared{number}") for number in numbers)
    return next(folder for folder in folders if not os.path.lexists(folder) or _has_only_pages(folder))


def _has_only_pages(folder: Path) -> bool:
    """Whether all that is in a folder are pages of ours."""
    try:
        return all(_is_page(file) for file in folder.iterdir())
    except OSError:
        return False


def _is_page(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return GENERATOR in opened.read(BEGINNING)


def write(plan: Plan, hardware: Hardware, path: str | Path) -> Path:
    """Write the plan to a file in the format that its name ends in.

    Raises ShowError as ``check_place`` does, and where the file cannot be written after all; then what was there stays.
    """
    place = check_place(path)
    return write_text(place, FORMATS[place.suffix](plan, hardware))


def write_text(place: Path, text: str) -> Path:
    """The file, with this text in it; raises ShowError where it cannot be written, as on a full disk."""
    try:
        write_whole(place, text.encode())
    except OSError as error:
        why = error.strerror or str(error)
        raise ShowError(f"{str(place)!r} cannot be written: {why}; make room there, or name another one") from None
    return place
