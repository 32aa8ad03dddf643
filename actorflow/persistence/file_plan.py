"""Which files a checkpoint has, and what lies where in them: equal on all ranks, before anything is written."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actorflow.persistence.container import SUFFIX, Entry, dtype_name, header_of
from actorflow.persistence.manifest import FileRecord, Manifest, StoredPiece, TensorRecord
from actorflow.persistence.piece_assignment import Piece, TensorLayout

__all__ = ["FilePlan"]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The tensors of a checkpoint, the pieces in which they are written, and the names of the files."""

    layouts: tuple[TensorLayout, ...]
    dtypes: Mapping[str, torch.dtype]  # by tensor
    pieces: Sequence[Sequence[Piece]]  # of each of the layouts
    prefix: str = ""  # begins the names of the files, so that they are none of an older checkpoint's in the folder

    def name(self, rank: int, file: int) -> str:
        """The name of one of a rank's files."""
        more = f"-{file + 1}" if file else ""
        return f"{self.prefix}rank-{rank:05d}{more}{SUFFIX}"

    def header(self, pieces: Sequence[tuple[str, Piece]]) -> tuple[bytes, list[Entry]]:
        """The header of the file with these pieces of named tensors, and where each lies in it, in order."""
        return header_of([(name, self.dtypes[name], piece.offsets, piece.shape) for name, piece in pieces])

    def files(self) -> dict[tuple[int, int], list[tuple[str, Piece]]]:
        """(rank, file) → the pieces in it, with the names of their tensors."""
        found: dict[tuple[int, int], list[tuple[str, Piece]]] = {}
        for layout, pieces in zip(self.layouts, self.pieces, strict=True):
            for piece in pieces:
                found.setdefault((piece.rank, piece.file), []).append((layout.name, piece))
        return found

    def written_by(self, rank: int) -> Iterator[tuple[str, Piece]]:
        """The pieces that a rank writes, with the names of their tensors."""
        for layout, pieces in zip(self.layouts, self.pieces, strict=True):
            yield from ((layout.name, piece) for piece in pieces if piece.rank == rank)

    def manifest(
        self, step: int | None, world: int, objects: Mapping[str, Any], random: Sequence[Any],
        files: Sequence[FileRecord],
    ) -> Manifest:  # fmt: skip
        """The manifest of the checkpoint, once these files are written."""
        numbers = {file.name: number for number, file in enumerate(files)}
        begins = {
            (rank, file, entry.name): entry.begin
            for (rank, file), some in self.files().items()
            for entry in self.header(some)[1]
        }

        def stored(name: str, piece: Piece) -> StoredPiece:
            number = numbers[self.name(piece.rank, piece.file)]
            return StoredPiece(number, begins[piece.rank, piece.file, name], piece.offsets, piece.shape)

        tensors = {
            layout.name: TensorRecord(
                dtype_name(self.dtypes[layout.name]), layout.shape, tuple(stored(layout.name, p) for p in pieces)
            )
            for layout, pieces in zip(self.layouts, self.pieces, strict=True)
        }
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Manifest(step, world, objects, tuple(random), tensors, tuple(files), now)
