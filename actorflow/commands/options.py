"""Make click's options of the declarations in ``rendezvous/options.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from actorflow.commands.folders import writable_folder
from actorflow.rendezvous.options import RUN_OPTIONS, LaunchOption, ValueKind

__all__ = ["click_option", "run_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_TYPES: dict[ValueKind, click.ParamType[Any]] = {
    ValueKind.COUNT: click.IntRange(1),
    ValueKind.RANK: click.IntRange(0),
    ValueKind.PORT: click.IntRange(1, 65535),
    ValueKind.SECONDS: click.FloatRange(0, min_open=True),
    ValueKind.TEXT: click.STRING,
    ValueKind.FILE: click.Path(exists=True, dir_okay=False, readable=True),
    ValueKind.FOLDER: click.Path(),
}


def click_option(option: LaunchOption) -> Callable[[_Command], _Command]:
    """The decorator that adds an option to a command."""
    more: dict[str, Any] = {"help": option.help, "default": option.default, "show_default": option.show_default}
    if option.user_variable:
        more["envvar"] = option.variable
    if option.kind is ValueKind.TOGGLE:
        return click.option(f"{option.flag}/--no-{option.flag[2:]}", **more)
    if option.kind is ValueKind.SWITCH:
        return click.option(option.flag, is_flag=True, **more)
    if option.kind is ValueKind.FOLDER:
        more["callback"] = writable_folder
    kind = click.Choice(option.choices) if option.choices else _TYPES[option.kind]
    return click.option(option.flag, type=kind, metavar=option.metavar, **more)


def run_options(command: _Command) -> _Command:
    """Add all options of ``actorflow run``, in the order of its help."""
    for option in reversed(RUN_OPTIONS):
        command = click_option(option)(command)
    return command
