"""Keep, on the master, the values of the run's ``torch.distributed`` store, and answer what ranks ask of it.

A rank's request comes over gRPC, behind the check of the run's token, like everything else that ranks tell each other.
Used on the gRPC thread alone: a request that waits for keys is a coroutine, and holds up nothing.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from actorflow.control.message_rules import check_known, member, refuse
from actorflow.support.refusals import RefusalReason
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb

__all__ = ["StoreKeeper", "StoreVerb"]

LONGEST = 1e8  # seconds that a request can wait; some three years


class StoreVerb(enum.StrEnum):
    """What can be asked of the store."""

    SET = "set"
    GET = "get"  # waits for all keys
    WAIT = "wait"
    ADD = "add"
    COMPARE_SET = "compare_set"
    APPEND = "append"
    CHECK = "check"
    DELETE = "delete"
    COUNT = "count"
    LIST = "list"


@dataclass(eq=False, slots=True)
class _Waiter:
    missing: set[str]
    come: asyncio.Future[None]


class StoreKeeper:
    """The values by key; those of ``add`` are decimal numbers as text, as in torch's own stores."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, set[_Waiter]] = {}  # by key without a value
        self._answers: dict[str, Callable[[pb.StoreCall], Awaitable[pb.StoreReply]]] = {
            StoreVerb.SET: self._set,
            StoreVerb.GET: self._get,
            StoreVerb.WAIT: self._get,
            StoreVerb.ADD: self._add,
            StoreVerb.COMPARE_SET: self._compare_set,
            StoreVerb.APPEND: self._append,
            StoreVerb.CHECK: self._check,
            StoreVerb.DELETE: self._delete,
            StoreVerb.COUNT: self._count,
            StoreVerb.LIST: self._list,
        }

    async def answer(self, call: pb.StoreCall) -> pb.StoreReply:
        """The answer to a request.

        Raises MessageRefused for one that no rank sends, and ClusterError where the values do not allow it.
        """
        check_known(call)
        verb = member(StoreVerb, call.verb, "the request to the store")
        if not math.isfinite(call.seconds):
            refuse(RefusalReason.VALUE, f"{verb} for {call.seconds} seconds", "a finite number")
        return await self._answers[verb](call)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiters.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing and not waiter.come.done():
                waiter.come.set_result(None)

    async def _set(self, call: pb.StoreCall) -> pb.StoreReply:
        for key, value in _pairs(call):
            self._put(key, value)
        return pb.StoreReply()

    async def _get(self, call: pb.StoreCall) -> pb.StoreReply:
        """Wait until all keys have a value at once; those that have none by then are named."""
        loop = asyncio.get_running_loop()
        end = loop.time() + min(max(call.seconds, 0.0), LONGEST)
        while missing := [key for key in call.keys if key not in self._values]:
            if not await self._come(missing, end - loop.time()):
                return pb.StoreReply(keys=[key for key in missing if key not in self._values])
        values = [self._values[key] for key in call.keys] if call.verb == StoreVerb.GET else []
        return pb.StoreReply(values=values, there=True)

    async def _come(self, missing: Iterable[str], seconds: float) -> bool:
        """Whether each of these keys is given a value within the time."""
        waiter = _Waiter(set(missing), asyncio.get_running_loop().create_future())
        for key in missing:
            self._waiters.setdefault(key, set()).add(waiter)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(waiter.come, max(0.0, seconds))
                return True
            return False
        finally:
            for key in waiter.missing:
                others = self._waiters[key]
                others.discard(waiter)
                if not others:
                    del self._waiters[key]

    async def _add(self, call: pb.StoreCall) -> pb.StoreReply:
        key = _only(call)
        try:
            number = int(self._values.get(key, b"0")) + call.number
        except ValueError:
            raise ClusterError(
                f"{call.number} is to be added to {key!r} of the run's store, whose value is no number: "
                f"{self._values[key][:40]!r}"
            ) from None
        self._put(key, str(number).encode())
        return pb.StoreReply(number=number)

    async def _compare_set(self, call: pb.StoreCall) -> pb.StoreReply:
        """Set the value where it is the expected one; a missing key counts as an empty one."""
        key = _only(call)
        if len(call.values) != 2:
            refuse(RefusalReason.SIZE, f"compare_set with {len(call.values)} values", "two")
        expected, desired = call.values
        found = self._values.get(key)
        if (found or b"") == expected:
            self._put(key, desired)
            found = desired
        return pb.StoreReply(values=[expected if found is None else found])

    async def _append(self, call: pb.StoreCall) -> pb.StoreReply:
        for key, value in _pairs(call):
            self._put(key, self._values.get(key, b"") + value)
        return pb.StoreReply()

    async def _check(self, call: pb.StoreCall) -> pb.StoreReply:
        return pb.StoreReply(there=all(key in self._values for key in call.keys))

    async def _delete(self, call: pb.StoreCall) -> pb.StoreReply:
        return pb.StoreReply(there=self._values.pop(_only(call), None) is not None)

    async def _count(self, _call: pb.StoreCall) -> pb.StoreReply:
        return pb.StoreReply(number=len(self._values))

    async def _list(self, _call: pb.StoreCall) -> pb.StoreReply:
        return pb.StoreReply(keys=list(self._values))


def _only(call: pb.StoreCall) -> str:
    if len(call.keys) != 1:
        refuse(RefusalReason.SIZE, f"{call.verb} with {len(call.keys)} keys", "one")
    return str(call.keys[0])


def _pairs(call: pb.StoreCall) -> Iterable[tuple[str, bytes]]:
    if len(call.keys) != len(call.values):
        refuse(RefusalReason.SIZE, f"{call.verb} with {len(call.keys)} keys and {len(call.values)} values", "as many")
    return zip(call.keys, call.values, strict=True)
