"""Click callbacks that check, before a command begins, that a folder or file for output can be written."""

from __future__ import annotations

import click

from actorflow.support.output_paths import why_not_writable

__all__ = ["writable_file", "writable_folder"]


def writable_folder(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: make the folder where it is missing; raises BadParameter where nothing can be written to it."""
    return _writable(context, parameter, value, folder=True)


def writable_file(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: make the folders above the file; raises BadParameter where it cannot be written."""
    return _writable(context, parameter, value, folder=False)


def _writable(context: click.Context, parameter: click.Parameter, value: str | None, folder: bool) -> str | None:
    why = "" if value is None else why_not_writable(value, folder=folder)
    if why:
        raise click.BadParameter(why, context, parameter)
    return value
