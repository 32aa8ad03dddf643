"""Have the threads of GNU OpenMP wait without taking the processors from others.

GNU OpenMP keeps a team of threads for each thread that has computed with several, and lets them spin between two ops
for as long as all teams together are no more than the processors.  A script that has made its weights has such a
team, and the thread that computes its steps has another.  Both count, so that each op of a step would wake threads that
went to sleep a moment ago: a tenth of a training step on one device.  So a thread that computes no more gives its team
back (``leave_team``).

A team that spins waits for milliseconds before it sleeps.  Where other processes want the processors, those may be the
very ones that the rest of the team needs, and a step takes several times as long.  Ops follow each other within much
less, so processes that a launcher starts spin for less (``variables``): beside others they are faster by far, alone
they are as fast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

__all__ = ["leave_team", "variables"]

SPINS = 10_000  # looks for work before a thread sleeps, some tenths of a millisecond; OpenMP's own are 300,000
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # by which users say how threads wait
_SOFT = 1  # omp_pause_soft: what the library has set up may go, settings stay


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process spins for a short time; none where the user has said how threads wait.

    >>> variables({}), variables({"OMP_WAIT_POLICY": "active"})
    ({'GOMP_SPINCOUNT': '10000'}, {})
    """
    return {} if any(name in environ for name in _WAITING) else {"GOMP_SPINCOUNT": str(SPINS)}


def leave_team(threads: int) -> None:
    """Give back the calling thread's team, if it has one; it gets another when it computes again.

    ``threads`` are those that torch computes with.  Does nothing with one, or with another OpenMP library.
    """
    library = _gnu_openmp()
    if library is not None and threads > 1:
        library.omp_pause_resource_all(_SOFT)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """GNU OpenMP, as this process has loaded it with torch; None if there is none that can give back threads."""
    library = ctypes.CDLL(None)  # torch loads its OpenMP library for everybody
    others = hasattr(library, "kmp_get_blocktime")  # LLVM's and Intel's, which have one team for all
    return library if hasattr(library, "omp_pause_resource_all") and not others else None
