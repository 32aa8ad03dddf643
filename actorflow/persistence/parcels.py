"""Write one rank's checkpoint files: its pieces of tensors, taken from a snapshot of variables or from copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from actorflow.persistence.container import BlockWriter
from actorflow.persistence.file_plan import FilePlan
from actorflow.persistence.manifest import FileRecord
from actorflow.persistence.piece_assignment import Piece
from actorflow.persistence.storage import NewFile
from actorflow.runtime.snapshot import Snapshot
from actorflow_compiler.core.tensor_bytes import contents

__all__ = ["Parcel", "write_files"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A piece that this rank writes: of a variable in the snapshot, or a copy that was made when the save began."""

    name: str
    piece: Piece
    variable: str = ""
    at: int = 0  # number of the piece among those of the variable
    copy: Tensor | None = None


def write_files(
    plan: FilePlan, parcels: Sequence[Parcel], snapshot: Snapshot | None, create: Callable[[str], NewFile]
) -> list[FileRecord]:
    """Write these parcels to new files; what the snapshot holds of them is let go of.

    Raises OSError, and what the snapshot raises.
    """
    files: dict[tuple[int, int], list[Parcel]] = {}
    for parcel in parcels:
        files.setdefault((parcel.piece.rank, parcel.piece.file), []).append(parcel)
    written = []
    for (rank, file), some in sorted(files.items()):
        name = plan.name(rank, file)
        header, entries = plan.header([(parcel.name, parcel.piece) for parcel in some])
        by_name = {parcel.name: parcel for parcel in some}
        writer = BlockWriter(create(name))
        try:
            writer.write(memoryview(header))
            for entry in entries:
                _write(by_name[entry.name], entry.nbytes, writer, snapshot)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        written.append(FileRecord(name, writer.size, tuple(writer.checksums)))
    return written


def _write(parcel: Parcel, nbytes: int, writer: BlockWriter, snapshot: Snapshot | None) -> None:
    """Write the contents of a parcel; those of the snapshot are let go of then."""
    if parcel.copy is not None:
        writer.write(contents(parcel.copy))
        return
    assert snapshot is not None
    writer.fill(nbytes, functools.partial(snapshot.read, parcel.variable, parcel.at))
    snapshot.let_go(parcel.variable, parcel.at)
