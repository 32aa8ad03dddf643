"""``actorflow checkpoint``: list, show, verify and export the checkpoints that ``flow.checkpoint.save`` has written."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from actorflow_compiler.core.errors import ActorflowError
from actorflow_compiler.core.units import bytes_of

__all__ = ["checkpoint"]

_SHARD = 5e9  # bytes


@click.group(short_help="List, show, verify or export checkpoints.")
def checkpoint() -> None:
    """Look at the checkpoints that flow.checkpoint.save has written, and hand them on to others.

    PATH is a checkpoint, or a folder of the checkpoints of several steps.  It may be a URL that fsspec knows
    (s3://bucket/runs/a).

    \b
      actorflow checkpoint list runs/a
      actorflow checkpoint show runs/a --tensors 'attn.*weight'
      actorflow checkpoint verify runs/a
      actorflow checkpoint export runs/a exported --format safetensors
      actorflow checkpoint export runs/a all.pt --format torch --step 1000
    """  # noqa: D301 -- click's own mark


@contextmanager
def _errors_told() -> Iterator[None]:
    """Errors that users can cause, and those of files, end the command with their text."""
    try:
        yield
    except BrokenPipeError:  # of the terminal; click ends quietly
        raise
    except (ActorflowError, OSError) as e:
        raise click.ClickException(str(e)) from None


def _pattern(context: click.Context, parameter: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        return re.compile(value)
    except re.error as e:
        raise click.BadParameter(f"{value!r} is no regular expression: {e}.", context, parameter) from e


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    count = bytes_of(value)
    if count is None:
        raise click.BadParameter(
            f"{value!r} was found; a number of bytes or a text such as '5GB' or '512MiB' was expected.",
            context,
            parameter,
        )
    return count


@checkpoint.command("list", short_help="The checkpoints in a folder.")
@click.argument("path", metavar="FOLDER")
def list_command(path: str) -> None:
    """Print the checkpoints in FOLDER, the oldest first, and which of them are whole.

    Whole is one whose manifest is there, and whose files have the sizes that were written; `actorflow checkpoint
    verify` reads them, too.
    """
    with _errors_told():
        from actorflow.commands.checkpoint_report import list_checkpoints

        list_checkpoints(path)


@checkpoint.command(short_help="What a checkpoint holds.")
@click.argument("path")
@click.option("--step", type=click.IntRange(0), help="Of which step.  [default: the newest that is whole]")
@click.option(
    "--tensors",
    metavar="REGEX",
    callback=_pattern,
    help="Print the tensors, too, in whose name this regular expression is found; '' is found in all.",
)
def show(path: str, step: int | None, tensors: re.Pattern[str] | None) -> None:
    """Print what the checkpoint at PATH holds: objects, their tensors, and plain values.

    PATH may also be what flow.checkpoint.load reads of other makers: a file of torch.save, a safetensors file, or a
    folder of them.
    """
    with _errors_told():
        from actorflow.commands.checkpoint_report import show_checkpoint

        show_checkpoint(path, step, tensors)


@checkpoint.command(short_help="Read all files, and compare their checksums.")
@click.argument("path")
@click.option("--step", type=click.IntRange(0), help="Only the checkpoint of this step.  [default: all]")
def verify(path: str, step: int | None) -> None:
    """Read all files of the checkpoints at PATH, and compare them with their checksums.

    Prints a line for each checkpoint.  The exit status is 1 where one is not whole, or damaged.
    """
    with _errors_told():
        from actorflow.commands.checkpoint_report import verify_checkpoints

        fine = verify_checkpoints(path, step)
    sys.exit(0 if fine else 1)


@checkpoint.command(short_help="Write a checkpoint for other programs.")
@click.argument("path")
@click.argument("out")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "torch"]),
    required=True,
    help="safetensors: OUT is a folder as Hugging Face's, of one module's tensors. torch: OUT is a file of torch.save, "
    "of all objects and values.",
)
@click.option(
    "--only",
    metavar="NAME",
    help="The object to write.  [default: with safetensors, the only one with tensors, or model; with torch, all]",
)
@click.option("--step", type=click.IntRange(0), help="Of which step.  [default: the newest that is whole]")
@click.option(
    "--max-shard-size",
    "most",
    metavar="SIZE",
    callback=_bytes,
    help="Bytes of tensors in a safetensors file, such as 500MB or 2GiB; a larger tensor has a file of its own.  "
    "[default: 5GB]",
)
@click.option("--force", is_flag=True, help="Replace what OUT has: the file; of a folder, model*.safetensors.")
def export(path: str, out: str, kind: str, only: str | None, step: int | None, most: float | None, force: bool) -> None:
    """Write the checkpoint at PATH to OUT, for programs that know nothing of actorflow.

    With --format safetensors, OUT is a folder with model.safetensors, or with several files and
    model.safetensors.index.json, in which tensors have the names of the module's state_dict().  No more than one
    tensor is in memory at a time.

    With --format torch, OUT is a file for torch.load(OUT, weights_only=True): a dictionary of the objects' state
    dictionaries, for load_state_dict() of plain torch's, of the values, and of the step; or with --only, that object's
    state dictionary alone.  All of it is in memory as it is written.  States of random generators are left out.
    """
    if kind == "torch" and most is not None:
        raise click.UsageError("--max-shard-size is for --format safetensors; --format torch writes one file.")
    with _errors_told():
        from actorflow.commands import checkpoint_export as exports

        if kind == "torch":
            done = exports.export_torch(path, step, out, only, force)
        else:
            done = exports.export_safetensors(path, step, out, only, force, most or _SHARD)
        click.echo(done)
