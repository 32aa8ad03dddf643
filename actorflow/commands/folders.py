"""The name of a folder or a file for output goes in; it can be written to, or the command ends before it begins."""

from __future__ import annotations

import click

from actorflow.support.places_to_write import fault

__all__ = ["writable_file", "writable_folder"]


def writable_folder(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: make the folder where it is missing; raises BadParameter where nothing can be written to it."""
    return _writable(context, parameter, value, folder=True)


def writable_file(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: make the folders above the file; raises BadParameter where it cannot be written."""
    return _writable(context, parameter, value, folder=False)


def _writable(context: click.Context, parameter: click.Parameter, value: str | None, folder: bool) -> str | None:
    why = "" if value is None else fault(value, folder=folder)
    if why:
        raise click.BadParameter(why, context, parameter)
    return value
