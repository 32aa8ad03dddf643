"""Give back the threads that GNU OpenMP keeps for a thread which computes no more.

GNU OpenMP keeps a team of threads for each thread that has computed with several, and lets them spin between two ops
for as long as all teams together are no more than the processors.  A script that has made its weights has such a
team, and the thread that computes its steps has another.  Both count, so that each op of a step would wake threads that
went to sleep a moment ago: a tenth of a training step on one device.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

__all__ = ["leave_team"]

_SOFT = 1  # omp_pause_soft: what the library has set up may go, settings stay


def leave_team() -> None:
    """Give back the calling thread's team, if it has one; it gets another when it computes again.

    Does nothing where torch computes with one thread or uses another OpenMP library.
    """
    library = _gnu_openmp()
    if library is not None and torch.get_num_threads() > 1:
        library.omp_pause_resource_all(_SOFT)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """GNU OpenMP, as this process has loaded it with torch; None if there is none that can give back threads."""
    library = ctypes.CDLL(None)  # torch loads its OpenMP library for everybody
    others = hasattr(library, "kmp_get_blocktime")  # LLVM's and Intel's, which have one team for all
    return library if hasattr(library, "omp_pause_resource_all") and not others else None
