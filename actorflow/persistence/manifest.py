"""The manifest of a checkpoint: a JSON file, written last, without which its other files are no checkpoint."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actorflow.persistence.storage import ReadableFolder
from actorflow.support.version import __version__
from actorflow_compiler.core.errors import StateError

__all__ = ["FORMAT", "MANIFEST", "FileRecord", "Manifest", "OWN_FILE", "StoredPiece", "TensorRecord", "read_manifest"]

MANIFEST = "manifest.json"
OWN_FILE = re.compile(r"(\d+-)?rank-\d{5,}(-\d+)?\.safetensors|manifest\.json\.part")  # what a save writes beside it
FORMAT = "actorflow checkpoint"
VERSION = 1  # of the format; a reader refuses later ones


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A safetensors file of the checkpoint."""

    name: str
    size: int  # bytes
    checksums: tuple[int, ...]  # CRC-32 of each block (``container.BLOCK``); empty: not known


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Where a rectangle of a tensor lies."""

    file: int  # index into the files
    begin: int  # its first byte in the file
    offsets: tuple[int, ...]  # where it begins in the whole tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor of the checkpoint; its pieces do not overlap, and are all of it."""

    dtype: str  # "float32"
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    step: int | None
    world: int  # ranks that wrote it
    objects: Mapping[str, Any]  # by name: the state as JSON, in which tensors are named (``state_tree.py``)
    random: tuple[Any, ...]  # the state of random generators as JSON: of all ranks, or of each; empty: not kept
    tensors: Mapping[str, TensorRecord]
    files: tuple[FileRecord, ...]
    written: str = ""  # when, in ISO 8601
    versions: Mapping[str, str] | None = None  # of actorflow and torch

    @property
    def nbytes(self) -> int:
        """The bytes of its files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> bytes:
        """The manifest as a file, with a checksum of itself."""
        tensors = {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "pieces": [*map(_piece, tensor.pieces)]}
            for name, tensor in self.tensors.items()
        }
        files = [
            {"name": f.name, "size": f.size, "crc32": "".join(f"{c:08x}" for c in f.checksums)} for f in self.files
        ]
        body = _in_lines("{", "}", {
            "step": json.dumps(self.step),
            "world": json.dumps(self.world),
            "written": json.dumps(self.written),
            "versions": json.dumps(dict(self.versions or {"actorflow": __version__, "torch": torch.__version__})),
            "objects": _in_lines("{", "}", {name: json.dumps(one) for name, one in self.objects.items()}),
            "random": json.dumps(self.random),
            "tensors": _in_lines("{", "}", {name: json.dumps(one) for name, one in tensors.items()}),
            "files": _in_lines("[", "]", [*map(json.dumps, files)]),
        })  # fmt: skip
        return (
            f'{{\n"format": {json.dumps(FORMAT)},\n"version": {VERSION},\n"crc32": "{zlib.crc32(body.encode()):08x}",\n'
            f'"checkpoint": {body}\n}}\n'
        ).encode()


def _piece(piece: StoredPiece) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return piece.file, piece.begin, piece.offsets, piece.shape


def _in_lines(begin: str, end: str, items: Mapping[str, str] | list[str]) -> str:
    """JSON of items that are JSON already, each in a line; what indents by itself is ten times as slow."""
    said = [f"{json.dumps(name)}: {one}" for name, one in items.items()] if isinstance(items, Mapping) else items
    return "\n".join([begin, ",\n".join(said), end])


def read_manifest(folder: ReadableFolder) -> Manifest:
    """The manifest in a folder.  Raises FileNotFoundError if there is none, OSError, StateError if it is damaged."""
    text = folder.get(MANIFEST).decode(errors="replace")
    where = f"{folder.path}/{MANIFEST}"
    try:
        said = json.loads(text)
        if said["format"] != FORMAT:
            raise ValueError(f"its format is {said['format']!r}")
        if said["version"] > VERSION:
            raise StateError(
                f"{where} is of version {said['version']} of the format; up to {VERSION} were expected: load it with "
                f"the version of actorflow that wrote it ({said['checkpoint']['versions']}), or a later one"
            )
        body = text.partition('"checkpoint": ')[2].removesuffix("\n}\n")
        if f"{zlib.crc32(body.encode()):08x}" != said["crc32"]:
            raise ValueError("its checksum does not fit its contents")
        return _manifest(said["checkpoint"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{where} is damaged: {error}; the file as flow.checkpoint wrote it was expected") from error


def _manifest(said: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=said["step"],
        world=said["world"],
        objects=said["objects"],
        random=tuple(said["random"]),
        tensors={
            name: TensorRecord(
                one["dtype"],
                tuple(one["shape"]),
                tuple(
                    StoredPiece(f, begin, tuple(offsets), tuple(shape)) for f, begin, offsets, shape in one["pieces"]
                ),
            )
            for name, one in said["tensors"].items()
        },
        files=tuple(FileRecord(f["name"], f["size"], _checksums(f["crc32"])) for f in said["files"]),
        written=said["written"],
        versions=said["versions"],
    )


def _checksums(text: str) -> tuple[int, ...]:
    return tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))
