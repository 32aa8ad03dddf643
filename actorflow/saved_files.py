"""``flow.save`` and ``flow.load``: torch's files, in which global tensors are whole, with their layouts beside them.

Beside what ``torch.save`` writes, a file with global tensors has a record that says which tensor of the tree lay how,
so that ``torch.load`` reads plain whole tensors from it, and ``flow.load`` global ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import struct
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.distributed import group
from actorflow.support.whole_pickles import without_parts
from actorflow_compiler.core.errors import CallError, StateError
from actorflow_compiler.core.placement import Placement

__all__ = ["load", "save"]

RECORD = "actorflow_layouts.json"  # beside torch's own, in the folder of the archive
File = str | os.PathLike[str] | IO[bytes]


def save(
    obj: Any,
    f: File,
    global_dst_rank: int | None = None,
    save_as_external_data: bool = False,
    **options: Any,
) -> None:
    """Write an object to a file as ``torch.save`` does, with its global tensors whole.

    Where there are global tensors in it (in lists, tuples and dictionaries), every rank of the run makes the call.
    Rank ``global_dst_rank`` alone gets their whole values, in the memory of its CPU, and writes the file; without it
    every rank does.  The call returns on all ranks when the file is there, or raises on all of them.  ``torch.load``
    reads plain tensors from it, and ``flow.load`` global ones.  ``options`` are those of ``torch.save``.

    A file that is given by its path is replaced as a whole or not at all, so that all ranks may write the same one.

    Raises CallError for a rank that is not in the run, and for ``save_as_external_data``, as there is one file; OSError
    if it cannot be written; StateError for a global tensor in another object, such as a module.

    >>> flow.save(model.state_dict(), "model.pt", global_dst_rank=0)
    """
    if save_as_external_data:
        raise CallError(
            "flow.save(save_as_external_data=True) was found; there is one file for all tensors: leave it out, or use "
            "flow.checkpoint.save, which writes a folder, in parts"
        )
    _check_rank("flow.save", "global_dst_rank", global_dst_rank)
    leaves, form = pytree.tree_flatten(obj)
    spread = [number for number, leaf in enumerate(leaves) if getattr(leaf, "has_parts", False)]
    writes = global_dst_rank is None or group.rank() == global_dst_rank
    if not spread:
        if writes:
            _write(obj, f, b"", options)
        return
    from actorflow.eager.whole_values import KeptLayout, agree, whole_values

    layouts = [[number, KeptLayout.of(leaves[number]).to_json()] for number in spread]
    for number, value in zip(spread, whole_values([leaves[n] for n in spread], global_dst_rank), strict=True):
        leaves[number] = value

    def work() -> None:
        if writes:
            _write(pytree.tree_unflatten(leaves, form), f, json.dumps({"layouts": layouts}).encode(), options)

    agree(f"flow.save({'' if global_dst_rank is None else f'global_dst_rank={global_dst_rank}'})", work)


def load(
    f: File,
    global_src_rank: Any = None,
    map_location: Any = None,
    *,
    support_pytorch_format: bool = True,
    **options: Any,
) -> Any:
    """Read a file of ``flow.save`` or ``torch.save``.

    Without ``global_src_rank`` the rank that makes the call reads it: what was a global tensor is one again, in the
    layout that it had, so that every rank has to make the call; where this run does not have its devices, it is a plain
    whole tensor.  With ``global_src_rank`` every rank makes the call, that rank alone reads the file, and all
    tensors are global: in the layout that they had, else whole on the CPU of that rank, as plain ones of a file are.

    ``map_location`` is torch's, and may be a placement, on which global tensors are put then.  It may be second, as in
    ``torch.load(f, "cpu")``.  ``support_pytorch_format`` changes nothing: there is no other format.  ``options`` are
    those of ``torch.load``; ``weights_only`` is True unless it is given.

    Raises CallError for a rank that is not in the run; OSError or StateError if the file cannot be read, on all ranks
    where one reads for all.

    >>> model.load_state_dict(flow.load("model.pt", global_src_rank=0))
    """
    if global_src_rank is not None and (isinstance(global_src_rank, bool) or not isinstance(global_src_rank, int)):
        if map_location is not None:
            raise CallError(
                f"flow.load(global_src_rank={global_src_rank!r}) was found; the number of a rank was expected"
            )
        global_src_rank, map_location = None, global_src_rank
    _check_rank("flow.load", "global_src_rank", global_src_rank)
    onto = map_location if isinstance(map_location, Placement) else None
    if global_src_rank is not None:
        return _load_from(f, global_src_rank, map_location, options)
    tree, layouts = _read(f, None if onto is not None else map_location, options)
    if not layouts and onto is None:
        return tree
    from actorflow.eager.current import current
    from actorflow.eager.whole_values import from_whole_values

    leaves, form = pytree.tree_flatten(tree)
    plain = [leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and number not in layouts]
    if onto is not None and plain:
        raise StateError(
            f"{_name_of(f)} was to be loaded onto {onto}, and has plain tensors, which each rank reads for itself; "
            f"global_src_rank=0 was expected with it, the rank that reads for all"
        )
    comm = current()
    if onto is not None:
        comm.check_placement(onto)
    for number, kept in layouts.items():
        kind = None if map_location is None or onto is not None else leaves[number].device.type
        layout = kept.in_run(comm, kind, onto)
        if layout is not None:
            leaves[number] = from_whole_values(leaves[number], layout)
    return pytree.tree_unflatten(leaves, form)


def _load_from(f: File, src: int, map_location: Any, options: Mapping[str, Any]) -> Any:
    """The tree in a file that rank ``src`` reads, with global tensors.  Collective."""
    from actorflow.eager.current import current
    from actorflow.eager.layout import everywhere
    from actorflow.eager.whole_values import KeptLayout, from_rank, told_by

    values: list[Any] = []
    comm = current()
    onto = map_location if isinstance(map_location, Placement) else None
    kind = None if map_location is None or onto is not None else torch.device(map_location).type
    for place in (onto, None if kind is None else Placement(kind, (src,), (1,))):
        if place is not None:
            comm.check_placement(place)

    def read() -> bytes:
        tree, layouts = _read(f, "cpu", options)
        leaves, form = pytree.tree_flatten(tree)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
                raise StateError(f"a {leaf.layout} tensor was found in {_name_of(f)}; dense ones were expected")
        values[:] = leaves
        outline = io.BytesIO()
        torch.save(pytree.tree_unflatten(list(map(_without_values, leaves)), form), outline)
        try:
            torch.load(io.BytesIO(outline.getvalue()), weights_only=True)  # as other ranks do
        except Exception as error:
            raise StateError(
                f"{_name_of(f)} has objects that rank {src} cannot tell the other ranks of; tensors, numbers, texts, "
                f"lists, tuples and dictionaries were expected: {error}"
            ) from error
        head = json.dumps([[number, kept.to_json()] for number, kept in layouts.items()]).encode()
        return len(head).to_bytes(8, "big") + head + outline.getvalue()

    told = told_by(src, "flow.load from", read)
    size = int.from_bytes(told[:8], "big")
    layouts = {number: KeptLayout.from_json(kept) for number, kept in json.loads(told[8 : 8 + size])}
    leaves, form = pytree.tree_flatten(torch.load(io.BytesIO(told[8 + size :]), weights_only=True))
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        layout = layouts[number].in_run(comm, kind, onto) if number in layouts else None
        if layout is None and onto is not None:
            layout = everywhere(onto)
        elif layout is None and kind is not None:
            layout = everywhere(Placement(kind, (src,), (1,)))
        leaves[number] = from_rank(values[number] if comm.rank == src else leaf, src, layout)
    return pytree.tree_unflatten(leaves, form)


def _without_values(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    bare = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return torch.nn.Parameter(bare, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else bare


# ---- files


def _write(obj: Any, f: File, record: bytes, options: Mapping[str, Any]) -> None:
    """Write a file of torch, with a record beside torch's own where there is one."""
    with without_parts():
        _write_whole(obj, f, record, options)


def _write_whole(obj: Any, f: File, record: bytes, options: Mapping[str, Any]) -> None:
    if not isinstance(f, str | os.PathLike):
        if not record:
            torch.save(obj, f, **options)
            return
        made = io.BytesIO()
        torch.save(obj, made, **options)
        _append(made, record)
        f.write(made.getvalue())
        return
    file = Path(os.path.realpath(f))
    if file.exists() and not stat.S_ISREG(file.stat().st_mode):  # a pipe, or a device
        torch.save(obj, f, **options)
        return
    part = file.with_name(f"{file.name}.{group.rank()}-{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("w+b") as written:  # of Python, whose errors say why a file cannot be written
            torch.save(obj, written, **options)
            if record:
                _append(written, record)
        os.replace(part, file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(file)) from None
        raise


def _append(file: IO[bytes], record: bytes) -> None:
    with _archive(file, "a") as archive:
        if archive is None:
            raise StateError("global tensors are saved in torch's zip format, and another one was asked for")
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/{RECORD}", record)


@contextlib.contextmanager
def _archive(file: Any, mode: Any) -> Iterator[zipfile.ZipFile | None]:
    """The file as an archive, or None if it is none."""
    try:
        opened = zipfile.ZipFile(file, mode)
    except zipfile.BadZipFile:
        yield None
        return
    with opened:
        yield opened


# what torch raises for a file that is cut off, or another program's; of pickle's errors it says itself what to do
_NO_FILE = EOFError, IndexError, KeyError, RuntimeError, UnicodeDecodeError, struct.error


def _read(f: File, map_location: Any, options: Mapping[str, Any]) -> tuple[Any, dict[int, Any]]:
    """What torch reads of a file, and the layouts of what were global tensors, by the leaf's number."""
    if isinstance(f, str | os.PathLike) and os.path.isdir(f):
        raise StateError(f"{_name_of(f)} is a folder; a file was expected: flow.checkpoint.load reads folders")
    start = None if isinstance(f, str | os.PathLike) or not f.seekable() else f.tell()
    try:
        tree = torch.load(f, map_location=map_location, **options)
    except _NO_FILE as error:
        raise StateError(
            f"{_name_of(f)} was not read; a whole file of flow.save or torch.save was expected: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(f, str | os.PathLike):
        if start is None:
            return tree, {}
        end = f.tell()
        f.seek(start)
        found = _layouts(f)
        f.seek(end)
        return tree, found
    return tree, _layouts(f)


def _layouts(f: Any) -> dict[int, Any]:
    with _archive(f, "r") as archive:
        names = [] if archive is None else [name for name in archive.namelist() if name.partition("/")[2] == RECORD]
        if archive is None or not names:
            return {}
        from actorflow.eager.whole_values import KeptLayout

        try:
            return {int(n): KeptLayout.from_json(kept) for n, kept in json.loads(archive.read(names[0]))["layouts"]}
        except (ValueError, TypeError, KeyError):
            raise StateError("the file says in no known form how its global tensors lay") from None


def _name_of(f: File) -> str:
    return os.fspath(f) if isinstance(f, str | os.PathLike) else "the file"


def _check_rank(function: str, name: str, rank: Any) -> None:
    if rank is None:
        return
    world = group.world()
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
        have = "rank 0 only" if world == 1 else f"ranks 0 … {world - 1}"
        raise CallError(f"{function}({name}={rank!r}) was found; the run has {have}")
