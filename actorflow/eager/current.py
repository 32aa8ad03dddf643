"""A thread asks; the wires of the rank that it is come out, made where the process has none yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from actorflow.distributed.group import world as world_of_run
from actorflow.eager.communicator import NoWires, Wires
from actorflow.eager.group_communicator import GroupWires
from actorflow.support.endings import when_finished

__all__ = ["checked", "current", "finish", "use", "world"]


class _Here(threading.local):
    wires: Wires | None = None


_here = _Here()
_of_process: Wires | None = None
_making = threading.Lock()


def current() -> Wires:
    """This rank's wires: those of ``use`` on this thread, else the process's, which are made at the first call.

    That call is collective where the process has peers (under ``actorflow run``, ``torchrun``, or
    ``python -m actorflow.distributed.launch``).
    """
    return _here.wires or _of_process or _make()


def world() -> int:
    """The number of ranks; makes no wires."""
    if (known := _here.wires or _of_process) is not None:
        return known.world
    return world_of_run()


@contextlib.contextmanager
def use(wires: Wires) -> Iterator[Wires]:
    """Let this thread be another rank in the body."""
    before = _here.wires
    _here.wires = wires
    try:
        yield wires
    finally:
        _here.wires = before


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Compare every op on global tensors of the body between all ranks before it runs: slow, but exact.

    A rank that is about to run another op than the others is an error at once, on every rank, which shows each
    rank's op.  Every rank has to enter it.  ``ACTORFLOW_CHECK_PACE=1`` does it for a whole run.
    """
    wires = current()
    wires.checks += 1
    try:
        yield
    finally:
        wires.checks -= 1


def finish() -> None:
    """Tell the peers that this process's script has ended, if it has made its wires."""
    if _of_process is not None:
        _of_process.finish()


when_finished(finish, first=True)  # a peer may wait for this rank in an op, and others for a call of that peer


def _make() -> Wires:
    global _of_process
    with _making:
        if _of_process is None:
            _of_process = GroupWires.joined() or NoWires()
    return _of_process
