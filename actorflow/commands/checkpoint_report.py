"""Find checkpoints for the command line; list them, show what they hold, and verify their files."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actorflow.persistence.container import SUFFIX, dtype_name, dtype_of_name
from actorflow.persistence.folders import FoundCheckpoint, checkpoints_in, open_checkpoint
from actorflow.persistence.foreign import DCP_METADATA, open_foreign
from actorflow.persistence.manifest import MANIFEST, Manifest, read_manifest
from actorflow.persistence.state_tree import decode, names_in
from actorflow.persistence.storage import Folder, open_folder
from actorflow.persistence.stored import StoredFile
from actorflow.support.progress import show_progress
from actorflow.support.truncate import truncated
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.units import bytes_text, columns

__all__ = ["chosen_checkpoint", "list_checkpoints", "show_checkpoint", "verify_checkpoints"]

_SAID = 5  # names in a message
_VALUE = 70  # characters of a value
_WIDE = 10_000  # characters of a line where nobody looks at it


# -- which checkpoints there are -------------------------------------------------------------------


def chosen_checkpoint(path: str, step: int | None) -> tuple[FoundCheckpoint, Manifest]:
    """The checkpoint of a step, with its manifest; without ``step`` the one at the path, or the newest whole one in it.

    Raises StateError if there is none, or it is not whole, and OSError.
    """
    found = _checkpoints_at(path, step)
    if step is not None or found[0].folder.path == open_folder(path).path:
        if found[0].manifest is None:
            raise StateError(found[0].problem)
        return found[0], found[0].manifest
    for one in reversed(found):
        if one.manifest is not None:
            return one, one.manifest
        click.echo(f"actorflow: {one.problem}; it is ignored", err=True)
    raise StateError(f"{path!r} holds no whole checkpoint; expected: one whose save ended, with all of its files")


def _checkpoints_at(path: str, step: int | None) -> list[FoundCheckpoint]:
    """The checkpoint at a path, and those in it, the oldest first, whole or not; with ``step`` that of the step.

    Raises StateError if there is none, and OSError.
    """
    root = open_folder(path)
    found = checkpoints_in(root)[::-1]
    with suppress(FileNotFoundError, NotADirectoryError):
        found.insert(0, open_checkpoint(root))
    if not found:
        raise StateError(
            f"{path!r} holds no checkpoint of flow.checkpoint.save: {_what_is_there(path, root)}; expected: a folder "
            f"that it has written to"
        )
    if step is None:
        return found
    of_step = [one for one in found if one.step == step]
    if not of_step:
        steps = ", ".join(str(one.step) for one in found if one.step is not None)
        raise StateError(f"{path!r} has no checkpoint of step {step}; it has those of steps: {steps or 'none'}")
    return of_step


def _what_is_there(path: str, root: Folder) -> str:
    foreign = "the checkpoint of another maker, which flow.checkpoint.load and `actorflow checkpoint show` read"
    if "://" not in path and Path(path).is_file():
        return f"it is a file, and may be {foreign}"
    there = sorted([*root.folders(), *root.files()])
    if not there:
        return "there is no such folder, or nothing in it"
    said = f"there are {', '.join(there[:_SAID])}{', …' if len(there) > _SAID else ''}"
    return f"{said}: {foreign}" if any(name.endswith((SUFFIX, DCP_METADATA)) for name in there) else said


def _manifest_of(found: FoundCheckpoint) -> Manifest | None:
    """The manifest, also of a checkpoint whose other files are not whole; None if it cannot be read."""
    if found.manifest is not None:
        return found.manifest
    with suppress(StateError, OSError):
        return read_manifest(found.folder)
    return None


# -- list ------------------------------------------------------------------------------------------


def list_checkpoints(path: str) -> None:
    """Print a table of the checkpoints.  Raises StateError if there are none, and OSError."""
    table = _table("step>", "written", "ranks>", "size>", "whole")
    for found in _checkpoints_at(path, None):
        manifest = _manifest_of(found)
        problem = found.problem
        for folder in (found.folder.path, open_folder(path).path):
            problem = problem.replace(f"{folder}/", "")
        table.add_row(
            "–" if found.step is None else str(found.step),
            "" if manifest is None else _time(manifest),
            "" if manifest is None else str(manifest.world),
            bytes_text(sum(found.folder.files().values())),
            "yes" if found.manifest is not None else f"no: {problem}",
        )
    _console().print(table)


# -- show ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """A tensor, as people see it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    files: tuple[str, ...] = ()  # that hold its pieces; empty: not known

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


def show_checkpoint(path: str, step: int | None, pattern: re.Pattern[str] | None) -> None:
    """Print what a checkpoint holds, with the tensors in whose names the pattern is found.

    Raises StateError if there is none, if it cannot be read, or no tensor has such a name; and OSError.
    """
    foreign = None
    if step is None and MANIFEST not in open_folder(path).files():
        foreign = open_foreign(path, trusted=False)
    if foreign is not None:
        head = [("checkpoint", f"{path}, of another maker")]
        objects = {str(name): [*_lines_in(str(name), one)] for name, one in foreign.state.items()}
        values = {str(name): _shortened(repr(one)) for name, one in foreign.state.items() if not objects[str(name)]}
        if not any(isinstance(one, Mapping) for one in foreign.state.values()):  # the state of one module
            objects = {"(all)": [line for lines in objects.values() for line in lines]}
    else:
        found, manifest = chosen_checkpoint(path, step)
        head = _head(found, manifest)
        names = {name: names_in(one) for name, one in manifest.objects.items()}
        objects = {name: [_line(one, manifest) for one in some] for name, some in names.items()}
        values = {name: _value(manifest.objects[name]) for name, lines in objects.items() if not lines}
    every = [line for lines in objects.values() for line in lines]
    wanted = [line for line in every if pattern is not None and pattern.search(line.name)]
    if pattern is not None and not wanted:
        names_there = ", ".join(line.name for line in every[:3])
        raise StateError(
            f"{pattern.pattern!r} is found in no name of the {len(every)} tensors of {path!r}"
            f"{f', such as {names_there}' if every else ''}"
        )
    click.echo("\n".join(columns(head, "<<")))
    _show_tables({name: lines for name, lines in objects.items() if lines}, values, wanted)


def _head(found: FoundCheckpoint, manifest: Manifest) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in (manifest.versions or {}).items())
    of_ranks = len(manifest.random)
    random = f"one for each of {of_ranks} ranks" if of_ranks > 1 else "one for all ranks" if of_ranks else "none"
    return [
        ("checkpoint", found.folder.path),
        ("step", "none" if manifest.step is None else str(manifest.step)),
        ("written", f"{_time(manifest)}, by {_count(manifest.world, 'rank')}"),
        ("versions", versions),
        ("files", f"{len(manifest.files)}, {bytes_text(manifest.nbytes)}"),
        ("random states", random),
    ]


def _line(name: str, manifest: Manifest) -> _Line:
    record = manifest.tensors[name]
    files = dict.fromkeys(manifest.files[piece.file].name for piece in record.pieces)
    return _Line(name, dtype_of_name(record.dtype), record.shape, tuple(files))


def _lines_in(name: str, value: Any) -> Iterator[_Line]:
    """The tensors in a state of another maker."""
    if isinstance(value, Tensor):
        yield _Line(name, value.dtype, tuple(value.shape))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _lines_in(f"{name}.{key}", one)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _lines_in(f"{name}.{number}", one)


def _value(said: Any) -> str:
    """A value without tensors, as short text."""
    try:
        return _shortened(repr(decode(said, lambda name: torch.empty(0))))
    except (StateError, RuntimeError):  # of a later version, or of a device that is not here
        return _shortened(str(said))


def _shortened(text: str) -> str:
    return truncated(" ".join(text.split()), _VALUE, len)


def _show_tables(objects: Mapping[str, Sequence[_Line]], values: Mapping[str, str], wanted: Sequence[_Line]) -> None:
    console = _console()
    if objects:
        table = _table("object", "tensors>", "elements>", "size>")
        for name, lines in objects.items():
            elements, nbytes = sum(line.elements for line in lines), sum(line.nbytes for line in lines)
            table.add_row(name, f"{len(lines):,}", f"{elements:,}", bytes_text(nbytes))
        console.print()
        console.print(table)
    if values:
        table = _table("value", "")
        for name, text in values.items():
            table.add_row(name, text)
        console.print()
        console.print(table)
    if wanted:
        table = _table("tensor", "dtype", "shape", "size>", *(["files"] if any(line.files for line in wanted) else []))
        for line in wanted:
            cells = [line.name, dtype_name(line.dtype), str(list(line.shape)), bytes_text(line.nbytes)]
            table.add_row(*cells, *([", ".join(line.files)] if line.files else []))
        console.print()
        console.print(table)


# -- verify ----------------------------------------------------------------------------------------


def verify_checkpoints(path: str, step: int | None) -> bool:
    """Read all files, and print a line for each checkpoint; whether all are whole.

    Raises StateError if there is no checkpoint (of this step), and OSError.
    """
    fine = True
    for found in _checkpoints_at(path, step):
        problems = _problems(found)
        where = found.folder.path
        if problems:
            fine = False
            click.echo(f"{where}: NOT WHOLE: {'; '.join(problems)}")
        else:
            assert found.manifest is not None
            files = found.manifest.files
            click.echo(f"{where}: whole, {_count(len(files), 'file')}, {bytes_text(found.manifest.nbytes)}")
    return fine


def _problems(found: FoundCheckpoint) -> list[str]:
    """What is wrong with the files of a checkpoint."""
    manifest = _manifest_of(found)
    if manifest is None:
        return [found.problem]
    problems = []
    where = found.folder.path
    with show_progress(f"reading {where}", f"read {where}") as begin:
        for record in manifest.files:
            begin(record.name)
            try:
                StoredFile(found.folder, record).verify()
            except StateError as error:
                problems.append(str(error))
    return problems or ([found.problem] if found.problem else [])


# -- text ------------------------------------------------------------------------------------------


def _console() -> Console:
    """A console whose lines are as long as they need to be where they go to a file or another program."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDE)


def _table(*headings: str) -> Table:
    """A table; a heading that ends in ">" is that of a column of numbers."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        numbers = heading.endswith(">")
        table.add_column(heading.removesuffix(">"), justify="right" if numbers else "left", no_wrap=numbers,
                         overflow="fold")  # fmt: skip
    return table


def _time(manifest: Manifest) -> str:
    return manifest.written.replace("T", " ").replace("+00:00", " UTC") or "unknown"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
