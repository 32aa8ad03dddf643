"""What the commands share: click's options, made from ``rendezvous/options.py``, and the script with its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from actorflow.rendezvous.options import DEVICE_TYPE, RUN_OPTIONS, LaunchOption, NodeCount, ValueKind
from actorflow.support.module_files import module_file
from actorflow.support.output_paths import why_not_writable

__all__ = [
    "ARGUMENTS",
    "DEVICE_KIND",
    "MODULE",
    "SCRIPT",
    "ScriptCommand",
    "click_option",
    "run_options",
    "writable_file",
    "writable_folder",
]


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


class _SecondsRange(click.FloatRange):
    """A number of seconds above a bound, and up to another one; "nan", which is in every range, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails with click's error where it is none."""
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return found


_Command = TypeVar("_Command", bound=Callable[..., Any])


if TYPE_CHECKING:  # it is generic since click 8.2
    _NodeCountBase = click.ParamType[NodeCount]
else:
    _NodeCountBase = click.ParamType


class _NodeCountType(_NodeCountBase):
    """``4`` or ``2:4``."""

    name = "nodes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NodeCount:
        """The count; BadParameter for a text that is none."""
        try:
            return value if isinstance(value, NodeCount) else NodeCount.from_text(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


_TYPES: dict[ValueKind, click.ParamType[Any]] = {
    ValueKind.COUNT: click.IntRange(1),
    ValueKind.NODES: _NodeCountType(),
    ValueKind.NUMBER: click.IntRange(0),
    ValueKind.PORT: click.IntRange(1, 65535),
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
    kind: click.ParamType[Any]
    if option.kind is ValueKind.SECONDS:
        kind = _SecondsRange(option.above, option.most, min_open=True)
    else:
        kind = click.Choice(option.choices) if option.choices else _TYPES[option.kind]
    flags = filter(None, (option.flag, option.also, option.name))
    return click.option(*flags, type=kind, metavar=option.metavar, **more)


def run_options(command: _Command) -> _Command:
    """Add all options of ``actorflow run``, in the order of its help."""
    for option in reversed(RUN_OPTIONS):
        command = click_option(option)(command)
    return command


_FILE = click.Path(exists=True, dir_okay=False, readable=True)


def _file(typed: str, parameter: click.Parameter, ctx: click.Context) -> str:
    try:
        return str(_FILE.convert(typed, parameter, ctx))
    except click.BadParameter as error:
        try:
            module_file(typed)
        except ValueError:
            raise error from None
        hint = f"There is a module of this name: {ctx.command_path.partition(' SCRIPT')[0]} -m {typed}."
        raise click.BadParameter(f"{error.message} {hint}", ctx, parameter) from None


class ScriptCommand(click.Command):
    """A command that runs a script: a file, or with ``-m`` a module, of which it gets both file and name ("": none).

    The script's arguments come after ``--``, which it says when one is taken for its own option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does.  Raises UsageError with the hint for an option that is not this command's."""
        try:
            rest = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:
                self._find_script(ctx)
            return rest
        except click.NoSuchOption as e:
            if "--" in args:
                raise
            hint = f"An argument of the script goes after --: actorflow {ctx.info_name} SCRIPT -- {e.option_name} …"
            raise click.UsageError(f"{e.format_message()} {hint}", ctx) from e

    def _find_script(self, ctx: click.Context) -> None:
        """Put the file of the script, and the name of its module, in place of what was typed."""
        typed, parameter = ctx.params["script"], next(one for one in self.params if one.name == "script")
        try:
            if ctx.params["module"]:
                ctx.params.update(script=module_file(typed), module=typed)
            else:
                ctx.params.update(script=_file(typed, parameter, ctx), module="")
        except ValueError as error:
            raise click.BadParameter(f"{error}.", ctx, parameter) from None


SCRIPT = click.argument("script", type=click.Path())  # which ``ScriptCommand`` looks for
MODULE = click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, which is run as by python -m.")
DEVICE_KIND = click_option(DEVICE_TYPE)
ARGUMENTS = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS…]")
