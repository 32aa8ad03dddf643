"""The name of a folder for output goes in; it is there and can be written to, or the command ends before it begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click


def writable_folder(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: make the folder where it is missing; raises BadParameter where nothing can be written to it."""
    if value is not None:
        try:
            Path(value).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=value):
                pass
        except OSError as e:
            raise click.BadParameter(
                f"nothing can be written to the folder {value!r}: {e.strerror}; name another one.", context, parameter
            ) from None
    return value
