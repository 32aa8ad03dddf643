"""Make, keep, abort and close communicators: torch.distributed's process groups among some ranks of the run.

Each data plane of a session (``gloo.py``, ``nccl.py``) and the global tensors of a script (``actorflow.eager``) have
their own registry and their own prefix in the run's store.  They share this code but no communicator, even between the
same ranks, because that would not be safe:

- Gloo and NCCL match operations by the order in which the ranks issue them.  A job issues its operations from the
  runtime's threads and global tensors theirs from the script's thread, so the two would interleave differently on
  different ranks, and take each other's data.
- When ranks run different ops on global tensors, their blocked calls are ended by breaking the communicator.  A job
  that runs at the same time must not fail with them.
- Sessions close their communicators and make new ones; those of global tensors live from the first global tensor to
  the end of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from actorflow.support import background
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.torch_internals import nccl_options

__all__ = ["CommunicatorRegistry", "Maker", "Scope", "abort_all", "break_connections", "over_gloo", "over_nccl"]

NO_TIMEOUT = timedelta(days=1)  # keeps torch's watchdog from ending the process; ``Patience`` notices late calls
# Switch off torch's own threads, which poll the store, and at an error, a timeout or a hang mostly end the process.
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_UNANSWERED_TAG = 2**31 - 1  # tag of a receive that no rank answers; all other receives have smaller tags
_environment_lock = threading.Lock()


class Communicator(Protocol):
    """The part of a ``torch.distributed`` process group that is used; ranks are positions in the group.

    Calls return torch's ``Work``, or None if the operation was put into the current stream.  ``send`` and ``recv`` are
    used only with Gloo, ``broadcast`` only with NCCL.
    """

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any: ...
    def broadcast(self, tensors: list[Tensor], options: Any = ...) -> Any: ...
    def allreduce(self, tensors: list[Tensor], options: Any = ...) -> Any: ...
    def alltoall_base(
        self, output: Tensor, input: Tensor, receive: list[int], send: list[int], options: Any = ...
    ) -> Any: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


Maker = Callable[[Store, int, int], Communicator]  # (this communicator's own store, position, number of ranks)


class Scope(StrEnum):
    """The purpose of a communicator; the same ranks may have one for each purpose."""

    PAIR = "pair"  # transfers between two ranks; in a data plane the first sends and the second receives
    GROUP = "group"  # collectives of some ranks


def over_nccl(store: Store, rank: int, size: int) -> Communicator:
    """Make an NCCL communicator.  Raises ClusterError if this torch has no NCCL.

    By default torch ends the process when an operation takes too long or a peer is lost.  That is switched off: the
    data plane reports late calls, and the control plane notices lost ranks.
    """
    group: Any = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    if group is None:
        raise ClusterError("this torch has no NCCL; install one that was built for CUDA")
    with _environment_lock, _defaults(_QUIET):
        return cast(Communicator, group(store, rank, size, nccl_options(NO_TIMEOUT)))


def over_gloo(store: Store, rank: int, size: int, timeout: timedelta = NO_TIMEOUT) -> Communicator:
    """Make a Gloo communicator, whose calls fail after ``timeout``.

    Tests without a GPU use it in place of NCCL, too.
    """
    return cast(Communicator, ProcessGroupGloo(store, rank, size, timeout))


class CommunicatorRegistry:
    """One rank's communicators over one backend, at most one for each scope and tuple of ranks.

    All ranks of a communicator must open it.  ``make`` makes it, with a store of its own.  If that fails, ClusterError
    is raised with the text ``failure``, in which ``{rank}``, ``{ranks}``, ``{scope}`` and ``{error}`` are filled in; if
    ``failure`` is empty, the backend's error is raised unchanged.
    """

    def __init__(self, rank: int, store: Store, make: Maker, failure: str = "") -> None:
        self._rank, self._store, self._make, self._failure = rank, store, make, failure
        self._made: dict[tuple[Scope, tuple[int, ...]], Communicator] = {}

    def __contains__(self, key: tuple[Scope, tuple[int, ...]]) -> bool:
        return key in self._made

    def __getitem__(self, key: tuple[Scope, tuple[int, ...]]) -> Communicator:
        """A communicator that is open already; KeyError if it is not."""
        return self._made[key]

    def open(self, scope: Scope, ranks: tuple[int, ...]) -> Communicator:
        """The communicator of ``ranks``, which include this one.  The first call makes it, and is collective."""
        found = self._made.get((scope, ranks))
        if found is not None:
            return found
        # dist.new_group(use_local_synchronization=True) numbers groups by how many the process has, so it hangs
        # if the members are in different numbers of groups.  Our names depend only on the ranks.
        store = PrefixStore(f"{scope}/{'.'.join(map(str, ranks))}", self._store)
        try:
            made = self._make(store, ranks.index(self._rank), len(ranks))
        except (RuntimeError, ValueError) as error:
            if not self._failure:
                raise
            text = self._failure.format(rank=self._rank, ranks=list(ranks), scope=scope, error=error)
            raise ClusterError(text) from error
        self._made[scope, ranks] = made
        return made

    def abort(self, thread: str) -> None:
        """Abort all operations under way, on background threads named ``thread``; returns at once."""
        abort_all(list(self._made.values()), thread)

    def shut_down(self) -> None:
        """Shut down all communicators in order, as every rank must.  It is no error if peers have ended already."""
        for communicator in self._made.values():
            with suppress(RuntimeError):
                communicator.shutdown()

    def clear(self) -> None:
        """Forget all communicators; blocked calls stay blocked until their peer ends or their timeout."""
        self._made.clear()


def abort_all(communicators: Iterable[Aborting], thread: str) -> None:
    """Abort the operations under way on communicators; returns at once.

    Aborting one communicator may wait for kernels that wait for another, so each is aborted on its own background
    thread, named ``thread``.  The process waits for these threads before it ends.
    """
    for communicator in communicators:
        background.start(partial(_abort, communicator), thread)


class Aborting(Protocol):
    """The part of a communicator that ``abort_all`` uses."""

    def abort(self) -> None: ...


def _abort(communicator: Aborting) -> None:
    with suppress(RuntimeError):  # it may be broken already, which may be why it is aborted
        communicator.abort()


def break_connections(communicator: Communicator, peer: int) -> None:
    """Make blocked calls of a Gloo communicator fail: a receive that times out closes all of its connections."""
    with suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8)
        communicator.recv([nothing], peer, _UNANSWERED_TAG).wait(timedelta(milliseconds=1))


@contextmanager
def _defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the context, except those that the user has set."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
