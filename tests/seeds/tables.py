"""Write the tables of ``docs/oneflow.md`` from ``names.toml``.

python tests/seeds/tables.py
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGE", "ROWS", "NameRow", "page_of"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "oneflow.md"
_HEAD = "| name | here | what differs, and why |\n|---|---|---|\n"
_REGION = re.compile(r"(<!-- names: (\w+) -->\n).*?(<!-- end of names -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NameRow:
    """A line of a table."""

    section: str  # the region of the page
    names: str  # as OneFlow's documents write them
    here: str  # where it is; empty where the table's heading says it
    differs: str  # what differs, and why; empty where nothing does
    snippet: str  # the function that uses the names

    def __str__(self) -> str:
        return re.sub(r" +", " ", f"| {self.names} | {self.here} | {self.differs} |\n")


def _read() -> list[NameRow]:
    table = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
    return [NameRow(section, **row) for section, rows in table.items() for row in rows]


ROWS = _read()


def page_of(text: str) -> str:
    """The page with its tables made anew."""
    return _REGION.sub(lambda m: m[1] + _HEAD + "".join(str(r) for r in ROWS if r.section == m[2]) + m[3], text)


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text("utf-8")), "utf-8")
