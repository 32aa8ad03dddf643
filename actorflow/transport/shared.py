"""Registers in shared memory: two ranks of a machine map it, one fills the slots, the other reads them in place.

A region is one anonymous file (memfd) for each plan and directed pair of ranks.  The rank that fills the registers
makes it and sends its file descriptor to the other.  It has no name, so a crash leaves nothing behind, and the size of
/dev/shm does not limit it.  Within a region the slots follow each other register by register, with tensors at multiples
of ``ALIGN`` bytes; both ranks compute these offsets from the plan.

Tokens are read in place, so no tensor may refer to a token's memory once its slot is free again: see ``owned``.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from actorflow.transport.redistribution import dtype_of
from actorflow_compiler.core.errors import ClusterError, PlanError
from actorflow_compiler.plan.plan import Plan, Plane, Register, Send

ALIGN = 64  # bytes; a cache line, which also suits vector instructions
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # so that no peer can resize it while it is mapped


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """The slots of one register: the tensors of each slot, and the addresses in which all of them lie."""

    slots: tuple[tuple[Tensor, ...], ...]
    start: int
    stop: int


def shared_registers(plan: Plan, source: int, home: int) -> tuple[Register, ...]:
    """The registers of a plan that rank ``source`` fills on rank ``home`` through shared memory."""
    return tuple(
        register
        for register in plan.registers
        if isinstance(comm := plan.actor(register.producer).comm, Send)
        and comm.plane == Plane.SHARED
        and comm.ranks == (source, home)
        and register.tensors
    )


def region_bytes(registers: Sequence[Register]) -> int:
    """The size of a region for these registers."""
    return sum(register.slots * _slot_bytes(register) for register in registers)


def make_region(nbytes: int, rank: int, *homes: int) -> int:
    """Make a region of zeros, which this rank fills for the ranks ``homes``, and return its file descriptor.

    Raises ClusterError if the machine, or the memory limit of this process's control group, has too little memory left.
    """
    free = available_memory()
    whom = f"rank {homes[0]}" if len(homes) == 1 else f"ranks {list(homes)}"
    if nbytes > free:
        raise ClusterError(
            f"rank {rank} needs {nbytes / 1e6:,.1f} MB of shared memory for what it sends to {whom}, and "
            f"{free / 1e6:,.1f} MB are left on this machine, or below its limit. Use smaller micro-batches or fewer "
            "slots, or more machines."
        )
    descriptor = -1
    try:
        descriptor = os.memfd_create("actorflow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(descriptor, 0, nbytes)  # allocate now, as running out at first use would kill the process
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as e:
        if descriptor >= 0:
            os.close(descriptor)
        raise ClusterError(
            f"rank {rank} could not make {nbytes / 1e6:,.1f} MB of shared memory for what it sends to {whom}: "
            f"{e}. Run with --no-local (ACTORFLOW_LOCAL=0) to do without."
        ) from e
    return descriptor


def map_bytes(descriptor: int, nbytes: int) -> Tensor:
    """Map a region as a flat uint8 tensor, which is unmapped when the last tensor that lies in it dies.

    Raises ClusterError if the region does not have ``nbytes`` bytes, or is not sealed against resizing.
    """
    found = os.fstat(descriptor).st_size
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & (_SEALS | fcntl.F_SEAL_WRITE) == _SEALS
    except OSError:  # it is a file, a socket or whatever has no seals
        sealed = False
    if found != nbytes or not sealed:
        raise ClusterError(f"shared memory of {found} bytes was found; the plan says {nbytes}, sealed")
    # unlike mmap.mmap it keeps no descriptor, of which a process may have few, and plans have many regions
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)


def map_region(descriptor: int, registers: Sequence[Register]) -> dict[int, SharedSlots]:
    """Map a region and return the slots of each register by its id.

    Raises ClusterError if the region does not have the size of the registers, or is not sealed against resizing.
    """
    flat = map_bytes(descriptor, region_bytes(registers))
    slots_of: dict[int, SharedSlots] = {}
    start = 0
    for register in registers:
        stop = start + register.slots * _slot_bytes(register)
        slots = tuple(tuple(_tensors(flat, start + n * _slot_bytes(register), register)) for n in range(register.slots))
        slots_of[register.id] = SharedSlots(slots, flat.data_ptr() + start, flat.data_ptr() + stop)
        start = stop
    return slots_of


def fill(shared: SharedSlots, sequence: int, tensors: Sequence[Tensor]) -> None:
    """Copy a token into its slot.  Raises PlanError if a shape or dtype does not fit."""
    for place, tensor in zip(shared.slots[sequence % len(shared.slots)], tensors, strict=True):
        if place.shape != tensor.shape or place.dtype != tensor.dtype:
            raise PlanError(
                f"a {tensor.dtype} of shape {list(tensor.shape)} was found for a slot of shared memory; "
                f"the plan says {place.dtype} of shape {list(place.shape)}"
            )
        place.copy_(tensor)


def owned(outputs: Sequence[Any], registers: Sequence[SharedSlots]) -> Sequence[Any]:
    """The outputs of a firing that read ``registers`` in shared memory; outputs that lie in that memory are copied.

    An output may be an operand itself or a view of it.  When the firing ends, the slots of its operands are free and
    the peer overwrites them, while the output may live on in other registers.
    """
    for register in registers:
        start, stop = register.start, register.stop
        outputs = [out.clone() if start <= out.data_ptr() < stop else out for out in outputs]
    return outputs


def available_memory() -> int:
    """Bytes that this process can still use: what the machine has left, or its control group if that is less."""
    free = [int(psutil.virtual_memory().available)]
    for limit, used, stat in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        try:
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()) + _cached(Path(stat).read_text()))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return min(free)


def _cached(stat: str) -> int:
    """The part of a control group's used memory that is page cache, which the kernel frees when memory is short."""
    found = dict(line.split() for line in stat.splitlines())
    whole = "total_" if "total_inactive_file" in found else ""  # in version 1 these fields include child groups
    return sum(int(found.get(f"{whole}{kind}_file", 0)) for kind in ("inactive", "active"))


def _slot_bytes(register: Register) -> int:
    return sum(_padded(t.nbytes) for t in register.tensors)


def _tensors(flat: Tensor, start: int, register: Register) -> Iterator[Tensor]:
    for spec in register.tensors:
        yield flat[start : start + spec.nbytes].view(dtype_of(spec.dtype)).view(spec.shape)
        start += _padded(spec.nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
