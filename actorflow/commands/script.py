"""What the commands that take a script share: the script, its arguments after ``--``, and the kind of devices."""

from __future__ import annotations

import click

from actorflow.commands.options import click_option
from actorflow.rendezvous.options import DEVICE_TYPE


class ScriptCommand(click.Command):
    """A command with a script's arguments after ``--``, which says so when one is taken for its own option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What click's own does.  Raises UsageError with the hint for an option that is not this command's."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            if "--" in args:
                raise
            hint = f"An argument of the script goes after --: actorflow {ctx.info_name} SCRIPT -- {e.option_name} …"
            raise click.UsageError(f"{e.format_message()} {hint}", ctx) from e


SCRIPT = click.argument("script", type=click.Path(exists=True, dir_okay=False, readable=True))
DEVICE_KIND = click_option(DEVICE_TYPE)
ARGUMENTS = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS…]")
