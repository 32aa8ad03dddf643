"""The help texts of the commands go in; the examples in them come out as blocks of code in the reference."""

from __future__ import annotations

import itertools
from typing import Any

import click
from sphinx.application import Sphinx

LINE = "| "  # sphinx-click's mark of a line that stands by itself: click's \b


def is_example(line: str) -> bool:
    """Whether a line of a help text shows a command."""
    return line.startswith(LINE) and line[len(LINE) :].lstrip().startswith("actorflow ")


def as_code(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Put the examples among the lines of a description into literal blocks, in place."""
    found: list[str] = []
    for example, block in itertools.groupby(lines, is_example):
        if example:
            found += ["", ".. code-block:: text", "", *(f"    {line[len(LINE) :].lstrip()}" for line in block), ""]
        else:
            found += block
    lines[:] = found


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's hook."""
    app.connect("sphinx-click-process-description", as_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
