"""Find a checkpoint whose files are in the memory of the nodes' launchers (see ``neighbour_copies``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.far_files import FarFile, HeldFile, HeldRange, serve_held_files
from actorflow.persistence.folders import FoundCheckpoint
from actorflow.persistence.manifest import MANIFEST, Manifest, read_manifest
from actorflow.persistence.neighbour_copies import KeptCopies
from actorflow.persistence.storage import RangeReader, ReadableFolder
from actorflow.support.held_files import held_files
from actorflow_compiler.core.errors import ClusterError, StateError

__all__ = ["MemoryFolder", "find_in_memory"]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A checkpoint of which some node has every file."""

    step: int
    manifest: bytes
    owners: dict[str, int]  # file → a rank on whose node it is


def find_in_memory(run: Alone | Cluster, kept: KeptCopies) -> FoundCheckpoint | None:
    """The newest checkpoint that is whole in the memory of the nodes, as the master finds it; None if there is none.

    Collective.
    """
    serve_held_files(run, kept.holder)
    mine: dict[str, int] = {}
    if run.settings.leads:
        with suppress(OSError):
            mine = held_files(kept.holder, f"{kept.key}/")
    said = run.gather("flow.checkpoint.Keeper: in memory", json.dumps(mine).encode())
    replies = None
    if said is not None:
        found = _newest(run, kept, [json.loads(one) for one in said])
        text = "" if found is None else json.dumps([found.step, found.manifest.decode(), found.owners])
        replies = [text.encode()] * run.world
    answer = run.scatter("flow.checkpoint.Keeper: in memory", replies)
    if not answer:
        return None
    step, manifest, owners = json.loads(answer)
    folder = MemoryFolder(run, kept, step, manifest.encode(), owners)
    return FoundCheckpoint(folder, step, read_manifest(folder), "")


def _newest(run: Alone | Cluster, kept: KeptCopies, held: list[dict[str, int]]) -> _Whole | None:
    """``held``: for each rank, the files on its node, name → bytes, where it speaks for that."""
    steps = {int(name.split("/")[1]) for files in held for name in files}
    for step in sorted(steps, reverse=True):
        prefix = kept.prefix(step)
        for data in _manifests(run, prefix, held):
            folder = MemoryFolder(run, kept, step, data, {})
            with suppress(StateError):
                owners = _owners(read_manifest(folder), prefix, held)
                if owners is not None:
                    return _Whole(step, data, owners)
    return None


def _manifests(run: Alone | Cluster, prefix: str, held: list[dict[str, int]]) -> Iterator[bytes]:
    for rank, files in enumerate(held):
        size = files.get(prefix + MANIFEST)
        if size is not None:
            with suppress(ClusterError, OSError):
                yield run.pull(rank, HeldRange(prefix + MANIFEST, 0, size))


def _owners(manifest: Manifest, prefix: str, held: list[dict[str, int]]) -> dict[str, int] | None:
    """For each file of a checkpoint, the first rank on whose node it is; None if one is nowhere."""
    owners: dict[str, int] = {}
    for file in manifest.files:
        rank = next((rank for rank, files in enumerate(held) if files.get(prefix + file.name) == file.size), None)
        if rank is None:
            return None
        owners[file.name] = rank
    return owners


class MemoryFolder(ReadableFolder):
    """A checkpoint in the memory of nodes, as a folder that is read."""

    def __init__(
        self, run: Alone | Cluster, kept: KeptCopies, step: int, manifest: bytes, owners: Mapping[str, int]
    ) -> None:
        self._run, self._kept, self._prefix = run, kept, kept.prefix(step)
        self._manifest, self._owners = manifest, owners
        self._path = f"step {step} in the memory of the nodes"

    @property
    def path(self) -> str:
        """See ``ReadableFolder``."""
        return self._path

    def files(self) -> dict[str, int]:
        """See ``ReadableFolder``."""
        return {file.name: file.size for file in read_manifest(self).files}

    def get(self, name: str) -> bytes:
        """See ``ReadableFolder``; for the manifest."""
        assert name == MANIFEST
        return self._manifest

    def open(self, name: str) -> RangeReader:
        """See ``ReadableFolder``: a file of this node is opened here, another is read through a rank of its node."""
        try:
            return HeldFile(self._kept.holder, self._prefix + name)
        except FileNotFoundError:
            return FarFile(self._run, self._owners[name], self._prefix + name, self.files()[name])
