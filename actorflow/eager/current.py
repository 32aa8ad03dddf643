"""The communicator of the calling thread's rank; the process's own is made at the first call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from actorflow.distributed import group
from actorflow.eager.communicator import EagerCommunicator, SingleRankCommunicator
from actorflow.eager.group_communicator import GroupCommunicator
from actorflow.support.exit_hooks import when_finished

__all__ = ["comparing_ops", "current", "finish", "use", "world"]


class _Here(threading.local):
    comm: EagerCommunicator | None = None


_here = _Here()
_of_process: EagerCommunicator | None = None
_making = threading.Lock()


def current() -> EagerCommunicator:
    """This rank's communicator: that of ``use`` on this thread, else the process's, which the first call makes.

    That call is collective where the process has peers (under ``actorflow run``, ``torchrun``, or
    ``python -m actorflow.distributed.launch``).
    """
    return _here.comm or _of_process or _make()


def world() -> int:
    """The number of ranks; makes no communicator."""
    if (known := _here.comm or _of_process) is not None:
        return known.world
    return group.world()


@contextlib.contextmanager
def use(comm: EagerCommunicator) -> Iterator[EagerCommunicator]:
    """Make ``comm`` the communicator of this thread in the body, so that the thread is that rank."""
    before = _here.comm
    _here.comm = comm
    try:
        with group.standing_for(comm.rank, comm.world):
            yield comm
    finally:
        _here.comm = before


@contextlib.contextmanager
def comparing_ops() -> Iterator[None]:
    """Compare every op on global tensors of the body between all ranks before it runs: slow, but exact.

    If a rank is about to run another op than the others, every rank raises an error at once that shows each
    rank's op.  Every rank has to enter it.  ``ACTORFLOW_CHECK_MISMATCH=1`` does it for a whole run.
    """
    comm = current()
    comm.checks += 1
    try:
        yield
    finally:
        comm.checks -= 1


def finish() -> None:
    """Tell the peers that this process's script has ended, if it has made a communicator."""
    if _of_process is not None:
        _of_process.finish()


when_finished(finish, first=True)  # a peer may wait for this rank in an op, and others for a call of that peer


def _make() -> EagerCommunicator:
    global _of_process
    with _making:
        if _of_process is None:
            _of_process = GroupCommunicator.joined() or SingleRankCommunicator()
    return _of_process
