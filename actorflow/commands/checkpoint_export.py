"""Write checkpoints for other programs: a folder of safetensors files as Hugging Face's, or a file of torch.save."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from actorflow.commands.checkpoint_report import chosen_checkpoint
from actorflow.persistence.container import BlockWriter, header_of
from actorflow.persistence.manifest import MANIFEST, Manifest
from actorflow.persistence.state_tree import decode, names_in
from actorflow.persistence.storage import PART, Folder, LocalFolder, NewFile, open_folder
from actorflow.persistence.stored import StoredState, StoredTensorValues
from actorflow.support.output_paths import why_not_writable
from actorflow.support.progress import show_progress
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.tensor_bytes import contents
from actorflow_compiler.core.units import bytes_text

__all__ = ["export_safetensors", "export_torch"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # names of what an export may have written


# -- a folder of safetensors files -----------------------------------------------------------------


def export_safetensors(path: str, step: int | None, out: str, only: str | None, force: bool, most: float) -> str:
    """Write the tensors of one object to a folder, ``most`` bytes to a file; returns what was written, as text.

    Raises StateError, before anything is written but for a damaged file, and OSError.
    """
    found, manifest = chosen_checkpoint(path, step)
    if out.endswith(".safetensors"):
        raise StateError(f"{out!r} was found; the name of a folder was expected, in which a file is called {_WHOLE}")
    name = _with_tensors(manifest, only, found.folder.path)
    state = found.state
    tensors = {_bare(full, name): state.values(full) for full in names_in(manifest.objects[name])}
    shards = _shards({bare: _nbytes(one) for bare, one in tensors.items()}, most)
    count = len(shards)
    names = [_WHOLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    with (
        _new_folder(out, force) as folder,
        show_progress(f"writing {out}", f"wrote {out}") as begin,
    ):
        for file, shard in zip(names, shards, strict=True):
            begin(file)
            _write_shard(folder, file, {bare: tensors[bare] for bare in shard})
        total = sum(map(_nbytes, tensors.values()))
        if count > 1:
            where = {bare: file for file, shard in zip(names, shards, strict=True) for bare in shard}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            folder.put(_INDEX, f"{json.dumps(index, indent=2)}\n".encode())
    files = names[0] if count == 1 else f"{count} files"
    return f"{name} of {found.folder.path} written to {out}: {len(tensors):,} tensors, {bytes_text(total)}, in {files}"


def _with_tensors(manifest: Manifest, only: str | None, where: str) -> str:
    """The name of the object to write.  Raises StateError if it is not clear which, or it has no tensors."""
    there = [name for name, said in manifest.objects.items() if names_in(said)]
    if only is not None:
        _check_name(only, manifest, where)
        if only not in there:
            raise StateError(f"{only} of {where!r} has no tensors; one of {', '.join(there)}, or --format torch, was "
                             f"expected")  # fmt: skip
        return only
    if len(there) == 1:
        return there[0]
    if "model" in there:
        return "model"
    raise StateError(
        f"{where!r} has {', '.join(there)}, each with tensors, and a folder of safetensors files is that of one: name "
        f"it with --only"
        if there
        else f"{where!r} has no tensors, and a folder of safetensors files has nothing else; use --format torch"
    )


def _check_name(name: str, manifest: Manifest, where: str) -> None:
    if name not in manifest.objects:
        near = difflib.get_close_matches(name, list(manifest.objects), n=1)
        raise StateError(
            f"{where!r} has no object {name!r}{f' (the nearest is {near[0]})' if near else ''}; it has "
            f"{', '.join(manifest.objects) or 'none'}"
        )


def _bare(full: str, name: str) -> str:
    """A tensor's name without that of its object."""
    return full.removeprefix(f"{name}.")


def _nbytes(values: StoredTensorValues) -> int:
    return math.prod(values.shape) * values.dtype.itemsize


def _shards(sizes: Mapping[str, int], most: float) -> list[list[str]]:
    """Names that go to a file together, in order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled + nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _write_shard(folder: Folder, name: str, tensors: Mapping[str, StoredTensorValues]) -> None:
    """Write a file, with one tensor in memory at a time."""
    header, entries = header_of([(n, one.dtype, (0,) * len(one.shape), one.shape) for n, one in tensors.items()])
    writer = BlockWriter(folder.create(name))
    try:
        writer.write(memoryview(header))
        for entry in entries:
            writer.write(contents(tensors[entry.name].whole()))
        writer.close()
    except BaseException:
        writer.abandon()
        raise


@contextmanager
def _new_folder(out: str, force: bool) -> Iterator[Folder]:
    """A folder to write to, which becomes ``out`` once all is written; of a remote one, its files do as they are.

    Raises StateError if there is something already.
    """
    folder = open_folder(out)
    there = [*folder.files(), *folder.folders()]
    if MANIFEST in there:
        raise StateError(f"{out!r} is a checkpoint itself; the name of another folder was expected")
    if there and not force:
        raise StateError(f"{out!r} is there already, and not empty; name another folder, or replace its model with "
                         f"--force")  # fmt: skip
    if not isinstance(folder, LocalFolder):
        with _cleared(folder):
            yield folder
        return
    target = _local_target(folder.path)
    if target.exists() and not target.is_dir():
        raise StateError(f"{out!r} is a file; the name of a folder was expected")
    part = LocalFolder(target.with_name(f"{target.name}.{os.getpid()}{PART}"))
    part.make()
    try:
        yield part
        if there:
            _replace(LocalFolder(target), part)
        else:
            os.rename(part.path, target)
    except BaseException:
        shutil.rmtree(part.path, ignore_errors=True)
        raise


@contextmanager
def _cleared(folder: Folder) -> Iterator[None]:
    """Remove an earlier export from a remote folder, and what was written to it where that fails."""
    folder.make()
    _remove_ours(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            _remove_ours(folder)
        raise


def _remove_ours(folder: Folder) -> None:
    for name in sorted(folder.files(), key=lambda name: name != _INDEX):  # the index first
        if _OURS.fullmatch(name):
            folder.remove(name)


def _replace(old: LocalFolder, new: LocalFolder) -> None:
    """Move an export to the folder of an earlier one, in which other files stay."""
    before = {name for name in old.files() if _OURS.fullmatch(name)}
    old.remove(_INDEX)  # first, so that nobody reads files of both
    names = sorted(new.files(), key=lambda name: name == _INDEX)
    for name in names:
        os.replace(Path(new.path, name), Path(old.path, name))
    for name in before.difference(names):
        old.remove(name)
    new.remove_all()


def _local_target(path: str) -> Path:
    """The file or folder to write, with links followed.  Raises StateError if nothing can be written beside it."""
    target = Path(os.path.realpath(path))
    if why := why_not_writable(target.parent, folder=True):
        raise StateError(why)
    return target


# -- a file of torch.save --------------------------------------------------------------------------


def export_torch(path: str, step: int | None, out: str, only: str | None, force: bool) -> str:
    """Write all objects, or one, to a file of torch.save; returns what was written, as text.

    Raises StateError, before anything is written but for a damaged file, and OSError.
    """
    found, manifest = chosen_checkpoint(path, step)
    if only is not None:
        _check_name(only, manifest, found.folder.path)
    with (
        _new_file(out, force) as file,
        show_progress(f"writing {out}", f"wrote {out}") as begin,
    ):
        states = {}
        for name, said in manifest.objects.items():
            if only in (None, name):
                begin(f"reading {name}")
                states[name] = _state(name, said, found.state)
        begin("writing")
        if only is None and manifest.step is not None:
            states.setdefault("step", manifest.step)
        sink = _Sink(file)
        torch.save(states if only is None else states[only], cast(IO[bytes], sink))
    what = only or ", ".join(states) or "nothing"
    return f"{what} of {found.folder.path} written to {out}, {bytes_text(sink.size)}"


def _state(name: str, said: Any, stored: StoredState) -> Any:
    """A state in the form of plain torch's.  Raises StateError if this torch cannot hold it."""
    try:
        state = decode(said, lambda tensor: stored.values(tensor).whole())
    except RuntimeError as error:
        raise StateError(f"{name} cannot be read here: {error}") from error
    return _plain(_numbered(state))


def _numbered(state: Any) -> Any:
    """An optimizer's state with the running numbers of torch in place of parameters' names; others as they are."""
    if not (
        isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)
    ):
        return state
    groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    if not all(isinstance(one, dict) and isinstance(one.get("params"), list) for one in groups):
        return state
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, str) for name in names):
        return state
    numbers = {name: number for number, name in enumerate(names)}
    running = itertools.count()
    return {
        **state,
        "state": {numbers.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [next(running) for _ in group["params"]]} for group in groups],
    }


def _plain(value: Any) -> Any:
    """A value in which nothing is of a type that torch.load(weights_only=True) refuses."""
    if isinstance(value, Mapping):
        items = {_plain(key): _plain(one) for key, one in value.items()}
        if isinstance(value, Counter):
            return Counter(items)
        if isinstance(value, OrderedDict):
            ordered = OrderedDict(items)
            if hasattr(value, "_metadata"):  # of a module's state_dict()
                ordered._metadata = value._metadata  # type: ignore[attr-defined]
            return ordered
        return items
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple | frozenset):
        return tuple(_plain(one) for one in value)
    if isinstance(value, set):
        return {_plain(one) for one in value}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    return value.get_state() if isinstance(value, torch.Generator) else value


class _Sink:
    """What torch.save writes to."""

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self.size = 0

    def write(self, data: bytes) -> int:
        self._file.write(memoryview(data))
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        pass


@contextmanager
def _new_file(out: str, force: bool) -> Iterator[NewFile]:
    """A file to write to, which becomes ``out`` once all is written.

    Raises StateError if there is something already.
    """
    above, _, name = out.rpartition("/")
    local = "://" not in out or out.startswith("file://")
    if local:
        target = _local_target(out.removeprefix("file://"))
        parent: Folder = LocalFolder(target.parent)
        name, part = target.name, f"{target.name}.{os.getpid()}{PART}"
    else:
        parent, part = open_folder(above if "://" in above else f"{above}/"), name
        parent.make()
    if not name or name in parent.folders():
        raise StateError(f"{out!r} is a folder; the name of a file was expected")
    if name in parent.files() and not force:
        raise StateError(f"{out!r} is there already; name another file, or replace it with --force")
    file = parent.create(part)
    try:
        yield file
        file.close()
        if local:
            os.replace(target.parent / part, target)
    except BaseException:
        file.abandon()
        if local:
            parent.remove(part)
        raise
