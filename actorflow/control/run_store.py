"""The run's ``torch.distributed.Store``, whose values the master keeps: no port of its own, and the run's own check.

torch's ``TCPStore`` lets anybody who reaches its port read and change it, such as the addresses at which Gloo's ranks
wait for each other.  This one asks over the control plane, which turns away whoever lacks the run's token.  torch calls
it from C++, on any thread; a call that waits holds neither Python's lock (the GIL) nor the gRPC thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from actorflow.control.store_keeper import StoreVerb
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.torch_internals import meet_by_environment
from actorflow_protos import runtime_pb2 as pb

__all__ = ["RunStore", "meet_here"]

_distributed: Any = distributed  # its stubs lack what follows
_kept: list[Store] = []  # C++ may hold a store for longer than Python, and could not call one that Python has let go


class RunStore(Store):
    """One rank's access to the run's store; any thread.

    ``ask`` brings a request to the master, and raises ClusterError when the run has failed or this rank has left it.
    Everything here then raises ``torch.distributed.DistStoreError``, a RuntimeError, as torch's own stores do; so does
    waiting for a key for longer than ``timeout``.
    """

    def __init__(self, ask: Callable[[pb.StoreCall], pb.StoreReply], timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._ask = ask
        _kept.append(self)

    def clone(self) -> Store:
        """Another access to the same values, with a timeout of its own."""
        return RunStore(self._ask, self._limit)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._call(StoreVerb.SET, [key], [value])

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys, once all have one."""
        return self._wait(StoreVerb.GET, keys, self._limit)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set the values of keys."""
        self._call(StoreVerb.SET, keys, values)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value."""
        self._wait(StoreVerb.WAIT, keys, self._limit if timeout is None else timeout)

    def add(self, key: str, value: int) -> int:
        """Add to the number that is the value of a key, 0 where it has none; returns the sum."""
        return int(self._call(StoreVerb.ADD, [key], number=value).number)

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to the end of a key's value."""
        self._call(StoreVerb.APPEND, [key], [value])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the value of a key if it is the expected one, or missing and that is empty; returns what it then is."""
        return bytes(self._call(StoreVerb.COMPARE_SET, [key], [expected_value, desired_value]).values[0])

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have a value."""
        return bool(self._call(StoreVerb.CHECK, keys).there)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._call(StoreVerb.DELETE, [key]).there)

    def num_keys(self) -> int:
        """How many keys have a value."""
        return int(self._call(StoreVerb.COUNT, []).number)

    def list_keys(self) -> list[str]:
        """The keys that have a value."""
        return list(self._call(StoreVerb.LIST, []).keys)

    def has_extended_api(self) -> bool:
        """Whether there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def deleteKey(self, key: str) -> bool:  # noqa: N802 -- torch's C++ calls it so
        """See ``delete_key``."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802 -- torch's C++ calls it so
        """See ``num_keys``."""
        return self.num_keys()

    @property
    def _limit(self) -> timedelta:
        store: Any = self
        found: timedelta = store.timeout  # torch's own field, which its C++ sets, too
        return found

    def _wait(self, verb: StoreVerb, keys: list[str], limit: timedelta) -> list[bytes]:
        reply = self._call(verb, keys, seconds=limit.total_seconds())
        if not reply.there:
            raise _distributed.DistStoreError(
                f"wait timeout after {round(1000 * limit.total_seconds())}ms, keys: {', '.join(reply.keys)} (of the "
                "run's store, in which its ranks meet)"
            )
        return list(reply.values)

    def _call(
        self,
        verb: StoreVerb,
        keys: Sequence[str],
        values: Sequence[str | bytes] = (),
        number: int = 0,
        seconds: float = 0.0,
    ) -> pb.StoreReply:
        sent = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        try:
            return self._ask(pb.StoreCall(verb=verb, keys=keys, values=sent, number=number, seconds=seconds))
        except ClusterError as error:
            raise _distributed.DistStoreError(str(error)) from error


def meet_here(store: Callable[[], Store], rank: int, world: int) -> None:
    """Have a script's ``init_process_group`` that names no store meet in the run's, where it asks for its own place.

    ``store`` makes an access to it.  A script that gives ``MASTER_ADDR`` or ``MASTER_PORT`` another value than the
    launcher, or a process that it starts, meets as torch does everywhere.  Every group has a prefix of its own, so that
    one can be made after another was closed.
    """
    made = 0

    def meet(asked_rank: int, asked_world: int) -> Store | None:
        nonlocal made
        if (asked_rank, asked_world) != (rank, world):
            return None
        made += 1
        return PrefixStore(f"actorflow/env/{made}", store())

    meet_by_environment(meet)
