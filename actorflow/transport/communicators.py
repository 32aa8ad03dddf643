"""Make, keep, abort and close communicators: torch.distributed's process groups among some ranks of the run.

Each user has a registry and a part of the run's store of its own: a data plane of a session (``gloo.py``, ``nccl.py``),
and the global tensors of a script (``actorflow.eager``).  They share this code but no communicator, even between the
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

NO_TIMEOUT = timedelta(days=1)  # of torch's watchdog, which would end the process without a word: see ``Patience``
# What torch's own threads do when they see an error, a timeout or each other stand still, and poll the store for: end
# the process, most of them.
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_UNANSWERED_TAG = 2**31 - 1  # of a receive that no rank answers; other receives have smaller tags
_environment_lock = threading.Lock()


class Communicator(Protocol):
    """What is used of ``torch.distributed``'s process groups; ranks are positions in the group.

    Calls return torch's ``Work``, or None where the current stream does the operation.  Only Gloo is asked to send and
    receive, and only NCCL to broadcast.
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


Maker = Callable[[Store, int, int], Communicator]  # store of this communicator alone, position, number of ranks


class Scope(StrEnum):
    """What a communicator is for; there may be one of each between the same ranks."""

    PAIR = "pair"  # two ranks; in a data plane the first of them sends and the second receives
    GROUP = "group"  # collectives of some ranks


def over_nccl(store: Store, rank: int, size: int) -> Communicator:
    """Make a communicator of NCCL.  Raises ClusterError where this torch has none.

    Left to itself torch ends the process when an operation takes too long or a peer is lost; here the plane
    tells how far the plan has come, and the control plane notices who was lost.
    """
    group: Any = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    if group is None:
        raise ClusterError("this torch has no NCCL; install one that was built for CUDA")
    with _environment_lock, _defaults(_QUIET):
        return cast(Communicator, group(store, rank, size, nccl_options(NO_TIMEOUT)))


def over_gloo(store: Store, rank: int, size: int, timeout: timedelta = NO_TIMEOUT) -> Communicator:
    """Make a communicator of Gloo; calls that take longer than ``timeout`` fail.

    It also stands in for NCCL where there is no GPU.
    """
    return cast(Communicator, ProcessGroupGloo(store, rank, size, timeout))


class CommunicatorRegistry:
    """One rank's communicators over one backend, at most one for each scope and tuple of ranks.

    All ranks of a communicator open it; ``make`` gets a store that is only for it.  ``failure`` is the text of the
    ClusterError where that fails, with ``{rank}``, ``{ranks}``, ``{scope}`` and ``{error}`` in it; without a text the
    backend's error is raised as it is.
    """

    def __init__(self, rank: int, store: Store, make: Maker, failure: str = "") -> None:
        self._rank, self._store, self._make, self._failure = rank, store, make, failure
        self._made: dict[tuple[Scope, tuple[int, ...]], Communicator] = {}

    def __contains__(self, key: tuple[Scope, tuple[int, ...]]) -> bool:
        return key in self._made

    def __getitem__(self, key: tuple[Scope, tuple[int, ...]]) -> Communicator:
        """One that is open."""
        return self._made[key]

    def open(self, scope: Scope, ranks: tuple[int, ...]) -> Communicator:
        """The communicator of ``ranks``, this one among them; the first call makes it, and is collective."""
        found = self._made.get((scope, ranks))
        if found is not None:
            return found
        # dist.new_group(use_local_synchronization=True) names a group after the number of groups that the
        # process has, so it hangs where members are in different numbers of groups; names of our own do not.
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
        """Make what is under way fail, on threads called ``thread``; returns at once."""
        abort_all(list(self._made.values()), thread)

    def shut_down(self) -> None:
        """End in order; every rank does so.  One whose peers have ended already is no error."""
        for communicator in self._made.values():
            with suppress(RuntimeError):
                communicator.shutdown()

    def clear(self) -> None:
        """Let go of all; calls that are blocked stay so until their peer ends, or the timeout."""
        self._made.clear()


def abort_all(communicators: Iterable[Aborting], thread: str) -> None:
    """Make what is under way on communicators fail; returns at once.

    Aborting one may wait for kernels that wait for another one, so each has a thread, called ``thread``; the process
    waits for them before it ends.
    """
    for communicator in communicators:
        background.start(partial(_abort, communicator), thread)


class Aborting(Protocol):
    """What ``abort_all`` uses of a communicator."""

    def abort(self) -> None: ...


def _abort(communicator: Aborting) -> None:
    with suppress(RuntimeError):  # it may be broken already, which is why
        communicator.abort()


def break_connections(communicator: Communicator, peer: int) -> None:
    """Make blocked calls of a Gloo communicator fail: a receive that times out closes all of its connections."""
    with suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8)
        communicator.recv([nothing], peer, _UNANSWERED_TAG).wait(timedelta(milliseconds=1))


@contextmanager
def _defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that a constructor reads, but for those that the user has set."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
