"""Checkpoints of other makers: files of ``torch.save``, safetensors files, and folders of torch's distributed ones."""

from __future__ import annotations

import json
import os
import threading
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils import _pytree as pytree

from actorflow import deferred
from actorflow.deferred import DeferredTensor
from actorflow.deferred.tape import Indices
from actorflow.persistence.container import SUFFIX, dtype_name, read_header
from actorflow.persistence.folders import step_of
from actorflow.persistence.manifest import MANIFEST, OWN_FILE, FileRecord, StoredPiece, TensorRecord
from actorflow.persistence.storage import Folder, LocalFolder, open_folder, path_of
from actorflow.persistence.stored import SMALL, StoredFile, StoredState
from actorflow_compiler.core.errors import StateError

__all__ = ["ForeignCheckpoint", "open_foreign", "safetensors_state"]

INDEX = SUFFIX + ".index.json"  # ends the name of the file that says which tensor is in which file
DCP_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A state dictionary: of one module, or of several objects by name."""

    path: str
    state: Mapping[str, Any]

    def states(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """The state of each object: by the object's name where the file has all of them, else all of it for the one.

        Raises StateError if it is not clear what belongs to which object.
        """
        if all(isinstance(self.state.get(name), Mapping) for name in objects):
            return {name: _owned(self.state[name], objects[name]) for name in objects}
        if len(objects) != 1:
            raise StateError(
                f"{self.path!r} is the state of one object, or has other names ({', '.join(list(self.state)[:5])}, …); "
                f"{', '.join(objects)} were asked for: load one of them alone"
            )
        return {name: _owned(self.state, value) for name, value in objects.items()}


def _owned(state: Any, value: Any) -> Any:
    """The state for an object; what it does not copy itself, as modules do, is no part of a file in memory."""
    if isinstance(value, nn.Module):
        return state
    return pytree.tree_map_only(Tensor, lambda t: t if isinstance(t, DeferredTensor) else t.clone(), state)


def open_foreign(path: str | os.PathLike[str], trusted: bool) -> ForeignCheckpoint | None:
    """A checkpoint of another maker, or None if there is none.  Raises StateError if it cannot be read."""
    text = path_of(path)
    local = Path(text) if "://" not in text else None
    if text.endswith(SUFFIX):
        parent, _, name = text.rpartition("/")
        return _of_safetensors(text, open_folder(parent or "."), [name])
    if local is not None and local.is_file():
        return ForeignCheckpoint(text, _of_torch(local))
    folder = open_folder(text)
    try:
        there = folder.files()
    except OSError as error:
        raise StateError(f"the folder {text!r} cannot be read: {error}") from error
    if MANIFEST in there or any(step_of(name) is not None for name in folder.folders()):
        return None
    if DCP_METADATA in there:
        return ForeignCheckpoint(text, _of_dcp(folder, trusted))
    index = next((name for name in sorted(there) if name.endswith(INDEX)), None)
    if index is not None:
        try:
            names = sorted(set(json.loads(folder.get(index))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise StateError(f"{text}/{index} cannot be read: {type(error).__name__}: {error}") from error
        return _of_safetensors(text, folder, names)
    names = sorted(name for name in there if name.endswith(SUFFIX))
    if any(OWN_FILE.fullmatch(name) for name in names):
        raise StateError(
            f"{text!r} is no whole checkpoint: it has no {MANIFEST}, because its save did not end; another step's was "
            f"expected"
        )
    return _of_safetensors(text, folder, names) if names else None


def safetensors_state(folder: Folder, names: Sequence[str]) -> StoredState:
    """The tensors of some safetensors files.  Raises StateError if one is missing or damaged."""
    tensors: dict[str, TensorRecord] = {}
    files, digest = [], 0
    for number, name in enumerate(names):
        what = f"{folder.path}/{name}"
        try:
            reader = folder.open(name)
            entries = read_header(reader, what)
        except OSError as error:
            raise StateError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
        files.append(StoredFile(folder, FileRecord(name, reader.size, ())))
        for entry in entries:
            piece = StoredPiece(number, entry.begin, entry.offsets, entry.shape)
            known = tensors.get(entry.name)
            ends = [offset + size for offset, size in zip(entry.offsets, entry.shape, strict=True)]
            if known is None:
                tensors[entry.name] = TensorRecord(dtype_name(entry.dtype), tuple(ends), (piece,))
            elif any(other.offsets == entry.offsets for other in known.pieces):
                raise StateError(
                    f"{entry.name} is in {names[known.pieces[0].file]} and in {name} of {folder.path!r}; one of "
                    f"each name was expected: name the file to load"
                )
            else:
                shape = tuple(map(max, known.shape, ends))
                tensors[entry.name] = TensorRecord(known.dtype, shape, (*known.pieces, piece))
        digest = zlib.crc32(repr([(name, reader.size, entries)]).encode(), digest)
    return StoredState(tensors, files, f"safetensors {digest:08x}")


def _of_safetensors(path: str, folder: Folder, names: Sequence[str]) -> ForeignCheckpoint:
    state = safetensors_state(folder, names)
    return ForeignCheckpoint(path, {name: state.tensor(name) for name in state.records})


def _of_torch(path: Path) -> Mapping[str, Any]:
    """A file of ``torch.save``, mapped into memory; nothing in it is executed."""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many kinds
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)  # of a format that cannot be mapped
        except Exception:
            raise StateError(f"{str(path)!r} cannot be read as a file of torch.save: {_what_is_wrong(path)}") from error
    if not isinstance(found, Mapping):
        raise StateError(f"{str(path)!r} holds a {type(found).__name__}; a state dictionary was expected")
    return found


def _what_is_wrong(path: Path) -> str:
    """Why torch reads no state from a file: it has other objects, or it is none of torch's, or not whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(4)
    if zipfile.is_zipfile(path) or begin[:1] == b"\x80":  # a pickle
        return (
            "it is damaged, or holds objects that are neither tensors nor plain values, which to read can execute "
            "code; a state dictionary was expected: torch.save(model.state_dict(), path)"
        )
    if begin == b"PK\x03\x04":
        return f"it is not whole: it ends after {size} bytes, before its table of contents; a whole one was expected"
    return f"it has {size} bytes, and begins with {begin!r}, as no such file does; another file was expected"


class _DcpReader(DefaultLoadPlanner):
    """Reads regions of tensors of a torch.distributed.checkpoint folder, of which the metadata is read once.

    A tensor lies there in chunks, each in a form that torch reads as a whole: of one chunk after the other, those in
    which the region lies are read.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._reader = FileSystemReader(folder)
        self.metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, True)
        self._lock = threading.Lock()  # of the next
        self._out = torch.empty(0)

    def region(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A new tensor with the elements of a rectangle of a tensor.  Raises StateError."""
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
        with self._lock:
            self._out = out = torch.empty([*shape], dtype=stored.properties.dtype)
            items = create_read_items_for_chunk_list(name, stored, [wanted])
            found = sum(item.lengths.numel() for item in items)
            try:
                if found != out.numel():
                    raise ValueError(f"its chunks have {found} of {out.numel()} elements")
                self._reader.read_data(LoadPlan(items), self).wait()
            except Exception as error:  # torch raises many kinds
                raise StateError(
                    f"{name} in {str(self._reader.path)!r} cannot be read: {type(error).__name__}: {error}; a folder "
                    f"as torch.distributed.checkpoint has written it was expected"
                ) from error
        return out

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See ``DefaultLoadPlanner``: where what is read goes to."""
        return self._out


class _DcpTensorValues:
    """A tensor of a torch.distributed.checkpoint folder (see ``deferred.tape.StoredValues``)."""

    def __init__(self, reader: _DcpReader, folder: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._reader, self._folder, self._name = reader, folder, name
        self.shape, self.dtype = shape, dtype

    @property
    def digest(self) -> str:
        """See ``deferred.tape.StoredValues``."""
        return f"{self._name} of {self._folder}"

    def read(self, indices: Indices) -> Tensor:
        """See ``deferred.tape.StoredValues``: what lies between the first index and the last of each dim is read."""
        if not all(map(len, indices)):
            return torch.empty([*map(len, indices)], dtype=self.dtype)
        lines = [np.asarray(one) for one in indices]
        begins, ends = [int(one.min()) for one in lines], [int(one.max()) + 1 for one in lines]
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        found = self._reader.region(self._name, begins, sizes)
        for dim, (one, begin, size) in enumerate(zip(lines, begins, sizes, strict=True)):
            if len(one) != size or (one[:-1] > one[1:]).any():
                found = found.index_select(dim, torch.from_numpy(one - begin))
        return found


def _of_dcp(folder: Folder, trusted: bool) -> Mapping[str, Any]:
    """The state in a folder that torch.distributed.checkpoint has written; its metadata is a pickle."""
    if not trusted:
        raise StateError(
            f"{folder.path!r} was written by torch.distributed.checkpoint, whose {DCP_METADATA} file is a pickle: to "
            f"read it can execute code; load with trusted=True if you trust who wrote it"
        )
    if not isinstance(folder, LocalFolder):
        raise StateError(f"{folder.path!r} was written by torch.distributed.checkpoint; a local folder was expected")
    try:
        reader = _DcpReader(folder.path)
    except Exception as error:
        raise StateError(f"{folder.path}/{DCP_METADATA} cannot be read: {type(error).__name__}: {error}") from error
    flat: dict[str, Any] = {}
    others: dict[str, Any] = {}
    metadata = reader.metadata
    for name, one in metadata.state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            values = _DcpTensorValues(reader, folder.path, name, tuple(one.size), one.properties.dtype)
            flat[name] = (
                values.read([*map(np.arange, values.shape)]) if one.size.numel() <= SMALL else deferred.stored(values)
            )
        else:
            others[name] = None
    if others:
        state_dict_loader.load(others, checkpoint_id=folder.path, no_dist=True)
        flat.update(others)
    nested: Mapping[str, Any] = _nested(flat, metadata.planner_data)
    return nested


def _nested(flat: Mapping[str, Any], paths: Any) -> Mapping[str, Any]:
    """The dictionaries and lists that were flattened when the folder was written."""
    if not isinstance(paths, Mapping):
        return flat
    made: dict[Any, Any] = {}
    for name, value in flat.items():
        path = paths.get(name, (name,))
        at = made
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    found: Mapping[str, Any] = _lists(made)
    return found


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _numbered(item) if key == "state" else _lists(item) for key, item in value.items()}
    if items and set(items) == set(range(len(items))):
        return [items[number] for number in range(len(items))]
    return items


def _numbered(state: Any) -> Any:
    """What an optimizer keeps, by the numbers of its parameters, which are texts in the names of tensors."""
    if not isinstance(state, dict):
        return state
    return {int(key) if isinstance(key, str) and key.isdigit() else key: _lists(item) for key, item in state.items()}
