"""Have the C library keep the memory that steps free, in huge pages.

A step allocates the same tensors again and again.  Memory that goes back to the kernel in between costs a page fault
for each page when it is fetched anew, and memory in pages of 4 KiB costs misses of the TLB at each pass over it, which
a virtual machine makes dearer.  Together they are a tenth of a training step on a CPU.

Processes that a launcher starts have it from their environment, which the C library reads as they begin
(``variables``).  A process that the user started is told at its first step (``Heap``).

Other C libraries than glibc, and kernels without transparent huge pages, leave all as it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

__all__ = ["Heap", "variables"]

KEPT = 32 << 20  # bytes: larger blocks are mapped by themselves; the largest value that glibc accepts
TUNABLES = "GLIBC_TUNABLES"
HUGE = "glibc.malloc.hugetlb"
_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",  # only the main arena is ever kept
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),  # bytes
    "MALLOC_MMAP_THRESHOLD_": str(KEPT),
}
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # M_… of malloc.h
_PAD = 64 << 20  # bytes by which the heap grows at least, so that it does so seldom
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_… of mman.h


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process keeps freed memory, in huge pages; what the user has set stays as it is.

    >>> variables({"MALLOC_ARENA_MAX": "7", "GLIBC_TUNABLES": "glibc.malloc.check=1"})["GLIBC_TUNABLES"]
    'glibc.malloc.check=1:glibc.malloc.hugetlb=1'
    """
    found = {name: environ.get(name, value) for name, value in _VARIABLES.items()}
    tunables = environ.get(TUNABLES, "")
    if HUGE not in tunables:
        tunables = f"{tunables}:{HUGE}=1".lstrip(":")
    return found | {TUNABLES: tunables}


class Heap:
    """The heap of a process that no launcher started.

    Where the user has set one of the C library's variables, it stays as they want it.
    """

    def __init__(self) -> None:
        self._end = 0
        self._library = None if {*_VARIABLES, TUNABLES} & os.environ.keys() else _glibc()
        if self._library is not None:
            for option, value in (
                (_ARENA_MAX, 1), (_MMAP_THRESHOLD, KEPT), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, _PAD),
            ):  # fmt: skip
                self._library.mallopt(option, value)

    def settle(self) -> None:
        """Put the heap into huge pages if it has grown since the last time; costs next to nothing if it has not."""
        if self._library is None:
            return
        end = self._library.sbrk(0)
        if end == self._end:
            return
        self._end = end
        if begin := _begin_of_heap():
            for advice in (_HUGEPAGE, _COLLAPSE):  # for pages that are touched later, and for those that were
                self._library.madvise(begin, end - begin, advice)


def _glibc() -> ctypes.CDLL | None:
    """The process's C library if it is glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.sbrk.restype, library.sbrk.argtypes = ctypes.c_size_t, [ctypes.c_ssize_t]
    library.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    return library


def _begin_of_heap() -> int:
    """The first address of the heap, at the begin of a page; 0 where the kernel shows none."""
    try:
        with open("/proc/self/maps") as maps:
            return next((int(line.split("-")[0], 16) for line in maps if line.endswith("[heap]\n")), 0)
    except OSError:
        return 0
